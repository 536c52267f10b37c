/* SPDX-License-Identifier: Apache-2.0 */
/* Reading configuration files. */
#include "container/config.h"

#include "base/mem.h"
#include "base/str.h"
#include "container/yaml.h"

static int parse(const char *name, const char *what, const char *text, size_t len, json_t **ret,
                 struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    bool yaml = ckpt_has_suffix(name, ".yaml") || ckpt_has_suffix(name, ".yml");

    if ((yaml ? ckpt_yaml_parse(text, len, what, &j, err)
              : ckpt_json_parse(text, len, what, &j, err)) < 0)
        return -1;
    if (!json_is_object(j))
        return ckpt_fail(err, CKPT_FORMAT, "%s is not %s", what,
                         yaml ? "a mapping" : "a JSON object");
    *ret = ckpt_steal(&j);
    return 0;
}

int ckpt_config_read(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_freep) char *what = ckpt_asprintf("'%s/%s'", ckpt_dir_path(dir), name);
    size_t len;

    if (!what)
        return ckpt_nomem(err);
    if (ckpt_dir_read_file(dir, name, max_len, &text, &len, err) < 0)
        return -1;
    return parse(name, what, text, len, ret, err);
}

int ckpt_config_read_if(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                        struct ckpt_err *err)
{
    struct ckpt_err e = {0};

    if (ckpt_config_read(dir, name, max_len, ret, &e) == 0 || e.code == CKPT_MISSING)
        return 0;
    return ckpt_err_move(err, &e);
}

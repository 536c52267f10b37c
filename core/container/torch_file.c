/* SPDX-License-Identifier: Apache-2.0 */
/* From an archive to tensors and values. */
#include "container/torch_file.h"

#include <inttypes.h>
#include <string.h>

#include "container/pickle_value.h"

int ckpt_torch_file_read(struct ckpt_source *s, struct ckpt_torch_file *ret, struct ckpt_err *err)
{
    ret->source = ckpt_source_ref(s);
    if (ckpt_torch_open(s, 0, s->size, &ret->archive, err) < 0)
        return -1;
    if (ret->archive.pickle->len > CKPT_TORCH_MAX_PICKLE)
        return ckpt_fail(err, CKPT_LIMIT, "its pickle has %" PRIu64 " bytes",
                         ret->archive.pickle->len);
    return ckpt_torch_pickle(&ret->archive, &ret->p, err);
}

int ckpt_torch_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_torch_file *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_file_new(dir, name, pool, &s, err) < 0)
        return -1;
    return ckpt_torch_file_read(s, ret, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), name)
               : 0;
}

void ckpt_torch_file_release(struct ckpt_torch_file *f)
{
    ckpt_pickle_release(&f->p);
    ckpt_torch_release(&f->archive);
    ckpt_source_unref(f->source);
}

int ckpt_torch_file_tensor(const struct ckpt_torch_file *f, ckpt_pv v,
                           struct ckpt_torch_tensor *ret, struct ckpt_err *err)
{
    struct ckpt_torch_layout l = {0};

    return ckpt_torch_layout_of(&f->p, v, &l, err) < 0
               ? -1
               : ckpt_torch_locate(&f->archive, &l, ret, err);
}

/* ---- values ---- */

/* Does only an attack need this global? */
static bool is_attack(const char *module, const char *name)
{
    static const char *const modules[] = {"os",        "posix",  "nt",    "subprocess",
                                          "shutil",    "socket", "runpy", "ctypes",
                                          "importlib", "pty",    "code",  "commands"};
    static const char *const builtins[] = {"eval",       "exec", "execfile", "compile",
                                           "__import__", "open", "input"};

    for (size_t i = 0; i < sizeof modules / sizeof modules[0]; i++)
        if (strcmp(module, modules[i]) == 0)
            return true;
    if (strcmp(module, "builtins") != 0 && strcmp(module, "__builtin__") != 0)
        return false;
    for (size_t i = 0; i < sizeof builtins / sizeof builtins[0]; i++)
        if (strcmp(name, builtins[i]) == 0)
            return true;
    return false;
}

int ckpt_torch_refuse_attack(const struct ckpt_pickle *p, struct ckpt_err *err)
{
    for (size_t i = 0; i < p->globals.len; i++) {
        const char *module = p->strs.ptr[p->globals.ptr[i].module].ptr;
        const char *name = p->strs.ptr[p->globals.ptr[i].name].ptr;
        if (is_attack(module, name))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "its pickle asks for %s.%s, which no checkpoint needs: refused "
                             "(nothing of it was run)",
                             module, name);
    }
    return 0;
}

int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    json_t *value = NULL;

    if (ckpt_torch_file_read(s, &f, err) < 0 || ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    const ckpt_pv root =
        ckpt_pv_len(&f.p, f.p.root) == 1 ? ckpt_pv_at(&f.p, f.p.root, 0) : f.p.root;
    if (leaves && ckpt_pickle_leaves(&f.p, root, name, out, err) < 0)
        return -1;
    if (!leaves && ckpt_pickle_value(&f.p, f.p.root, &value, err) < 0)
        return -1;
    return value && json_object_set_new(out, name, value) < 0 ? ckpt_nomem(err)
                                                              : ckpt_source_check(s, err);
}

int ckpt_torch_objects_of(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                          const char *prefix, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_file_new(dir, file, pool, &s, err) < 0)
        return -1;
    return ckpt_torch_object(s, prefix, true, out, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), file)
               : 0;
}

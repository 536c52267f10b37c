/* SPDX-License-Identifier: Apache-2.0 */
/* Reading small files of a directory, whole or their first bytes. */
#include "base/ckd.h"
#include "base/mem.h"
#include "io/source.h"

/* The file, to be read once. */
static int open_once(const struct ckpt_dir *dir, const char *name, struct ckpt_source **ret,
                     struct ckpt_err *err)
{
    struct ckpt_fdpool *pool = NULL;

    if (ckpt_fdpool_new(1, &pool, err) < 0)
        return -1;
    /* the source counts a reference, which changes nothing else */
    const int rc = ckpt_source_file_new((struct ckpt_dir *)dir, name, pool, ret, err);
    ckpt_fdpool_unref(pool);
    return rc;
}

static int read_first(const struct ckpt_dir *dir, struct ckpt_source *s, void *buf, size_t len,
                      struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    if (ckpt_source_pread(s, buf, len, 0, &own) == 0)
        return 0;
    if (own.code != CKPT_STALE)
        ckpt_dir_keep_trouble(dir, &own);
    return ckpt_err_move(err, &own);
}

size_t ckpt_dir_read_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (open_once(dir, name, &s, NULL) < 0)
        return 0;
    const size_t n = (size_t)ckpt_min_u64(cap, s->size);
    return read_first(dir, s, buf, n, NULL) < 0 ? 0 : n;
}

int ckpt_dir_read_file(const struct ckpt_dir *dir, const char *name, size_t max_len,
                       char **ret_text, size_t *ret_len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (open_once(dir, name, &s, err) < 0)
        return -1;
    const uint64_t size = s->size;
    if (size > max_len)
        return ckpt_fail(err, CKPT_LIMIT, "'%s/%s' has %llu bytes, at most %zu are expected",
                         ckpt_dir_path(dir), name, (unsigned long long)size, max_len);
    ckpt_cleanup(ckpt_freep) char *text = malloc((size_t)size + 1);
    if (!text)
        return ckpt_nomem(err);
    if (read_first(dir, s, text, (size_t)size, err) < 0)
        return -1;
    text[size] = '\0';
    *ret_text = ckpt_steal(&text);
    *ret_len = (size_t)size;
    return 0;
}

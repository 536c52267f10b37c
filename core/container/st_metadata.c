/* SPDX-License-Identifier: Apache-2.0 */
/* Keeping and joining the entries of __metadata__. */
#include "container/st_metadata.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"

/* An entry counts as so many bytes more than it is written with. It is about what an entry takes in
 * memory, so that millions of empty ones do not take more than a few long ones. */
enum { ENTRY_BYTES = 128 };

static bool is_kept(const char *key)
{
    static const char *const of_a_rank[] = {"DCP_SHARDING_INFO", "DCP_VERSION", NULL};

    return !ckpt_one_of(key, of_a_rank);
}

/* Counts the bytes of the entries, up to the limit; SIZE_MAX: there was no memory. */
static size_t size_of(const struct ckpt_st *st)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str one = {0};
    size_t size = 0;

    for (size_t i = 0; i < st->nmetadata && size <= CKPT_ST_MAX_KEPT; i++) {
        if (!is_kept(st->metadata[i].key))
            continue;
        ckpt_str_clear(&one);
        ckpt_st_put_string(&one, st->metadata[i].key);
        ckpt_st_put_string(&one, st->metadata[i].value);
        size += one.len + ENTRY_BYTES;
    }
    return one.failed ? SIZE_MAX : size;
}

int ckpt_st_metadata_keep(json_t **files, size_t *size, const char *file, const struct ckpt_st *st,
                          bool *ret_kept, struct ckpt_err *err)
{
    const size_t more = size_of(st);

    if (more == SIZE_MAX)
        return ckpt_nomem(err);
    const bool kept = more <= CKPT_ST_MAX_KEPT - *size;
    json_t *entries = json_object();
    for (size_t i = 0; kept && i < st->nmetadata; i++)
        if (is_kept(st->metadata[i].key))
            ckpt_json_set(&entries, st->metadata[i].key, json_string(st->metadata[i].value));
    if (!*files)
        *files = json_object();
    ckpt_json_set(files, file, entries);
    if (!*files)
        return ckpt_nomem(err);
    *size += kept ? more : 0;
    *ret_kept = kept;
    return 0;
}

/* Adds the entries of one file to those of the files before; a key that has another value there is
 * added to *differ. */
static void add(json_t **joined, json_t **differ, const json_t *entries)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)entries, key, value) {
        const json_t *has = json_object_get(*joined, key);
        if (!has)
            ckpt_json_set(joined, key, json_incref(value));
        else if (!json_equal(has, value))
            ckpt_json_set(differ, key, json_true());
    }
}

int ckpt_st_metadata_join(const json_t *files, json_t **ret, json_t **ret_differ,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *joined = files ? json_object() : NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *differ = json_object();
    ckpt_cleanup(ckpt_json_decrefp) json_t *keys = json_array();
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)files, key, value)
        add(&joined, &differ, value);
    json_object_foreach(differ, key, value) {
        (void)json_object_del(joined, key);
        ckpt_json_append(&keys, json_string(key));
    }
    if ((files && !joined) || !differ || !keys)
        return ckpt_nomem(err);
    *ret = ckpt_steal(&joined);
    *ret_differ = ckpt_steal(&keys);
    return 0;
}

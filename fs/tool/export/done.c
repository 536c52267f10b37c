/* SPDX-License-Identifier: Apache-2.0 */
/* Lines may come in any order, from any process, and twice. */
#include "tool/export/done.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "common.h"
#include "tool/pump.h"

int ckpt_done_init(struct ckpt_done *ret, const struct ckpt_items *items,
                   const struct ckpt_spans *spans, struct ckpt_err *err)
{
    *ret = (struct ckpt_done){.items = items, .spans = spans, .index = json_object()};
    ret->file = calloc(items->n + 1, sizeof *ret->file);
    ret->unit = calloc(spans->n + 1, sizeof *ret->unit);
    for (size_t i = 0; ret->index && i < items->n; i++) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *name = ckptfs_json_text(items->item[i].path);
        if (!name)
            return ckpt_nomem(err);
        ckpt_json_set(&ret->index, json_string_value(name), json_integer((json_int_t)i));
    }
    return ret->index && ret->file && ret->unit ? 0 : ckpt_nomem(err);
}

void ckpt_done_release(struct ckpt_done *d)
{
    for (size_t i = 0; d->file && i < d->items->n; i++) {
        ckpt_vec_release(&d->file[i].prefix);
        free(d->file[i].state);
    }
    free(d->file);
    free(d->unit);
    json_decref(d->index);
    *d = (struct ckpt_done){0};
}

/* A unit that a line means is one of these spans exactly. */
static void take_unit(struct ckpt_done *d, size_t item, uint64_t from, uint64_t len,
                      const XXH128_hash_t *hash)
{
    const uint64_t size = d->items->item[item].size, cut = d->spans->cut;

    if (from % cut || from >= size || len != (size - from < cut ? size - from : cut))
        return;
    struct ckpt_unit_done *unit = &d->unit[d->spans->first[item] + from / cut];
    unit->is = true;
    unit->hash = *hash;
    d->file[item].has_units = true;
}

/* Keep the state that has come farthest. */
static int take_state(struct ckpt_file_done *file, uint64_t size, const json_t *line,
                      struct ckpt_err *err)
{
    const char *state = ckpt_json_str(line, "state");
    uint64_t hashed;

    if (!state || !ckpt_json_u64(line, "hashed", &hashed) || hashed <= file->hashed ||
        hashed > size)
        return 0;
    free(file->state);
    file->hashed = 0;
    if (!(file->state = strdup(state)))
        return ckpt_nomem(err);
    file->hashed = hashed;
    return 0;
}

int ckpt_done_take(struct ckpt_done *d, const json_t *line, struct ckpt_err *err)
{
    const char *path = ckpt_json_str(line, "file"), *hex = ckpt_json_str(line, "xxh3");
    const json_t *at = path ? json_object_get(d->index, path) : NULL;
    const size_t item = (size_t)json_integer_value(at);
    uint64_t from, len, mtime_ns = 0;
    XXH128_hash_t hash;

    if (at && !hex)
        return take_state(&d->file[item], d->items->item[item].size, line, err);
    if (!at || !ckpt_hash_of_hex(hex, &hash) || !ckpt_json_u64(line, "len", &len) ||
        len > d->items->item[item].size)
        return 0;
    struct ckpt_file_done *file = &d->file[item];
    if (ckpt_json_u64(line, "from", &from)) {
        take_unit(d, item, from, len, &hash);
    } else if (ckpt_json_u64(line, "mtime_ns", &mtime_ns) && mtime_ns) {
        if (len == d->items->item[item].size) {
            file->whole = true;
            file->mtime_ns = (int64_t)mtime_ns;
            file->hash = hash;
        }
    } else if (len && ckpt_vec_push(&file->prefix, ((struct ckpt_prefix){len, hash})) < 0) {
        return ckpt_nomem(err);
    }
    return 0;
}

void ckpt_done_forget(struct ckpt_done *d, size_t item)
{
    ckpt_vec_release(&d->file[item].prefix);
    free(d->file[item].state);
    d->file[item] = (struct ckpt_file_done){0};
    for (size_t u = d->spans->first[item]; u < d->spans->first[item + 1]; u++)
        d->unit[u].is = false;
}

bool ckpt_done_any(const struct ckpt_done *d)
{
    for (size_t i = 0; i < d->items->n; i++)
        if (d->file[i].whole || d->file[i].has_units || d->file[i].prefix.len)
            return true;
    return false;
}

bool ckpt_done_has(const struct ckpt_done *d, size_t item, size_t unit)
{
    const struct ckpt_file_done *file = &d->file[item];
    uint64_t from, to;

    (void)ckpt_spans_place(d->spans, d->items, unit, &from, &to);
    if (file->whole || d->unit[unit].is)
        return true;
    for (size_t i = 0; i < file->prefix.len; i++)
        if (to && file->prefix.ptr[i].len >= to)
            return true;
    return false;
}

bool ckpt_done_has_all(const struct ckpt_done *d, size_t item)
{
    for (size_t u = d->spans->first[item]; u < d->spans->first[item + 1]; u++)
        if (!ckpt_done_has(d, item, u))
            return false;
    return true;
}

json_t *ckpt_done_line(const char *path, uint64_t len, int64_t mtime_ns, const XXH128_hash_t *hash)
{
    char hex[CKPT_HEX];

    return json_pack("{s:o, s:I, s:I, s:s}", "file", ckptfs_json_text(path), "len", (json_int_t)len,
                     "mtime_ns", (json_int_t)mtime_ns, "xxh3", ckpt_hash_hex(hash, hex));
}

json_t *ckpt_done_unit_line(const char *path, uint64_t from, uint64_t len,
                            const XXH128_hash_t *hash)
{
    char hex[CKPT_HEX];

    return json_pack("{s:o, s:I, s:I, s:s}", "file", ckptfs_json_text(path), "from",
                     (json_int_t)from, "len", (json_int_t)len, "xxh3", ckpt_hash_hex(hash, hex));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a node's directory, and walks through it. An entry is a struct entry, and the path with its
 * NUL. */
#include "load/local/listing.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "io/far/dir_bounded.h"

enum {
    MOST_ENTRIES = 1 << 20, /* of one directory: some 150 MB at rank 0, if 1 rank has that many */
    MOST_DEPTH = 32,        /* of folders: links can make a circle */
};

/* Numbers are as this machine has them: all ranks of a job run the same library. */
struct entry {
    struct ckpt_file_id id;
    uint16_t path_len; /* with the NUL */
    uint8_t kind, is_link;
    uint32_t unused;
};

/* ---- the directory of a node ---- */

int ckpt_listing_path(const char *given, uint32_t rank, uint32_t node, char **ret,
                      struct ckpt_err *err)
{
    struct ckpt_str path = {0};

    for (const char *at = given; *at;) {
        const bool is_rank = ckpt_has_prefix(at, "{rank}"), is_node = ckpt_has_prefix(at, "{node}");
        if (is_rank || is_node)
            ckpt_str_put_u64(&path, is_rank ? rank : node);
        else
            ckpt_str_putc(&path, *at);
        at += is_rank || is_node ? strlen("{rank}") : 1;
    }
    return ckpt_str_steal(&path, ret, err);
}

int ckpt_listing_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                      struct ckpt_err *err)
{
    if (ckpt_path_is_file_bounded(path, &how->far))
        return ckpt_fail(err, CKPT_USAGE, "'%s' is a file: a local load needs a directory", path);
    return ckpt_archive_open(path, how, ret, err);
}

int ckpt_listing_errno(struct ckpt_err *own, struct ckpt_err *err)
{
    return own->code == CKPT_MISSING ? ENOENT : ckpt_err_move(err, own);
}

/* ---- entries ---- */

void ckpt_seen_put(struct ckpt_str *out, const struct ckpt_seen *e)
{
    const size_t len = strlen(e->path) + 1;
    const struct entry entry = {e->id, (uint16_t)len, (uint8_t)e->kind, e->is_link, 0};

    ckpt_str_append(out, (const char *)&entry, sizeof entry);
    ckpt_str_append(out, e->path, len);
}

int ckpt_seen_get(struct ckpt_cursor *c, struct ckpt_seen *ret, struct ckpt_err *err)
{
    struct entry e = {0};

    if (!ckpt_cursor_left(c))
        return 0;
    const void *start = ckpt_cursor_take(c, sizeof e);
    if (start)
        memcpy(&e, start, sizeof e);
    const char *path = ckpt_cursor_take(c, e.path_len);
    if (c->failed)
        return ckpt_cursor_report(c, err);
    if (e.path_len == 0 || e.path_len > PATH_MAX || strnlen(path, e.path_len) != e.path_len - 1u ||
        !ckpt_below_ok(path) || e.kind > CKPT_ENTRY_OTHER)
        return ckpt_fail(err, CKPT_FORMAT, "%s is damaged", c->name);
    *ret = (struct ckpt_seen){path, (enum ckpt_entry_kind)e.kind, e.is_link != 0, e.id};
    return 1;
}

int ckpt_listing_digest(const void *data, size_t len, uint64_t *ret, struct ckpt_err *err)
{
    XXH64_hash_t h = 0;
    struct ckpt_cursor c;
    struct ckpt_seen e;
    int rc;

    ckpt_cursor_init(&c, data, len, 0, "a listing");
    while ((rc = ckpt_seen_get(&c, &e, err)) > 0) {
        uint64_t word[4] = {(uint64_t)e.kind};
        if (e.kind == CKPT_ENTRY_FILE) {
            word[1] = e.id.size;
            word[2] = (uint64_t)e.id.mtime_ns;
            word[3] = (uint64_t)e.id.ctime_ns;
        }
        h = XXH3_64bits_withSeed(word, sizeof word, h);
        h = XXH3_64bits_withSeed(e.path, strlen(e.path), h);
    }
    *ret = h;
    return rc;
}

struct walk {
    struct ckpt_dir *dir; /* in which it is now */
    const char *below;    /* the way to it; "" at first */
    struct ckpt_str *out;
    uint32_t depth, *n; /* n: entries so far */
};

static int walk(struct walk *w, struct ckpt_err *err);

static int see_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    const struct walk *w = ctx;
    ckpt_cleanup(ckpt_freep) char *path =
        ckpt_asprintf("%s%s%s", w->below, *w->below ? "/" : "", e->name);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *inner = NULL;
    struct ckpt_dir_found found;

    if (!path)
        return ckpt_nomem(err);
    if (strlen(path) >= PATH_MAX || ++*w->n > MOST_ENTRIES)
        return ckpt_fail(err, CKPT_LIMIT,
                         "'%s' has more than %d entries, or too long a path: give the folder of "
                         "the run alone",
                         ckpt_dir_path(w->dir), MOST_ENTRIES);
    if (e->kind == CKPT_ENTRY_OTHER || ckpt_dir_look(w->dir, e->name, &found, NULL) < 0)
        return 0; /* no file that a reader could open, or gone already */
    const struct ckpt_seen entry = {path, found.kind, e->is_link, found.id};
    ckpt_seen_put(w->out, &entry);
    if (found.kind != CKPT_ENTRY_DIR)
        return 0;
    if (w->depth == MOST_DEPTH)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has folders that are %d deep: is a link a circle?",
                         ckpt_dir_path(w->dir), MOST_DEPTH);
    if (ckpt_dir_open_below(w->dir, e->name, &inner, err) < 0)
        return -1;
    struct walk next = {inner, path, w->out, w->depth + 1, w->n};
    return walk(&next, err);
}

static int walk(struct walk *w, struct ckpt_err *err)
{
    return ckpt_dir_list(w->dir, see_entry, w, err);
}

int ckpt_listing_read(struct ckpt_dir *dir, struct ckpt_str *out, struct ckpt_err *err)
{
    uint32_t n = 0;
    struct walk w = {dir, "", out, 0, &n};
    struct ckpt_dir_found itself;

    if (ckpt_dir_look(dir, ".", &itself, err) < 0)
        return -1;
    ckpt_seen_put(out, &(struct ckpt_seen){".", CKPT_ENTRY_DIR, false, itself.id});
    if (walk(&w, err) < 0)
        return -1;
    return out->failed ? ckpt_nomem(err) : 0;
}

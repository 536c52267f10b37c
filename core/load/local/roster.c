/* SPDX-License-Identifier: Apache-2.0 */
/* Merging listings, and the table that comes of it. Its bytes are, for each entry, the entry of a
 * listing, a struct tail, and its holders. */
#include "load/local/roster.h"

#include <errno.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

struct tail {
    uint32_t nholder, differs;
};

void ckpt_roster_release(struct ckpt_roster *r)
{
    ckpt_vec_release(&r->entry);
    ckpt_vec_release(&r->holder);
    ckpt_arena_release(&r->arena);
}

/* ---- order ---- */

static size_t name_at(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* A folder, as the beginning of paths below it: "" or "a/b/". */
struct folder {
    const char *path;
    size_t len;
};

static int folder_cmp(const struct folder *a, const struct folder *b)
{
    const int c = memcmp(a->path, b->path, ckpt_min_u64(a->len, b->len));

    return c ? c : ckpt_u64_cmp(a->len, b->len);
}

static int path_cmp(const char *a, size_t a_name, const char *b, size_t b_name)
{
    const int c = folder_cmp(&(struct folder){a, a_name}, &(struct folder){b, b_name});

    return c ? c : ckpt_natural_cmp(a + a_name, b + b_name);
}

/* ---- merging ---- */

/* An entry of one rank's listing. */
struct found {
    struct ckpt_seen is;
    size_t name;
    uint32_t rank;
};

typedef CKPT_VEC(struct found) found_vec;

static int found_cmp(const void *pa, const void *pb)
{
    const struct found *a = pa, *b = pb;
    const int c = path_cmp(a->is.path, a->name, b->is.path, b->name);

    return c ? c : ckpt_u64_cmp(a->rank, b->rank);
}

static int take_listing(found_vec *all, const void *data, size_t len, uint32_t rank,
                        struct ckpt_err *err)
{
    struct found f = {.rank = rank};
    struct ckpt_cursor c;
    int rc;

    if (len == 0)
        return 0;
    ckpt_cursor_init(&c, data, len, 0, "the listing of a rank");
    while ((rc = ckpt_seen_get(&c, &f.is, err)) > 0) {
        f.name = name_at(f.is.path);
        if (ckpt_vec_push(all, f) < 0)
            return ckpt_nomem(err);
    }
    return rc < 0 ? ckpt_err_in(err, "rank %u", rank) : 0;
}

static bool is_same_time(const struct ckpt_file_id *a, const struct ckpt_file_id *b)
{
    return a->mtime_ns == b->mtime_ns && a->ctime_ns == b->ctime_ns;
}

/* Append what n ranks have by one name. */
static void put_entry(struct ckpt_str *out, const struct found *f, size_t n)
{
    struct ckpt_seen is = f->is;
    struct tail tail = {0, CKPT_NONE};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str holders = {0};

    for (size_t i = 0; i < n; i++) {
        const struct ckpt_seen *other = &f[i].is;
        const bool is_file = is.kind == CKPT_ENTRY_FILE;
        if (other->kind != is.kind || (is_file && other->id.size != is.id.size)) {
            tail.differs = f[i].rank;
            continue;
        }
        const struct ckpt_holder h = {f[i].rank, is_file && !is_same_time(&is.id, &other->id)};
        ckpt_str_append(&holders, (const char *)&h, sizeof h);
        tail.nholder++;
        if (!is_file && other->id.mtime_ns > is.id.mtime_ns)
            is.id.mtime_ns = other->id.mtime_ns;
        if (!is_file && other->id.ctime_ns > is.id.ctime_ns)
            is.id.ctime_ns = other->id.ctime_ns;
    }
    ckpt_seen_put(out, &is);
    ckpt_str_append(out, (const char *)&tail, sizeof tail);
    ckpt_str_append(out, ckpt_str_get(&holders), holders.len);
    out->failed |= holders.failed;
}

int ckpt_roster_merge(const unsigned char *const *data, const size_t *len, uint32_t n,
                      struct ckpt_str *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vec_cleanup) found_vec all = {0};
    size_t next;

    for (uint32_t r = 0; r < n; r++)
        if (take_listing(&all, data[r], len[r], r, err) < 0)
            return -1;
    ckpt_sort(all.ptr, all.len, found_cmp);
    for (size_t i = 0; i < all.len; i = next) {
        for (next = i + 1; next < all.len; next++)
            if (strcmp(all.ptr[i].is.path, all.ptr[next].is.path) != 0)
                break;
        put_entry(out, &all.ptr[i], next - i);
    }
    return out->failed ? ckpt_nomem(err) : 0;
}

/* ---- decoding ---- */

static int bad(const struct ckpt_cursor *c, struct ckpt_err *err)
{
    return c->failed ? ckpt_cursor_report(c, err)
                     : ckpt_fail(err, CKPT_FORMAT, "%s is damaged", c->name);
}

static int take_holders(struct ckpt_cursor *c, struct ckpt_roster *r, uint32_t n, uint32_t nrank,
                        struct ckpt_err *err)
{
    const void *start = n <= nrank ? ckpt_cursor_take(c, n * sizeof(struct ckpt_holder)) : NULL;

    if (!start || n == 0)
        return bad(c, err);
    if (ckpt_vec_reserve(&r->holder, n) < 0)
        return ckpt_nomem(err);
    memcpy(r->holder.ptr + r->holder.len, start, n * sizeof(struct ckpt_holder));
    for (uint32_t i = 0; i < n; i++)
        if (r->holder.ptr[r->holder.len++].rank >= nrank)
            return bad(c, err);
    return 0;
}

static int take_entry(struct ckpt_cursor *c, struct ckpt_roster *r, const struct ckpt_seen *is,
                      uint32_t nrank, struct ckpt_err *err)
{
    struct ckpt_roster_entry e = {.is = *is, .holder = (uint32_t)r->holder.len};
    const void *start = ckpt_cursor_take(c, sizeof(struct tail));
    struct tail tail = {0};

    if (start)
        memcpy(&tail, start, sizeof tail);
    if (take_holders(c, r, tail.nholder, nrank, err) < 0)
        return -1;
    if (tail.differs != CKPT_NONE && tail.differs >= nrank)
        return bad(c, err);
    e.nholder = tail.nholder;
    e.differs = tail.differs;
    e.name = name_at(is->path);
    if (r->entry.len) {
        const struct ckpt_roster_entry *before = &r->entry.ptr[r->entry.len - 1];
        if (path_cmp(before->is.path, before->name, is->path, e.name) >= 0)
            return bad(c, err);
    }
    if (!(e.is.path = ckpt_arena_strdup(&r->arena, is->path)) || ckpt_vec_push(&r->entry, e) < 0)
        return ckpt_nomem(err);
    return 0;
}

int ckpt_roster_decode(const void *data, size_t len, uint32_t nrank, struct ckpt_roster *ret,
                       struct ckpt_err *err)
{
    struct ckpt_cursor c;
    struct ckpt_seen is;
    int rc;

    ckpt_cursor_init(&c, data, len, 0, "the list of all ranks' files");
    while ((rc = ckpt_seen_get(&c, &is, err)) > 0)
        if (take_entry(&c, ret, &is, nrank, err) < 0)
            return -1;
    return rc;
}

/* ---- questions ---- */

/* The index of the first entry that is not before this path. */
static size_t lower_bound(const struct ckpt_roster *r, const char *path, size_t name)
{
    size_t lo = 0, hi = r->entry.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        const struct ckpt_roster_entry *e = &r->entry.ptr[mid];
        if (path_cmp(e->is.path, e->name, path, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

const struct ckpt_roster_entry *ckpt_roster_find(const struct ckpt_roster *r, const char *path)
{
    const size_t i = lower_bound(r, path, name_at(path));

    return i < r->entry.len && strcmp(r->entry.ptr[i].is.path, path) == 0 ? &r->entry.ptr[i] : NULL;
}

int ckpt_roster_list(const struct ckpt_roster *r, const char *path, struct ckpt_str *list)
{
    const struct ckpt_roster_entry *of = ckpt_roster_find(r, path);

    if (!of)
        return ENOENT;
    if (of->is.kind != CKPT_ENTRY_DIR)
        return ENOTDIR;
    const bool is_top = strcmp(path, ".") == 0;
    ckpt_cleanup(ckpt_freep) char *folder = is_top ? strdup("") : ckpt_asprintf("%s/", path);
    const size_t len = folder ? strlen(folder) : 0;

    list->failed |= !folder;
    for (size_t i = folder ? lower_bound(r, folder, len) : r->entry.len; i < r->entry.len; i++) {
        const struct ckpt_roster_entry *e = &r->entry.ptr[i];
        if (e->name != len || memcmp(e->is.path, folder, len) != 0)
            break;
        if (strcmp(e->is.path, ".") != 0)
            ckpt_listed_add(list,
                            &(struct ckpt_entry){e->is.path + e->name, e->is.kind, e->is.is_link});
    }
    return 0;
}

bool ckpt_roster_has(const struct ckpt_roster *r, const struct ckpt_roster_entry *e, uint32_t rank)
{
    for (uint32_t i = 0; i < e->nholder; i++)
        if (r->holder.ptr[e->holder + i].rank == rank)
            return true;
    return false;
}

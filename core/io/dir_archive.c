/* SPDX-License-Identifier: Apache-2.0 */
/* A tree of names: entries in one array, found by a map from (parent, name). */
#include "io/dir_archive.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/far/dir_bounded.h"
#include "io/recording.h"

enum { ROOT, MAX_LINKS = 40 /* that one look-up follows, as in the kernel */ };

struct node {
    const char *name, *target; /* in the arena; target NULL: no symbolic link */
    uint32_t parent;
    struct ckpt_member is;
};

struct ckpt_archive_index {
    CKPT_VEC(struct node) nodes; /* the first is the archive itself */
    CKPT_VEC(uint32_t) order;    /* of the nodes, by parent and name */
    struct ckpt_map by_key;
    struct ckpt_arena arena;
};

/* The map finds a node by this key: the number of its parent, and its name. */
struct key {
    char bytes[sizeof(uint32_t) + CKPT_ARCHIVE_MAX_NAME];
    size_t len;
};

static void key_set(struct key *k, uint32_t parent, const char *name, size_t len)
{
    memcpy(k->bytes, &parent, sizeof parent);
    memcpy(k->bytes + sizeof parent, name, len);
    k->len = sizeof parent + len;
}

int ckpt_archive_index_new(struct ckpt_archive_index **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_archive_index_freep) struct ckpt_archive_index *m = calloc(1, sizeof *m);
    struct node top = {.name = "", .is.kind = CKPT_ENTRY_DIR};

    if (!m || ckpt_vec_push(&m->nodes, top) < 0)
        return ckpt_nomem(err);
    *ret = ckpt_steal(&m);
    return 0;
}

void ckpt_archive_index_free(struct ckpt_archive_index *m)
{
    if (!m)
        return;
    ckpt_vec_release(&m->nodes);
    ckpt_vec_release(&m->order);
    ckpt_map_release(&m->by_key);
    ckpt_arena_release(&m->arena);
    free(m);
}

/* ---- adding ---- */

/* The next component of a path: its length, 0 at the end. "." and empty ones are skipped. */
static size_t next_part(const char **path, const char *end)
{
    for (;;) {
        while (*path < end && **path == '/')
            ++*path;
        const char *slash = memchr(*path, '/', (size_t)(end - *path));
        const size_t len = (size_t)((slash ? slash : end) - *path);
        if (len != 1 || **path != '.')
            return len;
        ++*path;
    }
}

static bool is_parent(const char *part, size_t len)
{
    return len == 2 && memcmp(part, "..", 2) == 0;
}

static int fail_name(const char *name, size_t len, const char *why, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "member '%.*s' %s", (int)len, name, why);
}

/* Find or make the node `name` below `parent`. */
static int put_node(struct ckpt_archive_index *m, uint32_t parent, const char *name, size_t len,
                    uint32_t *ret, struct ckpt_err *err)
{
    struct key key;

    key_set(&key, parent, name, len);
    if (ckpt_map_get(&m->by_key, key.bytes, key.len, ret))
        return 0;
    if (m->nodes.len >= CKPT_ARCHIVE_MAX_MEMBERS)
        return ckpt_fail(err, CKPT_LIMIT, "the archive has more than %d members",
                         CKPT_ARCHIVE_MAX_MEMBERS);
    char *own = ckpt_arena_strndup(&m->arena, key.bytes, key.len);
    struct node node = {.name = own ? own + sizeof parent : NULL, .parent = parent};
    bool is_new;
    node.is.number = (uint32_t)m->nodes.len;
    if (!own || ckpt_vec_push(&m->nodes, node) < 0 ||
        ckpt_map_put(&m->by_key, own, key.len, node.is.number, ret, &is_new) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* Go to the node of a path, making what is missing. */
static int put_path(struct ckpt_archive_index *m, const char *name, size_t name_len, uint32_t *ret,
                    bool *ret_new, struct ckpt_err *err)
{
    const char *at = name, *end = name + name_len;
    uint32_t node = ROOT;

    *ret_new = false;
    if (name_len > CKPT_ARCHIVE_MAX_NAME)
        return fail_name(name, 60, "...: the name is too long", err);
    for (size_t len; (len = next_part(&at, end)) > 0; at += len) {
        struct node *above = &m->nodes.ptr[node];
        if (is_parent(at, len))
            return fail_name(name, name_len, "would lie outside the folder of the archive", err);
        if (*ret_new)
            above->is.kind = CKPT_ENTRY_DIR;
        if (above->target || above->is.kind != CKPT_ENTRY_DIR)
            return fail_name(name, name_len, "lies below a member that is not a folder", err);
        const size_t before = m->nodes.len;
        if (put_node(m, node, at, len, &node, err) < 0)
            return -1;
        *ret_new = m->nodes.len > before;
    }
    *ret = node;
    return 0;
}

/* Put an entry at a path, or replace the one that is there. */
static int put_entry(struct ckpt_archive_index *m, const char *name, size_t name_len,
                     const struct ckpt_member *what, const char *target, struct ckpt_err *err)
{
    uint32_t at = 0;
    bool is_new;

    if (put_path(m, name, name_len, &at, &is_new, err) < 0)
        return -1;
    struct node *n = &m->nodes.ptr[at];
    const bool was_dir = n->is.kind == CKPT_ENTRY_DIR && !n->target;
    const bool is_dir = what->kind == CKPT_ENTRY_DIR && !target;
    if (!is_new && was_dir != is_dir)
        return fail_name(name, name_len, "is a folder and no folder", err);
    n->is = (struct ckpt_member){what->kind, what->off, what->len, at};
    n->target = target;
    return 0;
}

int ckpt_archive_index_add(struct ckpt_archive_index *m, const char *name, size_t name_len,
                           const struct ckpt_member *what, struct ckpt_err *err)
{
    return put_entry(m, name, name_len, what, NULL, err);
}

int ckpt_archive_index_add_link(struct ckpt_archive_index *m, const char *name, size_t name_len,
                                const char *target, struct ckpt_err *err)
{
    const struct ckpt_member other = {.kind = CKPT_ENTRY_OTHER};
    char *own =
        strlen(target) > CKPT_ARCHIVE_MAX_NAME ? NULL : ckpt_arena_strdup(&m->arena, target);

    return own ? put_entry(m, name, name_len, &other, own, err)
           : strlen(target) > CKPT_ARCHIVE_MAX_NAME
               ? fail_name(name, name_len, "is a link to a name that is too long", err)
               : ckpt_nomem(err);
}

static int by_parent_and_name(const void *a, const void *b, void *ctx)
{
    const struct ckpt_archive_index *m = ctx;
    const struct node *x = &m->nodes.ptr[*(const uint32_t *)a];
    const struct node *y = &m->nodes.ptr[*(const uint32_t *)b];
    const int c = ckpt_u64_cmp(x->parent, y->parent);

    return c ? c : ckpt_natural_cmp(x->name, y->name);
}

int ckpt_archive_index_seal(struct ckpt_archive_index *m, struct ckpt_err *err)
{
    if (ckpt_vec_reserve(&m->order, m->nodes.len) < 0)
        return ckpt_nomem(err);
    for (size_t i = 1; i < m->nodes.len; i++)
        m->order.ptr[m->order.len++] = (uint32_t)i;
    if (m->order.len)
        qsort_r(m->order.ptr, m->order.len, sizeof *m->order.ptr, by_parent_and_name, m);
    return 0;
}

/* ---- looking up ---- */

/* Walk a path from a node. 0 or an errno. Links count in *links. */
static int walk(const struct ckpt_archive_index *m, uint32_t from, const char *path,
                unsigned *links, uint32_t *ret)
{
    const char *end = path + strlen(path);
    struct key key;

    for (size_t len; (len = next_part(&path, end)) > 0; path += len) {
        uint32_t child = m->nodes.ptr[from].parent;
        if (m->nodes.ptr[from].is.kind != CKPT_ENTRY_DIR)
            return ENOTDIR;
        if (is_parent(path, len) && from == ROOT)
            return EXDEV;
        if (!is_parent(path, len)) {
            if (len > CKPT_ARCHIVE_MAX_NAME)
                return ENOENT;
            key_set(&key, from, path, len);
            if (!ckpt_map_get(&m->by_key, key.bytes, key.len, &child))
                return ENOENT;
        }
        const char *target = m->nodes.ptr[child].target;
        if (target && ++*links > MAX_LINKS)
            return ELOOP;
        if (target && *target == '/')
            return EXDEV;
        const int rc = target ? walk(m, from, target, links, &child) : 0;
        if (rc)
            return rc;
        from = child;
    }
    *ret = from;
    return 0;
}

/* Look up a path ("." is the archive itself), following links. 0, or an errno: ENOENT, ENOTDIR,
 * ELOOP, EXDEV (a link leads out of the archive). */
static int index_find(const struct ckpt_archive_index *m, const char *path, struct ckpt_member *ret)
{
    unsigned links = 0;
    uint32_t at;
    const int rc = walk(m, ROOT, path, &links, &at);

    if (rc == 0)
        *ret = m->nodes.ptr[at].is;
    return rc;
}

int ckpt_archive_index_add_same(struct ckpt_archive_index *m, const char *name, size_t name_len,
                                const char *as, struct ckpt_err *err)
{
    struct ckpt_member file;

    if (index_find(m, as, &file) != 0 || file.kind != CKPT_ENTRY_FILE)
        return fail_name(name, name_len,
                         "is a hard link to a file that is not before it in the archive", err);
    return put_entry(m, name, name_len, &file, NULL, err);
}

/* The place of the folder's first entry in the order. */
static size_t first_below(const struct ckpt_archive_index *m, uint32_t folder)
{
    size_t lo = 0, hi = m->order.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (m->nodes.ptr[m->order.ptr[mid]].parent < folder)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Append the entries of the folder with this number to ret (ckpt_listed_add). */
static void index_list(const struct ckpt_archive_index *m, uint32_t folder, struct ckpt_str *ret)
{
    for (size_t i = first_below(m, folder); i < m->order.len; i++) {
        const struct node *n = &m->nodes.ptr[m->order.ptr[i]];
        uint32_t at = m->order.ptr[i];
        unsigned links = 0;
        if (n->parent != folder)
            break;
        if (n->target && walk(m, folder, n->name, &links, &at) != 0)
            at = m->order.ptr[i];
        ckpt_listed_add(ret,
                        &(struct ckpt_entry){n->name, m->nodes.ptr[at].is.kind, n->target != NULL});
    }
}

/* ---- an archive as a directory ---- */

struct archive {
    struct ckpt_dir *folder; /* in which the archive is */
    char *name;
    ckpt_archive_reader *reader;
    pthread_mutex_t lock;             /* protects everything below */
    struct ckpt_archive_index *index; /* NULL: the archive could not be read when it had changed */
    struct ckpt_file_id id;           /* of the archive that `index` was read from */
};

static void archive_free(void *ctx)
{
    struct archive *a = ctx;

    if (!a)
        return;
    ckpt_archive_index_free(a->index);
    ckpt_dir_unref(a->folder);
    free(a->name);
    (void)pthread_mutex_destroy(&a->lock);
    free(a);
}

static void archive_freep(struct archive **a) { archive_free(*a); }

/* Read the index again if the archive is not the one that it was read from. */
static int refresh(struct archive *a, struct ckpt_err *err)
{
    struct ckpt_file_id now;

    if (ckpt_dir_identify(a->folder, a->name, &now, err) < 0)
        return -1;
    if (a->index && ckpt_file_id_eq(&now, &a->id))
        return 0;
    ckpt_archive_index_free(a->index);
    a->index = NULL;
    return a->reader(a->folder, a->name, &a->index, &a->id, err);
}

/* Call with the lock held. */
static int find(struct archive *a, const char *below, struct ckpt_member *ret, struct ckpt_err *err)
{
    return refresh(a, err) < 0 ? -1 : index_find(a->index, below, ret);
}

static int archive_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    struct archive *a = ctx;
    struct ckpt_member member = {0};

    (void)pthread_mutex_lock(&a->lock);
    const int rc = find(a, below, &member, err);
    *ret = (struct ckpt_dir_found){member.kind, a->id, {member.off, member.len}, 0};
    (void)pthread_mutex_unlock(&a->lock);
    if (member.kind == CKPT_ENTRY_DIR)
        ret->id.inode ^= (uint64_t)(member.number + 1) << 32;
    return rc;
}

static int archive_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct archive *a = ctx;
    struct ckpt_member folder;

    (void)pthread_mutex_lock(&a->lock);
    const int rc = find(a, below, &folder, err);
    if (rc == 0)
        index_list(a->index, folder.number, ret);
    (void)pthread_mutex_unlock(&a->lock);
    return rc;
}

static const struct ckpt_dir_ops archive_ops = {
    .look = archive_look, .list = archive_list, .free = archive_free};

/* ---- opening ---- */

/* The folder of an archive is only passed through: other files in it may be private. */
static int open_folder(struct archive *a, const char *path, const struct ckpt_far_options *far,
                       struct ckpt_err *err)
{
    const char *slash = strrchr(path, '/');
    ckpt_cleanup(ckpt_freep) char *above = !slash          ? strdup(".")
                                           : slash == path ? strdup("/")
                                                           : strndup(path, (size_t)(slash - path));

    a->name = strdup(slash ? slash + 1 : path);
    return !above || !a->name ? ckpt_nomem(err)
                              : ckpt_dir_open_passage_bounded(above, far, &a->folder, err);
}

int ckpt_dir_open_archive(const char *path, ckpt_archive_reader *reader,
                          const struct ckpt_far_options *far, struct ckpt_recording *rec,
                          struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(archive_freep) struct archive *a = calloc(1, sizeof *a);

    if (!a)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&a->lock, NULL);
    a->reader = reader;
    if (open_folder(a, path, far, err) < 0)
        return -1;
    ckpt_dir_set_far(a->folder, far);
    if (ckpt_dir_bound(a->folder, err) < 0 || ckpt_dir_use(a->folder, rec, err) < 0 ||
        reader(a->folder, a->name, &a->index, &a->id, err) < 0 ||
        ckpt_dir_open_other(path, (struct ckpt_dir_way){&archive_ops, a}, a->folder, a->name, ret,
                            err) < 0)
        return -1;
    (void)ckpt_steal(&a);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a directory, over the index of an archive. */
#include "io/dir_archive.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/copy.h"

struct archive {
    struct ckpt_dir *folder; /* in which the archive is */
    char *name;
    ckpt_archive_index *index;
    pthread_mutex_t lock;         /* protects everything below */
    struct ckpt_members *members; /* NULL: the archive could not be read when it had changed */
    struct ckpt_file_id id;       /* of the archive that `members` was read from */
    bool replayed;                /* it was read from a recording, and has not been compared */
};

static void archive_free(void *ctx)
{
    struct archive *a = ctx;

    if (!a)
        return;
    ckpt_members_free(a->members);
    ckpt_dir_unref(a->folder);
    free(a->name);
    (void)pthread_mutex_destroy(&a->lock);
    free(a);
}

static void archive_freep(struct archive **a) { archive_free(*a); }

/* Is the archive that is there now the one whose index was replayed, or a copy of it? */
static bool is_replayed(const struct archive *a, const struct ckpt_file_id *now)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct ckpt_file_id opened;

    return a->replayed && ckpt_dir_open_file(a->folder, a->name, &fd, &opened, NULL, NULL) == 0 &&
           ckpt_file_id_eq(&opened, now) &&
           ckpt_copy_accept(a->folder, a->name, fd, now, &a->id, NULL) == 0;
}

/* Read the index again if the archive is not the one that it was read from. */
static int refresh(struct archive *a, struct ckpt_err *err)
{
    struct ckpt_file_id now;

    if (ckpt_dir_identify(a->folder, a->name, &now, err) < 0)
        return -1;
    if (a->members && ckpt_file_id_eq(&now, &a->id))
        return 0;
    if (a->members && is_replayed(a, &now)) {
        a->id = now;
        a->replayed = false;
        return 0;
    }
    a->replayed = false;
    ckpt_members_free(a->members);
    a->members = NULL;
    return a->index(a->folder, a->name, &a->members, &a->id, err);
}

/* Call with the lock held. */
static int find(struct archive *a, const char *below, struct ckpt_member *ret, struct ckpt_err *err)
{
    return refresh(a, err) < 0 ? -1 : ckpt_members_find(a->members, below, ret);
}

static int archive_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    struct archive *a = ctx;
    struct ckpt_member member = {0};

    (void)pthread_mutex_lock(&a->lock);
    const int rc = find(a, below, &member, err);
    *ret = (struct ckpt_dir_found){member.kind, a->id, {member.off, member.len}};
    (void)pthread_mutex_unlock(&a->lock);
    if (member.kind == CKPT_ENTRY_DIR)
        ret->id.inode ^= (uint64_t)(member.number + 1) << 32;
    return rc;
}

static int archive_open(void *ctx, int *ret_fd, struct ckpt_file_id *ret_id, struct ckpt_err *err)
{
    const struct archive *a = ctx;

    return ckpt_dir_open_file(a->folder, a->name, ret_fd, ret_id, NULL, err);
}

/* ---- lists ---- */

struct copied {
    CKPT_VEC(struct ckpt_entry) entries;
    struct ckpt_arena arena;
};

static int copy_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct copied *c = ctx;
    struct ckpt_entry own = *e;

    if (!(own.name = ckpt_arena_strdup(&c->arena, e->name)) || ckpt_vec_push(&c->entries, own) < 0)
        return ckpt_nomem(err);
    return 0;
}

static int copy_list(struct archive *a, const char *below, struct copied *c, struct ckpt_err *err)
{
    struct ckpt_member folder;

    (void)pthread_mutex_lock(&a->lock);
    int result = find(a, below, &folder, err);
    if (result == 0)
        result = ckpt_members_list(a->members, folder.number, copy_entry, c, err);
    else if (result > 0)
        result = ckpt_fail_errno(err, result, "cannot list '%s' in '%s'", below, a->name);
    (void)pthread_mutex_unlock(&a->lock);
    return result;
}

/* The entries are copied first: fn may look at others, which may read the index again. */
static int archive_list(void *ctx, const char *below,
                        int (*fn)(void *fn_ctx, const struct ckpt_entry *entry,
                                  struct ckpt_err *err),
                        void *fn_ctx, struct ckpt_err *err)
{
    struct copied c = {0};
    int result = copy_list(ctx, below, &c, err);

    for (size_t i = 0; i < c.entries.len && result >= 0; i++)
        result = fn(fn_ctx, &c.entries.ptr[i], err);
    ckpt_vec_release(&c.entries);
    ckpt_arena_release(&c.arena);
    return result;
}

static const struct ckpt_dir_ops archive_ops = {
    .look = archive_look, .open = archive_open, .list = archive_list, .free = archive_free};

/* ---- opening ---- */

/* The folder of an archive is only passed through: other files in it may be private. */
static int open_folder(struct archive *a, const char *path, struct ckpt_err *err)
{
    const char *slash = strrchr(path, '/');
    ckpt_cleanup(ckpt_freep) char *above = !slash          ? strdup(".")
                                           : slash == path ? strdup("/")
                                                           : strndup(path, (size_t)(slash - path));

    a->name = strdup(slash ? slash + 1 : path);
    return !above || !a->name ? ckpt_nomem(err) : ckpt_dir_open_passage(above, &a->folder, err);
}

int ckpt_dir_open_archive(const char *path, ckpt_archive_index *index, struct ckpt_recording *rec,
                          struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(archive_freep) struct archive *a = calloc(1, sizeof *a);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *real = NULL;

    if (!a)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&a->lock, NULL);
    a->index = index;
    if (open_folder(a, path, err) < 0)
        return -1;
    ckpt_dir_use(a->folder, rec);
    if (index(a->folder, a->name, &a->members, &a->id, err) < 0)
        return -1;
    a->replayed = ckpt_recording_replays(rec);
    if (!(real = ckpt_asprintf("%s/%s", ckpt_dir_real_path(a->folder), a->name)))
        return ckpt_nomem(err);
    const struct ckpt_dir *folder = a->folder;
    const char *name = a->name;
    if (ckpt_dir_open_other(path, real, &archive_ops, a, &dir, err) < 0)
        return -1;
    (void)ckpt_steal(&a);
    if (ckpt_dir_use_within(dir, folder, name, err) < 0)
        return -1;
    *ret = ckpt_steal(&dir);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a directory, over the index of an archive. */
#include "io/dir_archive.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/recording.h"

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
    return refresh(a, err) < 0 ? -1 : ckpt_archive_index_find(a->index, below, ret);
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
        ckpt_archive_index_list(a->index, folder.number, ret);
    (void)pthread_mutex_unlock(&a->lock);
    return rc;
}

static const struct ckpt_dir_ops archive_ops = {
    .look = archive_look, .list = archive_list, .free = archive_free};

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

int ckpt_dir_open_archive(const char *path, ckpt_archive_reader *reader, struct ckpt_recording *rec,
                          struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(archive_freep) struct archive *a = calloc(1, sizeof *a);

    if (!a)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&a->lock, NULL);
    a->reader = reader;
    if (open_folder(a, path, err) < 0 || ckpt_dir_use(a->folder, rec, err) < 0 ||
        reader(a->folder, a->name, &a->index, &a->id, err) < 0 ||
        ckpt_dir_open_other(path, (struct ckpt_dir_way){&archive_ops, a}, a->folder, a->name, ret,
                            err) < 0)
        return -1;
    (void)ckpt_steal(&a);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing files with a recording that was made on another machine. */
#include "io/copy.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/fdio.h"
#include "base/mem.h"

/* A file that is compared. */
struct copy {
    struct ckpt_dir *dir;
    const char *name; /* below dir, or below its root */
    int fd;
};

static int read_copy(void *ctx, void *buf, size_t len, uint64_t off, struct ckpt_err *err)
{
    const struct copy *c = ctx;
    const int rc = ckpt_fdio_pread(c->fd, buf, len, &off);

    return rc ? ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading '%s' in '%s' at byte %" PRIu64,
                                c->name, ckpt_dir_path(c->dir), off)
              : 0;
}

static int compare(struct copy *c, const struct ckpt_replayed *with, struct ckpt_err *err)
{
    unsigned char digest[sizeof with->digest];

    if (ckpt_chunks_digest(with->chunk, with->n, read_copy, c, digest, err) < 0)
        return -1;
    if (memcmp(digest, with->digest, sizeof digest) == 0)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s' in '%s' has other bytes than where rank 0 opened it (compared: %" PRIu64
                     " bytes from byte %" PRIu64 " on, and others): copies of the checkpoint must "
                     "be equal on all nodes",
                     c->name, ckpt_dir_path(c->dir), (uint64_t)with->chunk[0].len,
                     with->chunk[0].off);
}

/* Compare the witnesses below the same root. */
static int compare_witnesses(struct ckpt_dir *dir, const struct ckpt_place *at,
                             struct ckpt_err *err)
{
    struct ckpt_replayed with;
    int rc = 0;

    for (size_t i = 0; rc == 0 && ckpt_replayed_at(at->rec, i, &with); i++) {
        ckpt_cleanup(ckpt_closep) int fd = -1;
        if (!with.witness || with.n == 0 || with.root != at->root)
            continue;
        if (ckpt_dir_open_from_root(dir, with.path, &fd) < 0 && errno == ENOENT)
            continue; /* a part of the copy is missing: another rank reads that */
        if (fd < 0)
            return ckpt_fail_errno(err, errno, "cannot open '%s', of which '%s' has a copy",
                                   with.path, ckpt_dir_real_path(dir));
        struct copy c = {dir, with.path, fd};
        rc = compare(&c, &with, err);
    }
    return rc;
}

int ckpt_copy_accept(struct ckpt_dir *dir, const char *name, int fd, const struct ckpt_file_id *now,
                     const struct ckpt_file_id *then, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct copy c = {dir, name, fd};
    struct ckpt_replayed with;
    struct ckpt_place at;

    if (now->size == then->size && now->mtime_ns == then->mtime_ns &&
        now->ctime_ns == then->ctime_ns)
        return 0;
    ckpt_dir_place(dir, name, &at, &path);
    if (!at.rec)
        return ckpt_nomem(err);
    if (ckpt_replayed_same_root(at.rec, at.root) || now->mtime_ns > ckpt_replayed_begin_ns(at.rec))
        return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened",
                         ckpt_dir_path(dir), name);
    if (now->size != then->size)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s/%s' has %" PRIu64 " bytes here and %" PRIu64
                         " where rank 0 opened it: the nodes see different checkpoints",
                         ckpt_dir_path(dir), name, now->size, then->size);
    if (!ckpt_replayed_is_copy(&at, now)) {
        if (ckpt_replayed_find(&at, &with) && with.n && compare(&c, &with, err) < 0)
            return -1;
        ckpt_replayed_set_copy(&at, now);
    }
    if (ckpt_replayed_take_witnesses(at.rec) && compare_witnesses(dir, &at, err) < 0) {
        ckpt_replayed_refuse(at.rec);
        return -1;
    }
    return ckpt_replayed_refused(at.rec)
               ? ckpt_fail(err, CKPT_CONFLICT,
                           "'%s' is a copy of another checkpoint than rank 0 opened",
                           ckpt_dir_real_path(dir))
               : 0;
}

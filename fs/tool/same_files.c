/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing the view's bytes with the files. */
#include "tool/same_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fdio.h"
#include "base/mem.h"
#include "tool/pump.h"

/* Read bytes [off, off+len) of a file. Returns an errno; EIO if the file has been truncated since
 * its size was checked. */
static int read_file(int dir, const char *path, void *buf, size_t len, uint64_t off)
{
    ckpt_cleanup(ckpt_closep) int fd = openat(dir, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

    return fd < 0 ? errno : ckpt_fdio_errno(ckpt_fdio_pread(fd, buf, len, &off));
}

static int compare(void *ctx, size_t i, const void *buf, size_t len, uint64_t off, void *scratch,
                   struct ckpt_err *err)
{
    const struct ckpt_same_files *w = ctx;
    const char *path = w->items->item[i].path;
    const unsigned char *ours = buf, *theirs = scratch;
    const int error = read_file(w->dir, path, scratch, len, off);
    size_t at = 0;

    if (error)
        return ckpt_fail_errno(err, error, "%s/%s", w->dest, path);
    if (memcmp(ours, theirs, len) == 0)
        return 0;
    while (ours[at] == theirs[at])
        at++;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "%s is not empty: it holds another export, or this one was changed: %s "
                     "differs at byte %llu; export into a new directory",
                     w->dest, path, (unsigned long long)(off + at));
}

static int note_hash(void *ctx, size_t i, uint64_t off, const XXH128_hash_t *prefix,
                     struct ckpt_err *err)
{
    const struct ckpt_same_files *w = ctx;

    (void)err;
    if (off == w->items->item[i].size)
        w->hash[i] = *prefix;
    return 0;
}

int ckpt_same_files(const struct ckpt_same_files *what, double *ret_seconds, struct ckpt_err *err)
{
    const struct ckpt_pump pump = {.view = what->view,
                                   .items = what->items,
                                   .jobs = what->jobs,
                                   .quiet = what->quiet,
                                   .hash = true,
                                   .ctx = (void *)what,
                                   .sink = compare,
                                   .mark = note_hash};

    return ckpt_pump_run(&pump, ret_seconds, err);
}

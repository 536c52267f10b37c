/* SPDX-License-Identifier: Apache-2.0 */
/* Room is reserved at the end of the file, and given back as a hole in it: its length is no measure
 * of what it takes. */
#include "io/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/fdio.h"
#include "base/mem.h"
#include "base/str.h"

enum { BLOCK = 64 * 1024 }; /* room begins at multiples of it, so that holes are whole blocks */

struct ckpt_spill {
    atomic_uint refs;
    char *folder;
    struct ckpt_log log;
    pid_t owner;
    pthread_mutex_t lock; /* protects what follows; fd is only set once */
    atomic_int fd;        /* -1: not made yet */
    bool refused;         /* it can't be made */
    bool told;            /* a warning has said that there is no room */
    uint64_t end, leave;
};

int ckpt_spill_new(const char *folder, const struct ckpt_log *log, struct ckpt_spill **ret,
                   struct ckpt_err *err)
{
    struct ckpt_spill *s = calloc(1, sizeof *s);

    if (!s || !(s->folder = strdup(folder))) {
        free(s);
        return ckpt_nomem(err);
    }
    atomic_init(&s->refs, 1);
    atomic_init(&s->fd, -1);
    s->log = *log;
    s->owner = getpid();
    (void)pthread_mutex_init(&s->lock, NULL);
    *ret = s;
    return 0;
}

struct ckpt_spill *ckpt_spill_ref(struct ckpt_spill *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_spill_unref(struct ckpt_spill *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    int fd = atomic_load(&s->fd);
    ckpt_closep(&fd);
    (void)pthread_mutex_destroy(&s->lock);
    free(s->folder);
    free(s);
}

const char *ckpt_spill_folder(const struct ckpt_spill *s) { return s->folder; }

bool ckpt_spill_is_mine(const struct ckpt_spill *s) { return s->owner == getpid(); }

void ckpt_spill_leave(struct ckpt_spill *s, uint64_t len)
{
    (void)pthread_mutex_lock(&s->lock);
    s->leave = s->leave > len ? s->leave : len;
    (void)pthread_mutex_unlock(&s->lock);
}

/* ---- the file ---- */

/* Make a file and remove its name, where the filesystem has no files without names. */
static int make_named(const char *folder)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/.ckptfs-XXXXXX", folder);
    const int fd = path ? mkostemp(path, O_CLOEXEC) : -1;

    if (!path)
        errno = ENOMEM;
    if (fd >= 0)
        (void)unlink(path);
    return fd;
}

static int open_locked(struct ckpt_spill *s, struct ckpt_err *err)
{
    if (atomic_load(&s->fd) >= 0)
        return 0;
    int fd = open(s->folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT))
        fd = make_named(s->folder);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "'%s': making a temporary file (cache_dir=)", s->folder);
    atomic_store(&s->fd, fd);
    return 0;
}

int ckpt_spill_open(struct ckpt_spill *s, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&s->lock);
    const int rc = open_locked(s, err);
    (void)pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- room ---- */

#define CONSEQUENCE                                                                                \
    "what does not fit is kept in memory, and decompressed again when it was discarded; "          \
    "cache_dir=DIR names another folder"

static void warn_full(struct ckpt_spill *s, uint64_t len, const char *why)
{
    if (!s->told)
        ckpt_logf(&s->log, CKPT_LOG_WARNING,
                  "'%s': the temporary file of decompressed data has no room for %llu more bytes "
                  "(%s): " CONSEQUENCE,
                  s->folder, (unsigned long long)len, why);
    s->told = true;
}

static uint64_t round_up(uint64_t len) { return (len + BLOCK - 1) / BLOCK * BLOCK; }

/* Reserve the room on the disk, as far as the filesystem can. NULL, or why that is not possible. */
static const char *reserve(struct ckpt_spill *s, uint64_t len)
{
    const int fd = atomic_load(&s->fd);
    struct statvfs st;

    if (len > INT64_MAX - BLOCK || s->end > INT64_MAX - BLOCK - len)
        return strerror(EFBIG);
    if (fstatvfs(fd, &st) == 0 && st.f_blocks) {
        const uint64_t avail = (uint64_t)st.f_bavail * st.f_frsize;
        if (avail < s->leave || avail - s->leave < len)
            return s->leave ? "the rest of the disk is left for the files of the model"
                            : strerror(ENOSPC);
    }
    if (fallocate(fd, 0, (off_t)s->end, (off_t)len) == 0)
        return NULL;
    return errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? strerror(errno) : NULL;
}

bool ckpt_spill_take(struct ckpt_spill *s, uint64_t len, uint64_t *ret_off)
{
    struct ckpt_err err = {0};
    bool good = false;

    (void)pthread_mutex_lock(&s->lock);
    if (!s->refused && open_locked(s, &err) < 0) {
        s->refused = true;
        ckpt_logf(&s->log, CKPT_LOG_WARNING, "%s: " CONSEQUENCE, err.text);
    }
    if (!s->refused) {
        const char *why = reserve(s, len);
        good = !why;
        if (why)
            warn_full(s, len, why);
    }
    if (good) {
        *ret_off = s->end;
        s->end += round_up(len);
    }
    (void)pthread_mutex_unlock(&s->lock);
    return good;
}

void ckpt_spill_give(struct ckpt_spill *s, uint64_t len, uint64_t off)
{
    if (ckpt_spill_is_mine(s))
        (void)fallocate(atomic_load(&s->fd), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off,
                        (off_t)round_up(len));
}

/* ---- bytes ---- */

bool ckpt_spill_write(struct ckpt_spill *s, const void *buf, size_t len, uint64_t off)
{
    const int rc = ckpt_fdio_pwrite(atomic_load(&s->fd), buf, len, &off);

    if (rc == 0)
        return true;
    (void)pthread_mutex_lock(&s->lock);
    warn_full(s, len, strerror(rc));
    (void)pthread_mutex_unlock(&s->lock);
    return false;
}

int ckpt_spill_read(struct ckpt_spill *s, struct iovec *iov, int n, uint64_t off, bool cached,
                    struct ckpt_err *err)
{
    const int rc = ckpt_fdio_preadv(atomic_load(&s->fd), iov, n, &off, cached ? RWF_NOWAIT : 0);

    if (rc == 0 || cached)
        return rc != 0;
    return ckpt_fail_errno(err, ckpt_fdio_errno(rc),
                           "reading the temporary file of decompressed data in '%s'", s->folder);
}

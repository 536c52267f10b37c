/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a directory with a recording, over those of the directory itself. */
#include "io/recording.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <xxhash.h>

#include "base/fdio.h"
#include "base/mem.h"
#include "io/iov.h"

struct recorded {
    struct ckpt_dir_way real;
    struct ckpt_recording *rec;
    uint32_t root;        /* number of the directory in it */
    bool is_same;         /* the very directory of the recording: it has no copies */
    char *path;           /* for messages */
    pthread_mutex_t lock; /* protects the result of comparing the samples: */
    bool compared;
    struct ckpt_err other; /* what differs; code 0: nothing does */
};

static struct ckpt_question ask(const struct recorded *r, const char *below,
                                enum ckpt_question_kind kind, uint64_t off)
{
    return (struct ckpt_question){r->root, below, kind, off};
}

static bool is_replaying(const struct recorded *r)
{
    return ckpt_recording_memory(r->rec) == CKPT_DIR_RECALLS;
}

/* The recorded look at an entry; NULL: there is none. */
static struct ckpt_answer *find_look(const struct recorded *r, const char *below,
                                     struct ckpt_looked *ret)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LOOK, 0);
    struct ckpt_answer *a = ckpt_recording_find(r->rec, &q);

    return a && ckpt_looked_get(a, ret) ? a : NULL;
}

/* Record the result of looking: 0, an errno, or -1. */
static void put_look(const struct recorded *r, const char *below, int rc,
                     const struct ckpt_dir_found *found)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LOOK, 0);
    struct ckpt_looked look = {.errnum = (uint64_t)rc, .kind = CKPT_ENTRY_OTHER};

    if (rc == 0) {
        look = (struct ckpt_looked){0, found->kind, found->id, found->birth_ns};
        memcpy(look.tag, found->tag, sizeof look.tag);
    }
    const struct iovec iov = {&look, offsetof(struct ckpt_looked, tag) + strlen(look.tag) + 1};
    if (rc == 0 || ckpt_errno_is_answer(rc))
        ckpt_recording_put(r->rec, &q, &iov, 1);
}

/* ---- copies ---- */

/* Compare a recorded range of bytes with those of the file that is open as fd. */
static int compare_range(const struct recorded *r, const struct ckpt_answer *a, int fd,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) void *buf = malloc(a->len + 1);
    uint64_t off = a->to.off;

    if (!buf)
        return ckpt_nomem(err);
    const int rc = ckpt_fdio_pread(fd, buf, a->len, &off);
    if (rc)
        return ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading '%s/%s' at byte %" PRIu64,
                               r->path, a->to.path, off);
    if (XXH3_64bits(buf, a->len) == a->sum)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/%s' has other bytes than where rank 0 opened it (%zu bytes from byte "
                     "%" PRIu64 " on): copies of the checkpoint must be equal on all nodes",
                     r->path, a->to.path, a->len, a->to.off);
}

/* Compare all bytes that the recording has of a file. */
static int compare_file(const struct recorded *r, const char *below, int fd, struct ckpt_err *err)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, 0);
    const struct ckpt_answer *a;

    for (size_t i = ckpt_recording_lower(r->rec, &q); (a = ckpt_recording_at(r->rec, i)); i++) {
        if (a->to.root != r->root || strcmp(a->to.path, below) != 0)
            break;
        if (compare_range(r, a, fd, err) < 0)
            return -1;
    }
    return 0;
}

static int compare_sample(const struct recorded *r, const struct ckpt_answer *a,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct ckpt_dir_found found;
    const int rc = r->real.ops->open(r->real.ctx, a->to.path, &fd, &found, err);

    if (rc < 0)
        return -1;
    if (rc == ENOENT) /* a part of the copy is missing: an error for ranks that read it */
        return 0;
    return rc ? ckpt_fail_errno(err, rc, "cannot open '%s/%s', which is a copy of what rank 0 has",
                                r->path, a->to.path)
              : compare_range(r, a, fd, err);
}

/* Compare the samples of all files, at the first copy that this directory turns out to have. */
static int compare_samples(struct recorded *r, struct ckpt_err *err)
{
    const struct ckpt_answer *a;
    int rc = 0;

    (void)pthread_mutex_lock(&r->lock);
    for (size_t i = 0; !r->compared && rc == 0 && (a = ckpt_recording_at(r->rec, i)); i++)
        if (a->to.root == r->root && a->to.kind == CKPT_ASK_SAMPLE)
            rc = compare_sample(r, a, &r->other);
    r->compared = true;
    rc = r->other.code ? ckpt_err_move(err, &r->other) : 0;
    (void)pthread_mutex_unlock(&r->lock);
    return rc;
}

static int fail_changed(const struct recorded *r, const char *below, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened", r->path,
                     below);
}

/* Is the file, which has the identity `now`, the one that was recorded as `then`, or a copy of it?
 * fd is -1 if it is not open yet. */
static int check_copy(struct recorded *r, const char *below, int fd, const struct ckpt_file_id *now,
                      const struct ckpt_file_id *then, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int own = -1;
    struct ckpt_dir_found found = {0};

    if (now->size == then->size && now->mtime_ns == then->mtime_ns &&
        now->ctime_ns == then->ctime_ns)
        return 0;
    if (r->is_same || now->mtime_ns > ckpt_recording_begin_ns(r->rec))
        return fail_changed(r, below, err);
    if (now->size != then->size)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s/%s' has %" PRIu64 " bytes here and %" PRIu64
                         " where rank 0 opened it: the nodes see different checkpoints",
                         r->path, below, now->size, then->size);
    if (fd < 0 && r->real.ops->open(r->real.ctx, below, &own, &found, NULL) == 0)
        fd = own;
    if (fd < 0 || (fd == own && !ckpt_file_id_eq(&found.id, now)))
        return fail_changed(r, below, err);
    return compare_file(r, below, fd, err) < 0 ? -1 : compare_samples(r, err);
}

/* Give a file that is known by another identity here the recorded one. Only what ctime has gained
 * since then stays. */
static void translate(const struct ckpt_file_id *here, const struct ckpt_file_id *then,
                      struct ckpt_file_id *id)
{
    if (id->inode != here->inode || id->size != here->size || id->mtime_ns != here->mtime_ns)
        return;
    id->inode = then->inode;
    id->mtime_ns = then->mtime_ns;
    id->ctime_ns =
        (int64_t)((uint64_t)id->ctime_ns - (uint64_t)here->ctime_ns + (uint64_t)then->ctime_ns);
}

/* Recognise what was found: if the recording knows the file, its identity becomes the recorded one.
 */
static int recognise(struct recorded *r, const char *below, int fd, struct ckpt_dir_found *found,
                     struct ckpt_err *err)
{
    struct ckpt_looked then;
    struct ckpt_answer *a = found->kind == CKPT_ENTRY_FILE ? find_look(r, below, &then) : NULL;

    if (!a || then.errnum || then.kind != CKPT_ENTRY_FILE)
        return 0;
    if (!atomic_load(&a->here) && (check_copy(r, below, fd, &found->id, &then.id, err) < 0 ||
                                   ckpt_recording_recognise(r->rec, a, &found->id, err) < 0))
        return -1;
    translate(atomic_load(&a->here), &then.id, &found->id);
    return 0;
}

/* ---- the functions ---- */

static int recorded_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                         struct ckpt_err *err)
{
    struct recorded *r = ctx;
    struct ckpt_looked look;

    if (is_replaying(r) && find_look(r, below, &look)) {
        *ret = (struct ckpt_dir_found){
            (enum ckpt_entry_kind)look.kind, look.id, {0, look.id.size}, look.birth_ns};
        memcpy(ret->tag, look.tag, sizeof ret->tag);
        return (int)look.errnum;
    }
    const int rc = r->real.ops->look(r->real.ctx, below, ret, err);
    put_look(r, below, rc, ret);
    if (rc == 0)
        (void)recognise(r, below, -1, ret, NULL); /* if it is another file, opening it says so */
    return rc;
}

static int recorded_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                         struct ckpt_err *err)
{
    struct recorded *r = ctx;
    ckpt_cleanup(ckpt_closep) int fd = -1;
    const int rc = r->real.ops->open(r->real.ctx, below, &fd, ret, err);

    put_look(r, below, rc, ret);
    if (rc)
        return rc;
    if (recognise(r, below, fd, ret, err) < 0)
        return -1;
    *ret_fd = fd;
    fd = -1;
    return 0;
}

static int recorded_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LIST, 0);
    const struct ckpt_answer *a = is_replaying(r) ? ckpt_recording_find(r->rec, &q) : NULL;

    if (a) {
        ckpt_str_append(ret, (const char *)a->data, a->len);
        return 0;
    }
    const int rc = r->real.ops->list(r->real.ctx, below, ret, err);
    const struct iovec iov = {(char *)ckpt_str_get(ret), ret->len};
    if (rc == 0 && !ret->failed)
        ckpt_recording_put(r->rec, &q, &iov, 1);
    return rc;
}

/* Every request names the ETag, so that the object is the recorded one. */
static int recorded_read(void *ctx, const char *below, const char *tag, uint64_t size,
                         const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                         struct ckpt_err *err)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    return real->ops->read(real->ctx, below, tag, size, iov, n, off, how, err);
}

static void recorded_refresh(void *ctx)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    if (real->ops->refresh)
        real->ops->refresh(real->ctx);
}

static void recorded_free(void *ctx)
{
    struct recorded *r = ctx;

    if (r->real.ops->free)
        r->real.ops->free(r->real.ctx);
    ckpt_recording_unref(r->rec);
    (void)pthread_mutex_destroy(&r->lock);
    free(r->path);
    free(r);
}

static enum ckpt_dir_memory recorded_memory(void *ctx)
{
    return ckpt_recording_memory(((const struct recorded *)ctx)->rec);
}

static void recorded_keep(void *ctx, const char *below, const struct iovec *iov, int n,
                          uint64_t off)
{
    const struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, off);

    ckpt_recording_put(r->rec, &q, iov, n);
}

static bool recorded_recall(void *ctx, const char *below, const struct iovec *iov, int n,
                            uint64_t off)
{
    const struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, off);
    const struct ckpt_answer *a = is_replaying(r) ? ckpt_recording_find(r->rec, &q) : NULL;
    struct ckpt_iov_cursor to = {iov, 0};
    const uint64_t len = ckpt_iov_len(iov, n);

    if (!a || a->len < len)
        return false;
    ckpt_iov_put(&to, a->data, (size_t)len);
    return true;
}

static void recorded_known_as(void *ctx, const char *below, struct ckpt_file_id *id)
{
    const struct recorded *r = ctx;
    struct ckpt_looked then;
    const struct ckpt_answer *a = find_look(r, below, &then);
    const struct ckpt_file_id *here = a ? atomic_load(&a->here) : NULL;

    if (here)
        translate(here, &then.id, id);
}

static const struct ckpt_dir_ops recorded_ops = {.look = recorded_look,
                                                 .open = recorded_open,
                                                 .list = recorded_list,
                                                 .free = recorded_free,
                                                 .read = recorded_read,
                                                 .refresh = recorded_refresh,
                                                 .memory = recorded_memory,
                                                 .keep = recorded_keep,
                                                 .recall = recorded_recall,
                                                 .known_as = recorded_known_as};

int ckpt_dir_use(struct ckpt_dir *dir, struct ckpt_recording *rec, struct ckpt_err *err)
{
    struct recorded *r = rec ? calloc(1, sizeof *r) : NULL;
    struct ckpt_dir_found itself = {0};
    struct ckpt_looked then;

    if (!rec)
        return 0;
    if (!r || !(r->path = strdup(ckpt_dir_path(dir)))) {
        free(r);
        return ckpt_nomem(err);
    }
    (void)pthread_mutex_init(&r->lock, NULL);
    r->rec = ckpt_recording_ref(rec);
    r->root = ckpt_recording_add_root(rec);
    r->real = ckpt_dir_replace(dir, (struct ckpt_dir_way){&recorded_ops, r});
    /* the identity of the directory itself is the first thing to be recorded */
    const bool skip = r->real.ops->read && is_replaying(r); /* it would be listed */
    const int rc = skip ? ENOENT : r->real.ops->look(r->real.ctx, ".", &itself, NULL);
    put_look(r, ".", rc, &itself);
    r->is_same = rc == 0 && ckpt_recording_is_of_here(rec) && find_look(r, ".", &then) &&
                 then.id.inode == itself.id.inode;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that read parts of files: a queue of parts, oldest first. */
#include "io/far/files.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"
#include "base/vec.h"

enum {
    /* The largest part. A thread waits for the first byte of a part and then for all of it; several
     * threads hide that. Twice as much makes the first reader of a stream wait longer. */
    BLOCK = 4 << 20,
    LEAST = 1 << 20, /* of a part, where a read that is waited for is cut */
    ALIGN = 4096,    /* of O_DIRECT */
    UNITS = 256 * 1024 * 1024 / CKPT_PARTS_UNIT,

    IDLE_MS = 5000, /* then threads end, and what is held is forgotten */
    STACK = 256 * 1024,
};

/* A part that a thread is to read. */
struct task {
    struct ckpt_part *part;
    struct ckpt_far_file file; /* referenced */
};

struct files {
    struct ckpt_far far;
    CKPT_VEC(struct task) queue; /* its first `begun` tasks have been taken */
    size_t begun;
    unsigned threads, idle;
    pthread_cond_t asked;
};

static const struct ckpt_far_ops files_ops;
static struct files files;

static struct files *self(struct ckpt_far *f) { return (struct files *)f; }

/* ---- fork ---- */

static void lock_files(void) { (void)pthread_mutex_lock(&files.far.lock); }

static void unlock_files(void) { (void)pthread_mutex_unlock(&files.far.lock); }

static void make_files(void)
{
    files.far.ops = &files_ops;
    files.far.owner = getpid();
    (void)pthread_mutex_init(&files.far.lock, NULL);
    ckpt_cond_init(&files.asked);
    ckpt_parts_init(&files.far.parts, UNITS);
    (void)pthread_atfork(lock_files, unlock_files, unlock_files);
}

struct ckpt_far *ckpt_far_files(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, make_files);
    return &files.far;
}

/* In a process that was forked: the threads are the parent's. References of tasks are not given
 * back, as a thread of the parent may have been in the middle of that. */
static void begin_again(struct files *f)
{
    if (f->far.parts.memory)
        (void)munmap(f->far.parts.memory, (size_t)UNITS * CKPT_PARTS_UNIT);
    f->far.parts.memory = NULL;
    ckpt_vec_release(&f->queue);
    f->begun = f->threads = f->idle = 0;
    ckpt_cond_init(&f->asked);
    ckpt_parts_init(&f->far.parts, UNITS);
    f->far.owner = getpid();
}

/* ---- threads ---- */

/* Take the oldest task that somebody waits for, else the oldest. With the lock held. */
static bool take(struct files *f, struct task *ret)
{
    struct task *const first = f->queue.ptr + f->begun, *const end = f->queue.ptr + f->queue.len;
    struct task *t = first;

    if (first == end)
        return false;
    while (t < end && t->part->pins == 0)
        t++;
    if (t == end)
        t = first;
    *ret = *t;
    memmove(first + 1, first, (size_t)(t - first) * sizeof *first);
    if (++f->begun == f->queue.len || f->begun == CKPT_PARTS) { /* the rest to the beginning */
        f->queue.len -= f->begun;
        memmove(f->queue.ptr, first + 1, f->queue.len * sizeof *first);
        f->begun = 0;
    }
    return true;
}

/* Nobody has asked for anything for a while, and no thread is left: give the memory back. */
static void forget(struct files *f)
{
    for (size_t i = 0; i < CKPT_PARTS; i++) {
        struct ckpt_part *s = &f->far.parts.part[i];
        if (s->state == CKPT_PART_READY && s->pins == 0)
            ckpt_parts_free(&f->far.parts, s);
    }
    for (uint32_t i = 0; i < UNITS; i++)
        if (!f->far.parts.taken[i])
            (void)madvise(f->far.parts.memory + (size_t)i * CKPT_PARTS_UNIT, CKPT_PARTS_UNIT,
                          MADV_DONTNEED);
}

/* Wait for a task. False: there was none for a while. With the lock held. */
static bool wait_for_task(struct files *f, struct task *ret)
{
    const struct timespec until = ckpt_deadline(IDLE_MS);

    f->idle++;
    bool got;
    while (!(got = take(f, ret)))
        if (pthread_cond_timedwait(&f->asked, &f->far.lock, &until) == ETIMEDOUT) {
            got = take(f, ret);
            break;
        }
    f->idle--;
    return got;
}

static void *read_parts(void *arg)
{
    struct files *f = arg;
    struct task t;

    (void)pthread_mutex_lock(&f->far.lock);
    while (wait_for_task(f, &t)) {
        struct ckpt_err err = {0};
        struct ckpt_part *const part = t.part;
        part->begun_ms = ckpt_now_ms();
        (void)pthread_mutex_unlock(&f->far.lock);
        const int rc = t.file.read(t.file.file, t.file.shared,
                                   (unsigned char *)ckpt_part_bytes(&f->far.parts, part), part->len,
                                   part->off, &err);
        t.file.unref(t.file.file);
        (void)pthread_mutex_lock(&f->far.lock);
        if (rc == 0)
            ckpt_far_arrived(&f->far, t.part);
        else
            ckpt_far_failed(&f->far, t.part, err.code, err.text);
    }
    if (--f->threads == 0)
        forget(f);
    (void)pthread_mutex_unlock(&f->far.lock);
    return NULL;
}

static int start_thread(struct files *f, struct ckpt_err *err)
{
    const int rc = ckpt_thread_detach(STACK, read_parts, f);

    f->threads += rc == 0;
    /* fewer threads than there could be are enough */
    return rc && f->threads == 0 ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

/* ---- the table ---- */

static int begin(struct ckpt_far *far, struct ckpt_err *err)
{
    struct files *f = self(far);

    if (far->owner != getpid())
        begin_again(f);
    if (far->parts.memory)
        return 0;
    void *memory = mmap(NULL, (size_t)UNITS * CKPT_PARTS_UNIT, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return ckpt_nomem(err);
    far->parts.memory = memory;
    return 0;
}

static int ask(struct ckpt_far *far, struct ckpt_part *part, const struct ckpt_far_object *o,
               struct ckpt_err *err)
{
    struct files *f = self(far);
    struct task t = {part, *(const struct ckpt_far_file *)o->what};

    if (f->idle <= f->queue.len - f->begun && f->threads < t.file.at_once &&
        start_thread(f, err) < 0) {
        ckpt_parts_free(&far->parts, part);
        return -1;
    }
    if (ckpt_vec_push(&f->queue, t) < 0) {
        ckpt_parts_free(&far->parts, part);
        return ckpt_nomem(err);
    }
    (void)t.file.ref(t.file.file);
    (void)pthread_cond_signal(&f->asked);
    return 0;
}

static const struct ckpt_far_ops files_ops = {
    .begin = begin, .ask = ask, .align = ALIGN, .least = LEAST, .block = BLOCK};

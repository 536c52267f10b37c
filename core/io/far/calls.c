/* SPDX-License-Identifier: Apache-2.0 */
/* A queue of calls, oldest first, and the threads that make them. */
#include "io/far/calls.h"

#include <errno.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/thread.h"

enum {
    /* A call waits for so small a part of the timeout, and not longer than that, where another one
     * hangs: who looks for many names would wait for the timeout many times. A server that is back
     * answers within it. So often, too, those who wait look. */
    IMPATIENT = 8,
    IMPATIENT_MS = 1000,

    /* Where so many calls hang, and nothing is answered, none is made until one has returned: there
     * are threads left for other filesystems. */
    MOST_HUNG = 8,

    IDLE_MS = 5000, /* then threads end */
    STACK = 256 * 1024,
};

TAILQ_HEAD(list, ckpt_call);

static struct {
    pthread_mutex_t lock;
    pthread_cond_t asked;
    struct list queue, hung; /* hung: those that were given up and have not returned */
    size_t nqueue;
    unsigned threads, idle;
    pid_t owner; /* the process whose threads these are */
} calls;

/* ---- fork ---- */

static void lock_calls(void) { (void)pthread_mutex_lock(&calls.lock); }

static void unlock_calls(void) { (void)pthread_mutex_unlock(&calls.lock); }

/* Nothing is asked for, and no thread is there: at first, and in a child, of which the threads are
 * the parent's. */
static void begin(void)
{
    ckpt_cond_init(&calls.asked);
    TAILQ_INIT(&calls.queue);
    TAILQ_INIT(&calls.hung);
    calls.nqueue = 0;
    calls.threads = calls.idle = 0;
    calls.owner = getpid();
}

static void begin_first(void)
{
    (void)pthread_mutex_init(&calls.lock, NULL);
    begin();
    (void)pthread_atfork(lock_calls, unlock_calls, unlock_calls);
}

/* ---- threads; with the lock held ---- */

static struct ckpt_call *take(void)
{
    struct ckpt_call *c = TAILQ_FIRST(&calls.queue);

    if (c) {
        TAILQ_REMOVE(&calls.queue, c, link);
        calls.nqueue--;
        c->state = CKPT_CALL_BEGUN;
    }
    return c;
}

/* Wait for a call. NULL: there was none for a while. */
static struct ckpt_call *wait_for_call(void)
{
    const struct timespec until = ckpt_deadline(IDLE_MS);
    struct ckpt_call *c;

    calls.idle++;
    while (!(c = take()))
        if (pthread_cond_timedwait(&calls.asked, &calls.lock, &until) == ETIMEDOUT) {
            c = take();
            break;
        }
    calls.idle--;
    return c;
}

static void *make_calls(void *arg)
{
    struct ckpt_call *c;

    (void)pthread_mutex_lock(&calls.lock);
    while ((c = wait_for_call())) {
        (void)pthread_mutex_unlock(&calls.lock);
        const uint64_t begun_ms = ckpt_now_ms();
        c->ops->make(c);
        ckpt_storage_heard(c->storage, begun_ms);
        (void)pthread_mutex_lock(&calls.lock);
        c->state = CKPT_CALL_ENDED;
        if (!c->given_up) {
            (void)pthread_cond_signal(&c->ended);
            continue;
        }
        TAILQ_REMOVE(&calls.hung, c, link);
        (void)pthread_mutex_unlock(&calls.lock);
        c->ops->free(c);
        (void)pthread_mutex_lock(&calls.lock);
    }
    calls.threads--;
    (void)pthread_mutex_unlock(&calls.lock);
    return arg;
}

static int start_thread(struct ckpt_err *err)
{
    const int rc = ckpt_thread_detach(STACK, make_calls, NULL);

    calls.threads += rc == 0;
    /* fewer threads than there could be are enough */
    return rc && calls.threads == 0 ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

/* ---- calling ---- */

int ckpt_call_hangs(uint32_t timeout_ms, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_TIMEOUT,
                     "the storage has given no answer for %g s (option timeout=): does its server "
                     "run?",
                     timeout_ms / 1000.0);
}

static unsigned hung_at(const struct ckpt_storage *storage)
{
    unsigned n = 0;

    for (const struct ckpt_call *c = TAILQ_FIRST(&calls.hung); c; c = TAILQ_NEXT(c, link))
        n += c->storage == storage;
    return n;
}

/* The timeout where an earlier call hangs. */
static uint32_t impatient(uint32_t timeout_ms)
{
    return (uint32_t)ckpt_min_u64(timeout_ms / IMPATIENT, IMPATIENT_MS);
}

static int ask(struct ckpt_call *c, const struct ckpt_far_options *opt, struct ckpt_err *err)
{
    const unsigned most = opt->connections ? opt->connections : CKPT_FAR_QUESTIONS;

    if (hung_at(c->storage) >= MOST_HUNG &&
        ckpt_storage_is_silent(c->storage, impatient(ckpt_far_timeout_ms(opt))))
        return ckpt_call_hangs(ckpt_far_timeout_ms(opt), err);
    if (calls.idle <= calls.nqueue && calls.threads < most && start_thread(err) < 0)
        return -1;
    c->state = CKPT_CALL_QUEUED;
    c->given_up = false;
    TAILQ_INSERT_TAIL(&calls.queue, c, link);
    calls.nqueue++;
    (void)pthread_cond_signal(&calls.asked);
    return 0;
}

/* False: it hangs. */
static bool wait_for_end(struct ckpt_call *c, uint32_t timeout_ms)
{
    const uint64_t begin_ms = ckpt_now_ms();

    while (c->state != CKPT_CALL_ENDED) {
        const uint32_t limit = hung_at(c->storage) ? impatient(timeout_ms) : timeout_ms;
        if (ckpt_storage_hangs(c->storage, begin_ms, limit))
            return false;
        const struct timespec until = ckpt_deadline(impatient(timeout_ms) + 1);
        (void)pthread_cond_timedwait(&c->ended, &calls.lock, &until);
    }
    return true;
}

/* Leave a call to its thread. False: none has it yet. */
static bool leave(struct ckpt_call *c)
{
    if (c->state == CKPT_CALL_QUEUED) {
        TAILQ_REMOVE(&calls.queue, c, link);
        calls.nqueue--;
        return false;
    }
    c->given_up = true;
    TAILQ_INSERT_TAIL(&calls.hung, c, link);
    return true;
}

int ckpt_call_make(struct ckpt_call *c, const struct ckpt_far_options *opt, struct ckpt_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    bool left = false;

    (void)pthread_once(&once, begin_first);
    ckpt_cond_init(&c->ended);
    (void)pthread_mutex_lock(&calls.lock);
    if (calls.owner != getpid())
        begin();
    int rc = ask(c, opt, err);
    if (rc == 0 && !wait_for_end(c, ckpt_far_timeout_ms(opt))) {
        left = leave(c);
        rc = ckpt_call_hangs(ckpt_far_timeout_ms(opt), err);
    }
    (void)pthread_mutex_unlock(&calls.lock);
    if (rc < 0 && !left)
        c->ops->free(c);
    return rc;
}

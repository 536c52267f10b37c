/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that waits for signals with sigwait, so that no other thread is interrupted. */
#include "mount/signals.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"

/* Storage that hangs must not delay a SIGTERM for ever. DETACH_MS: then the mount point is freed.
 * BOUND_MS: time for the requests in progress to be answered. NUDGE_MS: interval of the interrupts
 * in quit(). */
enum { DETACH_MS = 1000, BOUND_MS = 10000, NUDGE_MS = 20 };

static sigset_t signal_set(void)
{
    sigset_t set;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGHUP);
    (void)sigaddset(&set, SIGUSR1);
    return set;
}

static void nothing(int sig) { (void)sig; }

void ckptfs_signals_block(void)
{
    struct sigaction nudge = {.sa_handler = nothing}, ignore = {.sa_handler = SIG_IGN};
    sigset_t set = signal_set();

    (void)pthread_sigmask(SIG_BLOCK, &set, NULL);
    (void)sigaction(SIGUSR2, &nudge, NULL); /* interrupts the main thread's wait, see quit() */
    (void)sigaction(SIGPIPE, &ignore, NULL);
    (void)sigaction(SIGXFSZ, &ignore, NULL); /* a log that may not grow is no reason to end */
}

static void log_stats(struct ckptfs *fs)
{
    struct ckptfs_counters *c = &fs->count;
    struct ckpt_stats st = {.size = sizeof st};
    struct ckpt_run *run = atomic_load(&fs->refresh.run);

    if (run)
        (void)ckpt_run_stats(run, &st, NULL);
    ckptfs_logf(fs->log, CKPT_WARNING,
                "%llu reads, %llu bytes, %llu errors, %llu files open, %zu inodes held; "
                "from shards: %llu reads, %llu bytes, %llu files open",
                (unsigned long long)atomic_load(&c->reads),
                (unsigned long long)atomic_load(&c->read_bytes),
                (unsigned long long)atomic_load(&c->errors),
                (unsigned long long)atomic_load(&c->open_files), ckptfs_nodes_count(&fs->nodes),
                (unsigned long long)st.source_reads, (unsigned long long)st.source_bytes,
                (unsigned long long)st.open_files);
}

/* Storage hangs: free the mount point now, and say why the process stays. */
static void detach(struct ckptfs_signals *s)
{
    const struct ckptfs_config *c = s->fs->config;
    char name[CKPT_ERR_TEXT];
    const bool any = ckptfs_admission_oldest(&s->fs->admission, name, sizeof name);

    ckptfs_logf(s->fs->log, CKPT_WARNING,
                "%s%s%s: the storage has not answered yet: %s is unmounted, and this process stays "
                "until it has",
                c->run, any && *name ? "/" : "", any ? name : "", c->mountpoint);
    (void)ckptfs_mounter_unmount(s->mounter, NULL);
}

/* End the session. Its loop waits for a semaphore, or may be about to, so it is interrupted again
 * and again until everything has ended. */
static void quit(struct ckptfs_signals *s)
{
    const struct timespec pause = {.tv_nsec = NUDGE_MS * 1000000L};
    sigset_t set = signal_set();
    const uint64_t begin = ckpt_now_ms();
    bool detached = false;

    atomic_store(&s->quitting, true);
    fuse_session_exit(s->se);
    ckptfs_admission_stop(&s->fs->admission);
    while (!atomic_load(&s->done) && ckpt_now_ms() - begin < BOUND_MS) {
        (void)pthread_kill(s->main, SIGUSR2);
        int sig = sigtimedwait(&set, NULL, &pause);
        if ((sig == SIGTERM || sig == SIGINT) && ckpt_now_ms() - begin >= DETACH_MS)
            break;
        if (!detached && ckpt_now_ms() - begin >= DETACH_MS) {
            detach(s);
            detached = true;
        }
    }
    if (atomic_load(&s->done))
        return;
    if (!detached)
        detach(s);
    ckptfs_watchdog_end(s->fs);
    _exit(EXIT_SUCCESS); /* the kernel keeps the process while a thread hangs in it */
}

/* Called once a second, between signals. If the connection was aborted or the mount lazily
 * detached, the session ends without a signal, but its threads may hang in storage for ever. */
static void tick(struct ckptfs_signals *s)
{
    const size_t expired = atomic_exchange(&s->fs->admission.expired, 0);

    if (expired)
        ckptfs_logf(s->fs->log, CKPT_ERROR,
                    "%zu requests waited for storage longer than %d s and were answered with EIO",
                    expired, CKPTFS_QUEUE_S);
    ckptfs_watchdog_look(&s->watchdog, s->fs);
    if (fuse_session_exited(s->se) && !atomic_load(&s->done))
        quit(s);
}

static void *take(void *arg)
{
    const struct timespec second = {.tv_sec = 1};
    struct ckptfs_signals *s = arg;
    sigset_t set = signal_set();

    while (!atomic_load(&s->done)) {
        int sig = sigtimedwait(&set, NULL, &second);
        if (atomic_load(&s->done))
            break;
        if (sig < 0)
            tick(s);
        else if (sig == SIGHUP)
            ckptfs_refresh_kick(&s->fs->refresh);
        else if (sig == SIGUSR1)
            log_stats(s->fs);
        else
            quit(s);
    }
    return NULL;
}

int ckptfs_signals_start(struct ckptfs_signals *s, struct ckptfs *fs, struct fuse_session *se,
                         struct ckptfs_mounter *mounter, struct ckpt_err *err)
{
    *s = (struct ckptfs_signals){.fs = fs, .se = se, .mounter = mounter, .main = pthread_self()};
    int rc = pthread_create(&s->thread, NULL, take, s);
    return rc ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

void ckptfs_signals_stop(struct ckptfs_signals *s)
{
    atomic_store(&s->done, true);
    (void)pthread_kill(s->thread, SIGHUP);
    (void)pthread_join(s->thread, NULL);
}

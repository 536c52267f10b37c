/* SPDX-License-Identifier: Apache-2.0 */
/* Locks that are held until the end of a scope, and threads of the library's own. */
#pragma once

#include <pthread.h>
#include <signal.h>

/* Take a lock, for ckpt_cleanup(ckpt_unlockp). */
static inline pthread_mutex_t *ckpt_lock(pthread_mutex_t *m)
{
    (void)pthread_mutex_lock(m);
    return m;
}

/* Give back the lock that *m points to. */
static inline void ckpt_unlockp(pthread_mutex_t **m) { (void)pthread_mutex_unlock(*m); }

/* Start a thread that takes no signals, which are for the program's own threads. Returns what
 * pthread_create does; attr may be NULL. */
static inline int ckpt_thread_start(pthread_t *ret, const pthread_attr_t *attr, void *(*fn)(void *),
                                    void *arg)
{
    sigset_t every, before;

    (void)sigfillset(&every);
    (void)pthread_sigmask(SIG_SETMASK, &every, &before);
    const int rc = pthread_create(ret, attr, fn, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

/* Start one that ends by itself, with a stack of so many bytes. */
static inline int ckpt_thread_detach(size_t stack, void *(*fn)(void *), void *arg)
{
    pthread_attr_t attr;
    pthread_t thread;

    (void)pthread_attr_init(&attr);
    (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attr, stack);
    const int rc = ckpt_thread_start(&thread, &attr, fn, arg);
    (void)pthread_attr_destroy(&attr);
    return rc;
}

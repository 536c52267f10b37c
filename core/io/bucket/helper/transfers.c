/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets that libcurl waits for, and one call of it for each that is ready. */
#include "io/bucket/helper/transfers.h"

#include <curl/curl.h>
#include <errno.h>

/* libcurl says what it waits for at a socket. */
static int on_socket(CURL *easy, curl_socket_t fd, int what, void *ctx, void *ignored)
{
    struct ckpt_transfers *t = ctx;
    const short events =
        (short)((what & CURL_POLL_IN ? POLLIN : 0) | (what & CURL_POLL_OUT ? POLLOUT : 0));
    size_t i = t->nown;

    (void)easy;
    (void)ignored;
    while (i < t->fds.len && t->fds.ptr[i].fd != fd)
        i++;
    if (what == CURL_POLL_REMOVE && i < t->fds.len)
        t->fds.ptr[i] = t->fds.ptr[--t->fds.len];
    else if (what != CURL_POLL_REMOVE && i < t->fds.len)
        t->fds.ptr[i].events = events;
    else if (what != CURL_POLL_REMOVE)
        t->failed |= ckpt_vec_push(&t->fds, ((struct pollfd){fd, events, 0})) < 0;
    return 0;
}

int ckpt_transfers_init(struct ckpt_transfers *t, unsigned connections, const int *own, size_t nown)
{
    *t = (struct ckpt_transfers){.multi = curl_multi_init(), .nown = nown};
    for (size_t i = 0; i < nown; i++)
        t->failed |= ckpt_vec_push(&t->fds, ((struct pollfd){own[i], POLLIN, 0})) < 0;
    if (!t->multi || t->failed)
        return -1;
    (void)curl_multi_setopt(t->multi, CURLMOPT_MAXCONNECTS, (long)connections);
    (void)curl_multi_setopt(t->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    (void)curl_multi_setopt(t->multi, CURLMOPT_SOCKETDATA, t);
    return 0;
}

static void act(struct ckpt_transfers *t, curl_socket_t fd)
{
    int running;

    /* 0: libcurl looks itself what the socket is ready for */
    t->failed |= curl_multi_socket_action(t->multi, fd, 0, &running) != CURLM_OK;
}

/* The milliseconds until libcurl wants to be called, at most `most`. */
static int until_due(struct ckpt_transfers *t, int most)
{
    long ms = -1;

    t->failed |= curl_multi_timeout(t->multi, &ms) != CURLM_OK;
    return ms < 0 || ms > most ? most : (int)ms;
}

/* Go on with what waits for a time, as a new transfer does. */
static void act_if_due(struct ckpt_transfers *t, void (*next)(void *ctx), void *ctx)
{
    if (until_due(t, 1) > 0)
        return;
    act(t, CURL_SOCKET_TIMEOUT);
    next(ctx);
}

bool ckpt_transfers_serve(struct ckpt_transfers *t, int wait_ms, void (*next)(void *ctx), void *ctx)
{
    if (poll(t->fds.ptr, t->fds.len, until_due(t, wait_ms)) < 0 && errno != EINTR)
        return false;
    t->ready.len = 0; /* a copy: to serve one changes the list */
    for (size_t i = t->nown; i < t->fds.len; i++)
        if (t->fds.ptr[i].revents)
            t->failed |= ckpt_vec_push(&t->ready, t->fds.ptr[i]) < 0;
    act_if_due(t, next, ctx);
    for (size_t i = 0; i < t->ready.len && !t->failed; i++) {
        act(t, t->ready.ptr[i].fd);
        next(ctx);
        act_if_due(t, next, ctx);
    }
    return !t->failed;
}

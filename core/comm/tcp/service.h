/* SPDX-License-Identifier: Apache-2.0 */
/* A service of a rank: it answers requests of the job's other ranks, each at any time, beside what
 * the ranks do together. A request is a few bytes, and its reply as many bytes as the request asks
 * for, or an error. Requests go over TCP connections of their own, whatever the transport is, with
 * the handshake of handshake.h; so the job's secret decides who may ask.
 *
 * Each connection is served by a thread. A rank keeps few connections to another one, which it
 * makes when it first asks, and which several of its threads use in turn. However many ranks ask,
 * few requests are answered at the same time, in the order in which they come, so that the memory
 * for replies is limited: CKPT_SERVICE_ANSWERS buffers of 4 MiB and 64 KiB. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/mem.h"

struct ckpt_comm;
struct ckpt_service;

enum {
    CKPT_SERVICE_REQUEST = 65536, /* bytes of a request, at most */
    CKPT_SERVICE_REPLY = 4 << 20, /* the same of a reply */
    /* Requests that a rank answers at the same time. With few of them a fast disk is idle while
     * replies are sent; each costs 4 MiB. */
    CKPT_SERVICE_ANSWERS = 8,
};

/* The functions that answer requests; all of them are called by several threads at once. */
struct ckpt_service_ops {
    /* Write the reply to a request to reply[0..reply_len). */
    int (*answer)(void *ctx, const void *request, size_t len, void *reply, size_t reply_len,
                  struct ckpt_err *err);
    void (*free)(void *ctx);
};

/* Begin to answer, as this rank of the comm. On success the service owns ctx, and frees it when the
 * last thread that may use it has ended. */
int ckpt_service_open(const struct ckpt_comm *comm, const struct ckpt_service_ops *ops, void *ctx,
                      struct ckpt_service **ret, struct ckpt_err *err);

/* End it: connections are closed, and nothing is answered any more. It does not wait for answers
 * that are being made. NULL is allowed. */
void ckpt_service_close(struct ckpt_service *s);
CKPT_CLEANUP_BY(ckpt_service_close, struct ckpt_service)

/* Where other ranks reach it: a text for ckpt_service_ask. Borrowed. */
const char *ckpt_service_address(const struct ckpt_service *s);

/* Ask the service of rank `peer`, which is at this address, and wait for the reply, which fills
 * iov[0..n). PEER: it can't be reached, or the connection broke. TIMEOUT: nothing has arrived for
 * timeout_ms. Other errors are those of the answer. Safe from many threads. */
int ckpt_service_ask(struct ckpt_service *s, uint32_t peer, const char *address,
                     const void *request, size_t len, const struct iovec *iov, int n,
                     uint32_t timeout_ms, struct ckpt_err *err);

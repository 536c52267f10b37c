/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol between a process and its helper (helper/main.c), which makes all HTTP requests:
 * messages go over a socket, and the helper puts data into memory that both have mapped. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* The helper inherits the socket and the memory as these descriptors. */
enum { CKPT_WIRE_SOCKET = 3, CKPT_WIRE_MEMORY = 4 };

enum {
    CKPT_WIRE_VERSION = 2,
    CKPT_WIRE_MOST = 16 * 1024,       /* bytes of a message */
    CKPT_WIRE_HEAD = 64 * 1024,       /* of the memory: struct ckpt_wire_shared; then come slots */
    CKPT_WIRE_LIST = 4 * 1024 * 1024, /* a slot that a page of a list fits into */
};

/* The first message. */
struct ckpt_wire_setup {
    uint64_t version, memory;
    uint32_t connections, timeout_ms, anonymous, pad;
};

enum ckpt_wire_kind { CKPT_WIRE_GET, CKPT_WIRE_LIST_PAGE };

/* A question. Four texts follow, each with its NUL: bucket; key, or the prefix of a list; ETag, or
 * delimiter; "", or where the list continues. */
struct ckpt_wire_ask {
    uint32_t id;
    uint16_t kind, worker; /* worker: the number of the worker that is asked, 0 at first */
    uint64_t at, off, len; /* put bytes [off, off+len) of the object at `at` of the memory */
    uint64_t size;         /* of the object */
};

/* The id of an answer that says: a worker has ended, and what it was asked has no answer. `len` is
 * the number of the next one. */
#define CKPT_WIRE_AGAIN UINT32_MAX

/* An answer. A text follows: of an error; else where a list continues, or "". */
struct ckpt_wire_answer {
    uint32_t id, code; /* enum ckpt_code */
    uint64_t len;      /* bytes that were put */
};

/* An entry of a page of a list, followed by ETag and key, each with its NUL. Folders (what a
 * delimiter gives) have no ETag. */
struct ckpt_wire_entry {
    uint64_t size;
    int64_t mtime_ns;
    uint16_t tag_len, key_len; /* with the NUL */
    uint32_t pad;
};

/* At the beginning of the memory; written by the helper. */
struct ckpt_wire_shared {
    atomic_ullong requests, bytes, retries, connections;
    char endpoint[256], region[64], credentials[128];
};

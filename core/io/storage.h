/* SPDX-License-Identifier: Apache-2.0 */
/* The filesystems that this process reads from. Some are far: each request takes a round trip, and
 * they are fast only for who asks for many things at once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* -o far=: which files are far. AUTO: those whose filesystem is a network's by its type, until
 * reads show that it answers at once. */
enum ckpt_far_rule { CKPT_FAR_AUTO, CKPT_FAR_ALWAYS, CKPT_FAR_NEVER };

/* The options of far files. Zeroed: what a run has without any. */
struct ckpt_far_options {
    enum ckpt_far_rule rule;
    uint32_t connections; /* requests at once; 0: the numbers below */
    uint32_t timeout_ms;  /* of a request without an answer; 0: CKPT_FAR_TIMEOUT_MS */
};

/* The time that a server needs to come back. */
enum { CKPT_FAR_TIMEOUT_MS = 120 * 1000 };

static inline uint32_t ckpt_far_timeout_ms(const struct ckpt_far_options *o)
{
    return o->timeout_ms ? o->timeout_ms : CKPT_FAR_TIMEOUT_MS;
}

/* Requests that storage at a distance gets at once: large reads; and questions, that is lists and
 * heads of files, of which one is asked in a chain of three round trips (name, open, read). With
 * half as many, small ones leave a fast storage idle for a part of each round trip; more only wait
 * for each other. */
enum { CKPT_FAR_AT_ONCE = 32, CKPT_FAR_QUESTIONS = 64 };

/* A filesystem. Lives as long as the process; safe from many threads. */
struct ckpt_storage;

/* The filesystem of an open file, or of a directory; `device` is its number (st_dev). NULL: nothing
 * can be known of it. */
struct ckpt_storage *ckpt_storage_of(int fd, uint64_t device);

/* Is it one that several machines share, or a FUSE daemon's, by its type? */
bool ckpt_storage_is_shared(const struct ckpt_storage *s);

/* Does its kind find names that differ in upper and lower case? */
bool ckpt_storage_ignores_case(const struct ckpt_storage *s);

/* Are files of it far? s may be NULL, which is near. */
bool ckpt_storage_is_far(const struct ckpt_storage *s, enum ckpt_far_rule rule);

/* May a request hang there for as long as another machine, or a FUSE daemon, gives no answer? Also
 * of a shared one that answers at once. s may be NULL: no. */
bool ckpt_storage_may_hang(const struct ckpt_storage *s, enum ckpt_far_rule rule);

/* Note that it has answered a request that was made at begun_ms (ckpt_now_ms). s may be NULL. */
void ckpt_storage_heard(struct ckpt_storage *s, uint64_t begun_ms);

/* Has it answered nothing for so long? s may be NULL: nothing is known of any answer. */
bool ckpt_storage_is_silent(const struct ckpt_storage *s, uint32_t for_ms);

/* Does a request hang that was made then? It has for timeout_ms, and the storage has answered none
 * for as long, or has one that was made so much later: behind many large ones on a slow network, a
 * request may take long. s may be NULL. */
bool ckpt_storage_hangs(const struct ckpt_storage *s, uint64_t begun_ms, uint32_t timeout_ms);

/* Has it not been decided yet whether a shared filesystem answers at once? Then
 * ckpt_storage_answered is to be told of small reads of what was in no cache. */
bool ckpt_storage_is_undecided(const struct ckpt_storage *s);

/* Tell how long such a read took. */
void ckpt_storage_answered(struct ckpt_storage *s, uint64_t ns);

/* A read of a large part, of which nothing is in the page cache. */
struct ckpt_storage_read {
    uint64_t began, begin_ns;
    bool direct; /* read with O_DIRECT */
    bool was_alone;
};

/* Begin to read a large part, and say how. The first ones that are read alone, beside no other, are
 * read in both ways, and the faster one is used from then on. */
struct ckpt_storage_read ckpt_storage_read_begins(struct ckpt_storage *s);

/* End it: len bytes have come, or it has failed. */
void ckpt_storage_read_ends(struct ckpt_storage *s, const struct ckpt_storage_read *r,
                            uint64_t len);

/* Note that O_DIRECT was refused, or came short: it is not used again. */
void ckpt_storage_refused_direct(struct ckpt_storage *s);

/* The kind of filesystem, and why it is far or near: "NFS: far by its type", malloc'ed. NULL: no
 * memory. */
char *ckpt_storage_describe(const struct ckpt_storage *s, enum ckpt_far_rule rule);

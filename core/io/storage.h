/* SPDX-License-Identifier: Apache-2.0 */
/* The filesystems that this process reads from. Some are far: each request takes a round trip, and
 * they are fast only for who asks for many things at once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* -o far=: which files are far. AUTO: those whose filesystem is a network's by its type, until
 * reads show that it answers at once. */
enum ckpt_far_rule { CKPT_FAR_AUTO, CKPT_FAR_ALWAYS, CKPT_FAR_NEVER };

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

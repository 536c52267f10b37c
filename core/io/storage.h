/* SPDX-License-Identifier: Apache-2.0 */
/* The filesystems that this process reads from. Some are far: each request takes a round trip, and
 * they are fast only for who asks for many things at once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* -o far=: which files are far. AUTO: those whose filesystem is a network's by its type, until
 * reads show that it answers at once. */
enum ckpt_far { CKPT_FAR_AUTO, CKPT_FAR_ALWAYS, CKPT_FAR_NEVER };

/* What is known of one filesystem. Lives as long as the process; safe from many threads. */
struct ckpt_storage;

/* The filesystem of an open file. NULL: nothing can be known of it. */
struct ckpt_storage *ckpt_storage_of(int fd);

/* Is it one that several machines share, or a FUSE daemon's, by its type? */
bool ckpt_storage_is_shared(const struct ckpt_storage *s);

/* Are files of it far? s may be NULL, which is near. */
bool ckpt_storage_is_far(const struct ckpt_storage *s, enum ckpt_far rule);

/* Has it not been decided yet whether a shared filesystem answers at once? Then
 * ckpt_storage_answered is to be told of small reads of what was in no cache. */
bool ckpt_storage_is_undecided(const struct ckpt_storage *s);
void ckpt_storage_answered(struct ckpt_storage *s, int64_t ns);

/* May files be read with O_DIRECT as far as it is known? And that they may not, as it was refused,
 * came short or was slow. */
bool ckpt_storage_takes_direct(const struct ckpt_storage *s);
void ckpt_storage_refused_direct(struct ckpt_storage *s);

/* The kind of filesystem, and why it is far or near: "NFS: far by its type", malloc'ed. NULL: no
 * memory. */
char *ckpt_storage_describe(const struct ckpt_storage *s, enum ckpt_far rule);

/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that the processes of a machine share. Each process keeps the buffers of its loads in a
 * file without a name (memfd), which the others open by /proc/PID/fd and map to read: no
 * byte is copied on its way, and nothing must be permitted. A process that cannot open another's
 * file (another user's, or in another PID namespace) uses sockets. The first word of the file is a
 * random number, by which others know that they have opened the right one. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* A hash of the machine's name and boot id, equal for processes of one machine. If CKPTFS_NODE is
 * set, a hash of its value: tests play several machines. */
uint64_t ckpt_node_digest(void);

/* Another process needs these numbers to map this one's memory. */
struct ckpt_shm_place {
    uint64_t node; /* ckpt_node_digest */
    uint64_t pid, fd;
    uint64_t word;
};

/* This process's file; one thread at a time uses it. */
struct ckpt_shm {
    int fd;              /* -1: the system has none */
    uint64_t word, next; /* the first word, and the end of what has been given out */
    unsigned char *base; /* the buffers that were given out last: len bytes, at `at` in the file */
    uint64_t at, len;
};

/* Make it; without a file if that is not possible. */
void ckpt_shm_init(struct ckpt_shm *s, uint64_t word);
void ckpt_shm_close(struct ckpt_shm *s);

/* Say where it is. */
void ckpt_shm_describe(const struct ckpt_shm *s, struct ckpt_shm_place *ret);

/* Map len bytes of it. NULL: no memory, or there is no file. The memory is the caller's, who
 * ends it with ckpt_shm_unmap, also after ckpt_shm_close. */
void *ckpt_shm_map(struct ckpt_shm *s, uint64_t len);

/* Give memory back to the system, and unmap it; also memory that is not shared. NULL is allowed. */
void ckpt_shm_unmap(void *ptr, uint64_t len);

/* Where a buffer is in the file. False: it is not in the buffers that were given out last. */
bool ckpt_shm_offset(const struct ckpt_shm *s, const void *ptr, uint64_t *ret);

/* Another process's file, as far as it is mapped here. */
struct ckpt_shm_view {
    int fd; /* -1: it is not open */
    const unsigned char *base;
    uint64_t len;
};

/* Open another process's file; false: it is not on this machine, or can't be opened. */
bool ckpt_shm_open(struct ckpt_shm_view *v, const struct ckpt_shm_place *of);
void ckpt_shm_leave(struct ckpt_shm_view *v);

/* Can it be opened? */
bool ckpt_shm_reach(const struct ckpt_shm_place *of);

/* len bytes at an offset of it; NULL: they are not there. What was returned before for bytes of an
 * earlier load may not be used any more. */
const unsigned char *ckpt_shm_at(struct ckpt_shm_view *v, uint64_t off, uint64_t len);

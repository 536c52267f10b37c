/* SPDX-License-Identifier: Apache-2.0 */
/* Ends of objects, which have headers, in files that stay: one for each ETag. Each is one of a
 * fixed number of files, which a later object may take; what is damaged is not used. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <xxhash.h>

#include "base/err.h"

/* A descriptor of the folder `say`, which is made; NULL: ckptfs below the user's folder of caches,
 * and -1 if there is none. */
int ckpt_cache_open(const char *say, int *ret_fd, struct ckpt_err *err);

/* The default folder, malloc'ed; NULL: there is none. */
char *ckpt_cache_default(void);

/* Get bytes [off, off+len) of an object. False: they are not there. */
bool ckpt_cache_get(int fd, XXH128_hash_t object, uint64_t off, void *buf, size_t len);

/* Keep them. If that fails, they are fetched again. */
void ckpt_cache_put(int fd, XXH128_hash_t object, uint64_t off, const void *buf, size_t len);

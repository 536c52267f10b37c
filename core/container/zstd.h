/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a source that are compressed by Zstandard (RFC 8878; one frame, or several), as sources
 * of the bytes that they hold.
 *
 * Their length is known only when all of it was decompressed, which happens when a source is made:
 * only its beginning and its end are kept then, for reading headers. The first read of another part
 * decompresses all of it once more, into a place that several sources share. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "container/decoded.h"
#include "io/source.h"

enum { CKPT_ZSTD_MAGIC_LEN = 4 };

/* Do these bytes begin a frame? */
bool ckpt_zstd_is_frame(const unsigned char head[CKPT_ZSTD_MAGIC_LEN]);

/* The bytes in [off, off+len) of another source, decompressed; the source is referenced. FORMAT:
 * the bytes are damaged, cut short, or more than max_len when decompressed. Sources that share a
 * place, each of which counts a reference, may be made by many threads. */
int ckpt_source_zstd_new(struct ckpt_decoded *decoded, struct ckpt_source *of, uint64_t off,
                         uint64_t len, uint64_t max_len, struct ckpt_source **ret,
                         struct ckpt_err *err);

/* Makes a source likewise of bytes whose length is known, so that nothing is decompressed before
 * the first read. Every read fails with FORMAT if they are more or fewer than `size`; so does this
 * if len bytes can't hold as many. */
int ckpt_source_zstd_of_size(struct ckpt_decoded *decoded, struct ckpt_source *of, uint64_t off,
                             uint64_t len, uint64_t size, struct ckpt_source **ret,
                             struct ckpt_err *err);

/* The source is made, and its headers are read: free the memory that only this needed (the
 * beginning and the end of its bytes). No thread may be reading. */
void ckpt_source_zstd_settle(struct ckpt_source *s);

/* A stream of what such a range holds when it is decompressed. `of` is borrowed. */
struct ckpt_zstd_stream;
int ckpt_zstd_stream_new(struct ckpt_source *of, uint64_t off, uint64_t len,
                         struct ckpt_zstd_stream **ret, struct ckpt_err *err);
/* The next len bytes of it, or fewer if it ends. FORMAT: the bytes are damaged, or cut short. */
int ckpt_zstd_stream_read(struct ckpt_zstd_stream *s, void *buf, size_t len, size_t *ret_len,
                          struct ckpt_err *err);
/* NULL is allowed. */
void ckpt_zstd_stream_free(struct ckpt_zstd_stream *s);

/* Decompress len bytes in memory; *ret_data, of *ret_len bytes, is malloc'ed. FORMAT: the bytes are
 * damaged, cut short, or more than max_len when decompressed. */
int ckpt_zstd_decompress(const void *data, size_t len, size_t max_len, void **ret_data,
                         size_t *ret_len, struct ckpt_err *err);

/* Compress (level 1) into memory: `len` bytes, added in any parts, become one frame. */
struct ckpt_zstd_frame;
int ckpt_zstd_frame_new(uint64_t len, struct ckpt_zstd_frame **ret, struct ckpt_err *err);
int ckpt_zstd_frame_add(struct ckpt_zstd_frame *f, const void *data, size_t len,
                        struct ckpt_err *err);
/* End and free it; *ret_data, of *ret_len bytes, is malloc'ed. ret_data is NULL: give it up. */
int ckpt_zstd_frame_end(struct ckpt_zstd_frame *f, void **ret_data, size_t *ret_len,
                        struct ckpt_err *err);

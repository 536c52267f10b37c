/* SPDX-License-Identifier: Apache-2.0 */
/* Reading bytes of tensors: byte range -> elements -> pieces -> few big reads -> one copy. */
#ifndef CKPT_TENSOR_READ_H
#define CKPT_TENSOR_READ_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/boxes.h"
#include "tensor/catalog.h"

/* Read bytes [off, off+len) of the tensor in row-major order into buf. The range must lie inside
 * the tensor (assert). Safe from many threads. Verifies, after the last read, that no file changed
 * since it was opened (STALE). On failure buf is undefined and err names the source and the offset
 * in it. */
int ckpt_tensor_pread(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                      struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The values that a nanotron checkpoint holds besides tensors, as ckpt_reader.objects returns them.
 */
#ifndef CKPT_FORMAT_NANOTRON_OBJECTS_H
#define CKPT_FORMAT_NANOTRON_OBJECTS_H

#include "format/reader.h"

/* Implements ckpt_reader.objects. */
int ckpt_nanotron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err);

#endif

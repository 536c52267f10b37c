/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a form of changes: how a trainer writes a version of a model that holds only what
 * has changed since another. The form's files and its index are `struct ckpt_changes_form`, which
 * is public because `ckpt delta` writes the files; what compares two tensors stands here.
 *
 * A form is a `ckpt_changes_NAME` in the trainer's folder, and one line in writers.def. */
#pragma once

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

#include "base/err.h"
#include "tensor/catalog.h"

struct ckpt_reading;

struct ckpt_changes_writer {
    struct ckpt_changes_form form;
    /* Make the change that leads from tensor a to tensor b, which has as many bytes, as
     * ckpt_view_change says. Safe from many threads. */
    int (*make)(const struct ckpt_tensor *a, struct ckpt_reading *of_a, const struct ckpt_tensor *b,
                struct ckpt_reading *of_b, bool overwrite, struct ckpt_change *ret,
                struct ckpt_err *err);
};

/* Each is one line of format/writers.def. */
#define CKPT_WRITER(NAME, ...)
#define CKPT_CHANGES(NAME) extern const struct ckpt_changes_writer ckpt_changes_##NAME;
#include "format/writers.def"
#undef CKPT_CHANGES
#undef CKPT_WRITER

/* All forms, NULL-terminated, in the order of format/writers.def. */
extern const struct ckpt_changes_writer *const ckpt_changes_writers[];

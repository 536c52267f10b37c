/* SPDX-License-Identifier: Apache-2.0 */
/* The list of forms of changes. */
#include "format/changes.h"

#include <stddef.h>

const struct ckpt_changes_writer *const ckpt_changes_writers[] = {
#define CKPT_WRITER(NAME, ...)
#define CKPT_CHANGES(NAME) &ckpt_changes_##NAME,
#include "format/writers.def"
#undef CKPT_CHANGES
#undef CKPT_WRITER
    NULL,
};

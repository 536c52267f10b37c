/* SPDX-License-Identifier: Apache-2.0 */
/* One export: the files of a view in a directory, written, resumed or compared. */
#pragma once

#include <stdatomic.h>

#include "tool.h"

struct ckpt_export {
    const struct ckpt_tool *tool; /* its options */
    const char *step;             /* of several, which the report then names; or NULL */
    bool only_new;       /* leave a directory that has all files as it is, and do not compare */
    atomic_bool writing; /* DEST is unfinished now */
    bool wrote;          /* result: something was written, and DEST is finished */
};

/* Export the view into dest, and print a report. A failure leaves what the same call can resume, or
 * nothing. */
int ckpt_export(struct ckpt_export *e, struct ckpt_view *view, const char *dest,
                struct ckpt_err *err);

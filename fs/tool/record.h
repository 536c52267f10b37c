/* SPDX-License-Identifier: Apache-2.0 */
/* The record of finished exports of several steps, DEST/.ckptfs-exports, beside the folders of the
 * steps: one JSON object per line, {"step", "generation"}, which says which save of the step its
 * folder holds. The last line of a step counts. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include <ckptfs/ckptfs.h>

struct ckpt_record {
    const char *dest; /* borrowed */
    json_t *saves;    /* step -> generation, as hexadecimal digits; NULL: not read */
};

/* Read the record of the folder `dest`; there may be none. */
int ckpt_record_read(struct ckpt_record *ret, const char *dest, struct ckpt_err *err);
void ckpt_record_release(struct ckpt_record *r);

/* Which save of the step was exported? False: that is not known. */
bool ckpt_record_find(const struct ckpt_record *r, const char *step, uint64_t *ret_generation);

/* Record that this save was exported. Other processes may add to the record at the same time. */
int ckpt_record_add(struct ckpt_record *r, const char *step, uint64_t generation,
                    struct ckpt_err *err);

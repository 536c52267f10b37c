/* SPDX-License-Identifier: Apache-2.0 */
/* Small things that all programs need. */
#pragma once

#include <jansson.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"

/* For ckpt_cleanup. */
CKPT_CLEANUP_BY(ckpt_view_release, struct ckpt_view)
CKPT_CLEANUP_BY(ckpt_run_close, struct ckpt_run)

/* Get what the library knows of a tensor. Its texts and its shape are the view's. */
struct ckpt_tensor_info ckptfs_tensor(const struct ckpt_view *view, size_t i);

/* A new list of the tensor's dimensions; NULL: out of memory. */
json_t *ckptfs_json_shape(const struct ckpt_tensor_info *info);

/* Make a string of a file name, which may hold any bytes: those that are not UTF-8 are escaped as
 * in error texts. NULL: out of memory. */
json_t *ckptfs_json_text(const char *bytes);

/* A message as a line of JSON: {"time", "severity", "program", "text"}. The caller frees it; NULL:
 * no memory. */
char *ckptfs_log_json(const char *program, enum ckpt_log_severity severity, const char *text);

/* Raise the limit of open files as far as the system permits: a run may have more shards than the
 * usual 1024 descriptors. */
void ckptfs_allow_many_files(void);

/* Make a folder, and those above it, where they are not there. *ret_made: so many folders, the last
 * ones of the path, were made; also after a failure. */
int ckptfs_make_folder(const char *path, size_t *ret_made, struct ckpt_err *err);

/* Remove the last `made` folders of the path again, as far as they are empty. */
void ckptfs_remove_made(const char *path, size_t made);

/* Milliseconds from a scan of a run for new steps, which took took_ms, to the next: lists of a
 * bucket are paid for, and those of a large one take long; storage is asked for a fifth of the time
 * at most. */
uint64_t ckptfs_scan_pause(const char *run, uint64_t took_ms);

/* Add "bucket" to the object, with what ckpt_bucket_info tells; nothing if no bucket is read. */
void ckptfs_json_bucket(json_t *into);

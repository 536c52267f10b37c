/* SPDX-License-Identifier: Apache-2.0 */
/* latest_checkpointed_iteration.txt, the pointer file of Megatron's runs and of verl's, which name
 * their steps' folders differently: iter_0000010, and global_step_10. It is written when all files
 * of the step are there. */
#pragma once

#include <stdbool.h>

#include "io/dir.h"

enum ckpt_tracker_owner { CKPT_TRACKER_MEGATRON, CKPT_TRACKER_VERL };

/* The name of the latest step by the tracker of this folder, malloc'ed, if the steps in it are
 * named as those of `owner`; else NULL. */
char *ckpt_tracker_latest(struct ckpt_dir *run, enum ckpt_tracker_owner owner);

/* Is the step `name` newer than the step `latest`, which a tracker names (NULL: there is none)?
 * False if one of them is not named as those of `owner`. */
bool ckpt_tracker_is_newer(const char *name, const char *latest, enum ckpt_tracker_owner owner);

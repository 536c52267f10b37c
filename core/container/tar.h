/* SPDX-License-Identifier: Apache-2.0 */
/* The index of an uncompressed tar archive: POSIX ustar and pax, GNU's long names, and what came
 * before them (POSIX.1-2017, pax; tar(5)). Python's tarfile and GNU tar write these. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "io/archive_index.h"
#include "io/source.h"

enum {
    CKPT_TAR_BLOCK = 512,
    CKPT_TAR_MAX_EXTENDED = 1 << 20, /* bytes of one pax header, or of a long name */
};

/* Is this block a header of a tar archive? Its checksum decides. */
bool ckpt_tar_is_header(const unsigned char block[CKPT_TAR_BLOCK]);

/* Add all members of the archive s to the index m. FORMAT: a header is damaged, a member ends after
 * the file, or the mark at the archive's end is missing. UNSUPPORTED: sparse files, archives of
 * several volumes. */
int ckpt_tar_index(struct ckpt_source *s, struct ckpt_archive_index *m, struct ckpt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
/* Zip archives as torch.save writes them: members stored, not compressed; sizes only in the central
 * directory, which is found from the end (PKWARE APPNOTE; zip64). An archive may be a part of a
 * file. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/source.h"

enum {
    CKPT_ZIP_HEAD = 2048, /* bytes of the beginning that are read with one call */
    CKPT_ZIP_MAX_DIRECTORY = 1 << 30,
    CKPT_ZIP_MAX_NAME = 4096,
};

struct ckpt_zip_entry {
    const char *name; /* not terminated */
    size_t name_len;
    uint64_t header; /* of the member, in the archive */
    uint64_t next;   /* what follows the member: the next header, or the central directory */
    uint64_t len;    /* of its data */
    uint32_t crc;    /* of its data; 0: it was not computed */
    bool described;  /* a descriptor follows the data */
    bool is_link;    /* a symbolic link: its data are the target's name */
};

struct ckpt_zip {
    struct ckpt_source *source; /* borrowed */
    uint64_t off, len;          /* of the archive in the source */
    uint64_t data_end;          /* where the central directory begins, in the archive */
    struct ckpt_zip_entry *entry;
    size_t nentry;
    unsigned char *directory;
    size_t head_len;
    unsigned char head[CKPT_ZIP_HEAD];
};

/* Read the directory of the archive in bytes [off, off+len) of s. Offsets in errors are the
 * archive's own. */
int ckpt_zip_open(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_zip *ret,
                  struct ckpt_err *err);
void ckpt_zip_release(struct ckpt_zip *z);

/* Find the offset of a member's data in the source. The member's own header must agree with the
 * directory: the name, complete extra fields, and data that end, with their descriptor, where the
 * next member begins. */
int ckpt_zip_data(const struct ckpt_zip *z, const struct ckpt_zip_entry *e, uint64_t *ret_off,
                  struct ckpt_err *err);

/* FORMAT if a member's data, whose CRC-32 is crc, are not what was archived. */
int ckpt_zip_check(const struct ckpt_zip_entry *e, uint32_t crc, struct ckpt_err *err);

/* Bytes of the source within the archive, from what is in memory where possible. */
int ckpt_zip_pread(const struct ckpt_zip *z, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err);

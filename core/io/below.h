/* SPDX-License-Identifier: Apache-2.0 */
/* Paths below a directory: as text, and opening them. "." is the directory itself. */
#pragma once

#include <stdbool.h>

struct statx;

/* Where a symbolic link below the directory may lead. */
enum ckpt_links {
    CKPT_LINKS_BENEATH, /* anywhere below `root` (see ckpt_dir_open_below) */
    CKPT_LINKS_ANY,     /* -o follow_symlinks */
};

struct ckpt_below {
    int fd; /* of the directory; -1: none */
    enum ckpt_links links;
    char *real;  /* its canonical path, for links that are absolute or leave and come back */
    char *blobs; /* of the same model in a hub cache, canonical; or NULL */
};

/* Open what a path leads to: a descriptor (close-on-exec), or -1 and errno, which is EXDEV if a
 * link leads out. */
int ckpt_below_open(const struct ckpt_below *b, const char *below, int flags);

/* statx(2) of what a path leads to, with its time of creation: 0, or -1 and errno as for
 * ckpt_below_open. */
int ckpt_below_stat(const struct ckpt_below *b, const char *below, struct statx *ret);

/* For the canonical path of a snapshot in a hub cache, .../models--ORG--NAME/snapshots/REV: the
 * path .../models--ORG--NAME/blobs, malloc'ed (the layout of huggingface_hub's cache). NULL: the
 * path is not a snapshot's, or there is no memory. */
char *ckpt_below_blobs(const char *real);

/* May this be the name of a file below a directory: relative, no "..", no empty component? */
bool ckpt_below_ok(const char *name);

/* The path b below the path a, malloc'ed. NULL: no memory. */
char *ckpt_below_join(const char *a, const char *b);

/* Is the canonical path the canonical path `top`, or below it? */
bool ckpt_is_below(const char *path, const char *top);

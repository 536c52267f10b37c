/* SPDX-License-Identifier: Apache-2.0 */
/* Dividing the files of an export among the processes that write it.
 *
 * Every file is a sequence of units of `cut` bytes (the last one may be shorter; an empty file is
 * one empty unit), which is what a process claims and what is whole or lacking. Where there are
 * thousands of files, small ones that follow each other have one claim, and are one part's. Units
 * and claims do not depend on the number of parts, so that parts of different divisions can follow
 * each other.
 *
 * A part gets whole files, so that a file's digest is computed while it is written. Where some part
 * would get more than 1.2 times the mean by that, the units of the largest files are dealt out one
 * by one. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tool/items.h"

struct ckpt_spans {
    uint64_t cut;
    size_t n;        /* units */
    size_t nitem;    /* files */
    size_t *first;   /* of nitem + 1: a file's first unit */
    size_t *claim;   /* of n: the unit whose claim is that of this unit, too */
    uint32_t *owner; /* of n: the part that writes the unit, from 0 */
};

/* Divide the items into `parts`; every process computes the same. Release also after a failure. */
int ckpt_spans_divide(const struct ckpt_items *items, uint64_t cut, uint32_t parts,
                      struct ckpt_spans *ret, struct ckpt_err *err);
void ckpt_spans_release(struct ckpt_spans *s);

/* The file in which a unit lies, and the unit's bytes [*ret_from, *ret_to) of it. */
size_t ckpt_spans_place(const struct ckpt_spans *s, const struct ckpt_items *items, size_t unit,
                        uint64_t *ret_from, uint64_t *ret_to);

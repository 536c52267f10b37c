/* SPDX-License-Identifier: Apache-2.0 */
/* How much of a catalogue's files is in the page cache: an estimate from a few of them. The loader
 * uses it to choose which ranks read, and whether they bypass the page cache. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct ckpt_catalog;

/* Sums over the files that were looked at. */
struct ckpt_residency {
    double resident; /* bytes in the page cache of this node */
    double bytes;    /* bytes of the files that were looked at */
    bool shared;     /* one of them is on a storage that machines share */
};

/* Look at a few of the catalogue's files: those that fall to rank `rank` of `size` ranks. */
void ckpt_residency_estimate(const struct ckpt_catalog *cat, uint32_t rank, uint32_t size,
                             struct ckpt_residency *ret);

/* The fraction that is in the page cache, 0 to 1; 1 if no file was looked at. */
double ckpt_residency_part(const struct ckpt_residency *r);

/* The smallest such fraction of a node, from the estimates of n ranks; node_of[r], less than nnode,
 * is the node of rank r. 0 or -1 (no memory). */
int ckpt_residency_least(const struct ckpt_residency *of, uint32_t n, const uint32_t *node_of,
                         uint32_t nnode, double *ret);

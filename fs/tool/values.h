/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing the elements of two tensors as numbers. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A long double holds every value of every dtype, and every difference of two 64-bit integers. */
struct ckpt_values {
    const char *dtype; /* as safetensors names it */
    double tolerance;  /* elements whose difference is not greater are equal; 0: only if all bits
                          are */
};

/* ckpt_values_compare counts here what it finds; all is zero at first. */
struct ckpt_gap {
    uint64_t differing, within; /* elements that differ by more than the tolerance; by less */
    uint64_t nan;               /* of those that differ: NaN on one side only */
    /* These members describe the element that differs most. Where there is no difference of two
     * numbers (NaN, or a dtype that is not known here), max is -1 and the element is the first. */
    uint64_t at;
    long double max, a, b;
};

/* Compare n elements of `size` bytes, of which the first has the number `first`. */
void ckpt_values_compare(const struct ckpt_values *v, const void *a, const void *b, size_t n,
                         size_t size, uint64_t first, struct ckpt_gap *gap);

/* Add what was found in another part of the tensor. */
void ckpt_gap_add(struct ckpt_gap *gap, const struct ckpt_gap *part);

/* Write a value of the dtype as a decimal number. */
#define CKPT_VALUE 40
const char *ckpt_value_text(const char *dtype, long double value, char buf[CKPT_VALUE]);

/* Are the dtype's values known here? */
bool ckpt_value_is_known(const char *dtype);

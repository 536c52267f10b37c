/* SPDX-License-Identifier: Apache-2.0 */
/* Fully qualified names of tensors: words between dots. */
#pragma once

#include <stddef.h>

/* The order of a state dict that transformers writes after from_pretrained (dot_natural_key):
 * between dots, numbers before words, numbers by value, words by code point but for digits at their
 * end. */
int ckpt_fqn_cmp(const char *a, const char *b);

/* The order of a state dict, for formats that store names sorted: compares like strcmp, by the
 * position of each part of a dotted name among the n words (siblings in the order in which modules
 * register them; words that are not there go last), then numbers by value and other words by name.
 * A total order. */
int ckpt_order_cmp(const char *const *words, size_t n, const char *a, const char *b);

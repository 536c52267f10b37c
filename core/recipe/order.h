/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a state dict, for formats that keep names sorted. */
#ifndef CKPT_RECIPE_ORDER_H
#define CKPT_RECIPE_ORDER_H

#include "recipe/types.h"

/* Like strcmp, by the place of each part of a dotted name among the words of `order` (siblings in
 * the order in which modules register them). Numbers by value; parts that are not among them come
 * after those that are, by name. Total. */
int ckpt_order_cmp(const struct ckpt_texts *order, const char *a, const char *b);

#endif

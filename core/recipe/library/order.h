/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a state dict, for formats that store names sorted. */
#ifndef CKPT_RECIPE_LIBRARY_ORDER_H
#define CKPT_RECIPE_LIBRARY_ORDER_H

#include "recipe/library/types.h"

/* Compares like strcmp, by the position of each part of a dotted name in the list `order` (siblings
 * in the order in which modules register them). Numbers are compared by value; parts that are not
 * in the list come last, by name. A total order. */
int ckpt_order_cmp(const struct ckpt_texts *order, const char *a, const char *b);

#endif

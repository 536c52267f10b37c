/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of config.json that options can set: those that the tree's model files name. */
#ifndef CKPT_RECIPE_LIBRARY_KEYS_H
#define CKPT_RECIPE_LIBRARY_KEYS_H

#include <stdbool.h>

/* Is the key among "needs", "takes" or "config" of an embedded model file? Lists and objects of
 * "config" are the model file's own and no options. Safe from many threads. */
bool ckpt_keys_known(const char *key);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Converting the lists and dicts of a pickle to JSON, for callers that convert the other values. */
#ifndef CKPT_CONTAINER_PICKLE_WALK_H
#define CKPT_CONTAINER_PICKLE_WALK_H

#include "base/json.h"
#include "container/pickle.h"

/* How a caller converts members. The callbacks get `ctx`. */
struct ckpt_pickle_walk {
    const struct ckpt_pickle *p;
    void *ctx;
    json_t *(*convert)(void *ctx, ckpt_pv v);        /* a new value; NULL ends the walk */
    const char *(*key)(void *ctx, ckpt_pv dict_key); /* NULL: the member is left out */
};

/* A new array of the members of a list or tuple, or a new object of those of a dict. NULL: out of
 * memory, or convert has returned NULL. */
json_t *ckpt_pickle_walk_list(const struct ckpt_pickle_walk *w, ckpt_pv v);
json_t *ckpt_pickle_walk_dict(const struct ckpt_pickle_walk *w, ckpt_pv v);

#endif

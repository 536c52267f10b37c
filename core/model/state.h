/* SPDX-License-Identifier: Apache-2.0 */
/* The option state=: what a view shows instead of the weights. The state of an optimizer is another
 * set of values for the same parameters, so it takes the weights' places before anything else is
 * done, and the rules that make a model of the weights make one of it. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "tensor/catalog.h"

/* A state has the word that the option has: "exp_avg". NULL, or "weight":
 * the weights, as ever. These are for views with an optimizer: the weights, of a catalogue that is
 * kept; the masters, and the weights of parameters that have none; and tensors that lie nowhere,
 * each in a source with the name of the reader's tensor (a weight; of a parameter that is stored in
 * another form than the weights, its "exp_avg"), so that the model's tensors tell of which they are
 * made. */
#define CKPT_STATE_WEIGHT "weight"
#define CKPT_STATE_TRAINED "master or weight"
#define CKPT_STATE_ORIGIN "origin"

/* Is a state to be shown instead of the weights? */
bool ckpt_state_is_asked(const char *state);

/* Is arithmetic of the mapping (x + 1) to be left out? It belongs to weights and masters. */
bool ckpt_state_is_moment(const char *state);

/* Is a tensor of a reader's catalogue the state `kind` of a parameter that is stored in another
 * form than the weights, so that no weight there has its name? */
bool ckpt_state_is_of_other_form(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                                 const char *kind);

/* A request. */
struct ckpt_state_asked {
    const char *state;
    bool raw;         /* view=raw */
    const char *path; /* of the checkpoint, for messages */
};

/* Make a catalogue in which the state that is asked for is in the place of each weight of cat,
 * which is the reader's. A weight that has none lies nowhere (ckpt_tensor_is_nowhere) there; but if
 * parameters are stored in another form than the weights (*ret_other_form), it is not there at all.
 * MISSING: the checkpoint has no such state. CONFLICT: one has another shape than its parameter, or
 * two belong to one. UNSUPPORTED: nothing says whose they are. */
int ckpt_state_make(const struct ckpt_state_asked *asked, const struct ckpt_catalog *cat,
                    struct ckpt_catalog **ret, bool *ret_other_form, struct ckpt_err *err);

/* Replace *cat by the catalogue that ckpt_state_make makes of it; with view=raw, keep the state's
 * tensors under their parameters' names. Nothing to do if no state is asked for. */
int ckpt_state_choose(const struct ckpt_state_asked *asked, struct ckpt_catalog **cat,
                      bool *ret_other_form, struct ckpt_err *err);

/* Tell which tensors of the model are left out because they lie nowhere. *ret_names are the names
 * of the others, with NULL for those (the caller frees the array); NULL: none is left out. MISSING:
 * the reader could not read all of the state. */
int ckpt_state_leave_out(const struct ckpt_state_asked *asked, struct ckpt_catalog *cat,
                         const char ***ret_names, struct ckpt_err *err);

/* List the states of a catalogue: {"exp_avg": {"tensors": 10, "bytes": 4000, "dtypes": {"F32":
 * 10}}}, the weights among them; new. NULL: out of memory. */
json_t *ckpt_state_list(const struct ckpt_catalog *cat);

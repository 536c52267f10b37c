/* SPDX-License-Identifier: Apache-2.0 */
/* Whose value a tensor of an optimizer is: readers know how their framework spells it, and this
 * finds the weights that are meant. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "tensor/catalog.h"

/* The parts of an optimizer's name for a tensor; texts are not terminated. */
struct ckpt_state_name {
    const char *root; /* the part before: of several optimizers, each has another */
    size_t root_len;
    const char *parameter;
    size_t parameter_len;
    const char *kind; /* "exp_avg"; "master" where the framework has another word for it */
    size_t kind_len;
};

/* Take a name apart; false: it is no optimizer's tensor. */
typedef bool ckpt_state_parse_fn(const char *name, struct ckpt_state_name *ret);

/* The names that torch's get_state_dict gives, and others who nest or flatten states as it does:
 *
 *     [PREFIX.]optim[izer...].[state.]PARAMETER.KIND      optim.state.layers.0.weight.exp_avg
 *
 * Without "state." only the kinds of Adam and of SGD are taken for such. */
ckpt_state_parse_fn ckpt_state_parse_torch;

/* State of all tensors of cat that are an optimizer's, by their names, which parameter's they are
 * (ckpt_catalog_set_state). A parameter's weight has its name, with the same beginning for all
 * parameters of one optimizer: "model." or "app.model.". It is not stated if no weight has such a
 * name, or if two beginnings are as good. */
int ckpt_states_label(struct ckpt_catalog *cat, ckpt_state_parse_fn *parse, struct ckpt_err *err);

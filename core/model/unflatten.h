/* SPDX-License-Identifier: Apache-2.0 */
/* Flat parameters of FSDP1 (LOCAL_STATE_DICT): one tensor of rank 1 per wrapped module, in which
 * all its parameters lie one after the other. The layout is that of torch's FlatParamHandle
 * (torch/distributed/fsdp/_flat_param.py, _init_flat_param_and_metadata and flatten_tensors):
 *
 *  - the tensor of the module at PREFIX is called PREFIX_flat_param; the modules of wrappers are
 *    not part of names (_state_dict_utils.py, _local_post_state_dict_hook);
 *  - it has the parameters below PREFIX that are not below the prefix of a wrapped module inside,
 *    in the order in which modules register them, each in row-major order; a tied parameter occurs
 *    once, where it was registered first;
 *  - with use_orig_params, padding before a parameter makes its offset a multiple of 16 bytes of
 * the dtype in which the module computes, which mixed precision makes another one than the stored;
 *    and padding at the end makes the length a multiple of the number of ranks. All padding is 42;
 *  - without use_orig_params there is no padding, but the last ranks may have less than others.
 *
 * The checkpoint says neither names, shapes nor order. Names and shapes are those of the base's
 * weights. The order is a fact about the model type, because many parameters have equal sizes: only
 * types of which tests/interop/test_flat.py proves it are served ("flat_parameters"). */
#ifndef CKPT_MODEL_UNFLATTEN_H
#define CKPT_MODEL_UNFLATTEN_H

#include "base/err.h"
#include "model/base.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* Replace the flat parameters of a catalogue by the parameters that they contain; base may be NULL.
 * UNSUPPORTED: the layout is not known. CONFLICT: the sizes are not those of the base. */
int ckpt_unflatten(struct ckpt_catalog *cat, const struct ckpt_types *types,
                   const struct ckpt_base *base, const json_t *config, struct ckpt_err *err);

#endif

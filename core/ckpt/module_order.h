/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a state dict, for formats that keep names sorted. */
#ifndef CKPT_CKPT_MODULE_ORDER_H
#define CKPT_CKPT_MODULE_ORDER_H

/* Like strcmp, by the place of each part of a dotted name in the module tree of transformers'
 * decoders (embed_tokens, layers, norm, lm_head; in a layer self_attn, mlp, norms). Numbers by
 * value; parts that are not known come after those that are, by name. Total. */
int ckpt_module_order_cmp(const char *a, const char *b);

#endif

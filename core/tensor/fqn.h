/* SPDX-License-Identifier: Apache-2.0 */
/* Fully qualified names of tensors: words between dots. */
#ifndef CKPT_TENSOR_FQN_H
#define CKPT_TENSOR_FQN_H

/* The order of a state dict that transformers writes after from_pretrained (dot_natural_key):
 * between dots, numbers before words, numbers by value, words by code point but for digits at their
 * end. */
int ckpt_fqn_cmp(const char *a, const char *b);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What adapter_config.json says about a LoRA adapter: ranks, scales, and whether we can merge it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/library/types.h"

/* Check that the adapter can be merged. UNSUPPORTED: another kind of adapter. MISSING: r or
 * lora_alpha. */
int ckpt_lora_config_check(const json_t *config, struct ckpt_err *err);

/* The scale lora_alpha / r (or / sqrt(r)) of the module or parameter `name`, whose matrices have
 * this rank. CONFLICT: the config gives it another rank. */
int ckpt_lora_config_scale(const json_t *config, const char *name, uint64_t rank, double *ret,
                           struct ckpt_err *err);

/* List the parameters of module `name` that target_parameters names, in the order in which their
 * wrappers are nested, innermost first. Fills at most `cap`; returns their number. */
size_t ckpt_lora_config_parameters(const json_t *config, const struct ckpt_type *type,
                                   const char *name, const char **ret, size_t cap);

/* A base holds experts' parameters as [experts, rows, columns]. Does A multiply the rows and B the
 * columns? PEFT's A multiplies the dimension that it takes for the input: the last one since PEFT
 * 0.19, the middle one before. Some models hold [experts, in, out] in memory, others only on the
 * hub. Returns 0 or 1; -1: the configs do not say. */
int ckpt_lora_config_turned(const json_t *config, const json_t *automodel,
                            const struct ckpt_type *type);

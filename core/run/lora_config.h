/* SPDX-License-Identifier: Apache-2.0 */
/* What adapter_config.json says of a LoRA: ranks, scales, and whether it is one that we can merge.
 */
#ifndef CKPT_RUN_LORA_CONFIG_H
#define CKPT_RUN_LORA_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/types.h"

/* UNSUPPORTED: another kind of adapter; MISSING: r or lora_alpha. */
int ckpt_lora_config_check(const json_t *config, struct ckpt_err *err);

/* lora_alpha / r, or / sqrt(r), of the module (or parameter) `name`, whose matrices have this rank.
 * CONFLICT if the config gives it another. */
int ckpt_lora_config_scale(const json_t *config, const char *name, uint64_t rank, double *ret,
                           struct ckpt_err *err);

/* Of the parameters of module `name` that target_parameters names, those that wrap it, innermost
 * first. Fills at most `cap`; returns how many there are. */
size_t ckpt_lora_config_parameters(const json_t *config, const struct ckpt_type *type,
                                   const char *name, const char **ret, size_t cap);

/* A base holds experts' parameters as [experts, rows, columns]. Does A take the rows, B the
 * columns? PEFT has A take `in`, in its eyes the last dimension since 0.19, the middle one before;
 * some models hold [experts, in, out] in memory, or on the hub only. 0 or 1; -1: the configs do not
 * say.
 */
int ckpt_lora_config_turned(const json_t *config, const json_t *automodel,
                            const struct ckpt_type *type);

#endif

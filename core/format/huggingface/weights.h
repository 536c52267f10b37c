/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a Hugging Face directory that hold its weights.
 *
 * transformers and diffusers look for STEM.safetensors, then for STEM.safetensors.index.json, which
 * lists shards; of a variant (variant="fp16") for STEM.fp16.safetensors and
 * STEM.safetensors.index.fp16.json (utils/hub.py, _add_variant). Shards are named
 * STEM-00001-of-00002.safetensors, and say so how many there are; with a variant its name stands
 * before the numbers, or, as older versions wrote them, behind. torchtune has had names of its own:
 * ft-model-00001-of-00002.safetensors, and hf_model_0001_0.safetensors, of which the second number
 * is the epoch: here the epochs are variants. */
#pragma once

#include <stdint.h>

#include "base/vec.h"
#include "format/reader.h"
#include "io/dir.h"

struct ckpt_hf_weights {
    const char *stem;       /* "model" or another beginning of names; NULL: there are none */
    char *single;           /* the one file; or NULL */
    char *index;            /* the index, which counts where there is no `single`; or NULL */
    CKPT_VEC(char *) shard; /* all of them, where there is neither, in their order */
    char *variant;          /* NULL: none */
    uint64_t nshard;        /* how many shards there are by their names; 0: these don't say it */
};

/* Free it. All zero is empty. */
void ckpt_hf_weights_release(struct ckpt_hf_weights *w);

/* Find them. `variant`: those of this variant; NULL: those without one, or of the only one. It
 * finds nothing in a directory without such files, unless `variant` is given. MISSING: a shard, or
 * the variant. CONFLICT: several variants, or shards of two models. *ret is all zero before; the
 * caller releases it, on failure too. */
int ckpt_hf_weights_find(const struct ckpt_dir *dir, const char *variant,
                         struct ckpt_hf_weights *ret, struct ckpt_err *err);

/* Are there any by their usual names, or (a listing tells) by those of shards and variants? Also
 * incomplete ones. */
ckpt_reader_probe_fn ckpt_hf_weights_probe, ckpt_hf_weights_guess;

/* SPDX-License-Identifier: Apache-2.0 */
/* The list of readers, and which of them a directory belongs to. */
#include "ckpt/readers.h"

#include <stddef.h>

const struct ckpt_reader *const ckpt_readers[] = {
    &ckpt_reader_nanotron,   /* model/ and model_config.json */
    &ckpt_reader_megatron,   /* metadata.json, mp_rank_*; Megatron's names in .metadata */
    &ckpt_reader_dcp_hf,     /* shard-R-model-I-of-N.safetensors */
    &ckpt_reader_dcp,        /* .metadata */
    &ckpt_reader_deepspeed,  /* *_model_states.pt, zero/; a tag below that `latest` names */
    &ckpt_reader_rank_files, /* one torch.save file per rank, or one for all */
    &ckpt_reader_peft,       /* adapter_model.safetensors, or .bin */
    &ckpt_reader_hf,         /* model.safetensors, or its index */
    NULL,
};

const struct ckpt_reader *ckpt_reader_probe(struct ckpt_dir *dir, struct ckpt_err *err)
{
    const struct ckpt_reader *best = NULL, *tie = NULL;
    enum ckpt_evidence most = CKPT_NOT_MINE;

    for (const struct ckpt_reader *const *r = ckpt_readers; *r; r++) {
        enum ckpt_evidence e = (*r)->probe(dir);
        if (e == CKPT_NOT_MINE || e < most)
            continue;
        tie = e == most ? best : NULL;
        best = *r;
        most = e;
    }
    if (!best && ckpt_dir_trouble(dir, err) < 0)
        return NULL;
    if (!best)
        (void)ckpt_fail(err, CKPT_MISSING, "'%s': no checkpoint of a known format",
                        ckpt_dir_path(dir));
    else if (tie)
        (void)ckpt_fail(err, CKPT_CONFLICT, "'%s' looks like a checkpoint of %s and of %s",
                        ckpt_dir_path(dir), tie->name, best->name);
    return tie ? NULL : best;
}

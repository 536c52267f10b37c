/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of names. */
#include "format/foreign.h"

#include <string.h>

#include "base/str.h"

#define MAKERS_WAY                                                                                 \
    "take the files with transformers' names, if there are any, or convert these by "              \
    "transformers' script for the family (convert_*_weights_to_hf.py)"

/* An entry whose name has this beginning and this end. */
static const struct foreign {
    const char *begin, *end;
    const char *what, *way;
} foreigners[] = {
    {"", ".nemo", "an archive", "give the archive itself"},
    {"model_weights.ckpt", "", "a model that one rank of NeMo 1 saved",
     "convert it with NeMo's script (scripts/checkpoint_converters/convert_*_nemo_to_hf.py)"},
    {"", ".ckpt", "a model of Lightning in one file",
     "make a folder of nothing but this file, named model.pt (a hard link will do), and give that"},
    {"", ".gguf", "a model in GGUF",
     "it is one file already; transformers reads it by from_pretrained(DIR, gguf_file=NAME)"},
    {"_CHECKPOINT_METADATA", "", "an Orbax checkpoint (JAX)",
     "restore it with orbax.checkpoint, and save its arrays with safetensors.flax.save_file"},
    {"manifest.ocdbt", "", "an Orbax checkpoint (JAX)",
     "restore it with orbax.checkpoint, and save its arrays with safetensors.flax.save_file"},
    {"", ".msgpack", "a Flax model (JAX)",
     "load it with transformers 4 (from_flax=True) and save it with save_pretrained"},
    {"tf_model", ".h5", "a TensorFlow model",
     "load it with transformers 4 (from_tf=True) and save it with save_pretrained"},
    {"", ".data-00000-of-00001", "a TensorFlow checkpoint",
     "load it with transformers 4 (from_tf=True) and save it with save_pretrained"},
    {"consolidated", ".pth", "a model in its maker's own format", MAKERS_WAY},
    {"consolidated", ".safetensors", "a model in its maker's own format", MAKERS_WAY},
};

struct look {
    const struct ckpt_dir *dir;
    bool found;
};

static int see(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct look *l = ctx;

    for (size_t i = 0; i < sizeof foreigners / sizeof *foreigners; i++) {
        const struct foreign *f = &foreigners[i];
        if (e->kind != CKPT_ENTRY_FILE || !ckpt_has_prefix(e->name, f->begin) ||
            !ckpt_has_suffix(e->name, f->end))
            continue;
        l->found = true;
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' holds %s ('%s'), and no checkpoint of a known format: %s",
                         ckpt_dir_path(l->dir), f->what, e->name, f->way);
    }
    return 0;
}

int ckpt_foreign_check(const struct ckpt_dir *dir, struct ckpt_err *err)
{
    struct look l = {.dir = dir};
    struct ckpt_err own = {0};

    (void)ckpt_dir_list(dir, see, &l, &own);
    return l.found ? ckpt_err_move(err, &own) : 0;
}

int ckpt_foreign_tensor(const char *name, struct ckpt_err *err)
{
    const char *dot = strrchr(name, '.');

    if (strcmp(dot ? dot + 1 : name, "_flat_param") != 0)
        return 0;
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s' is a flat parameter of FSDP1 (LOCAL_STATE_DICT), and the checkpoint does "
        "not say how to split it: save with SHARDED_STATE_DICT or FULL_STATE_DICT",
        name);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Facts about a model_type besides its tensors, from files types/NAME.json, which say how a
 * checkpoint of that type is recognised, completed and divided. contrib/RECIPES.md describes them.
 *
 * A type that no file lists has the facts of types/common.json, except that names by which a model
 * is recognised (embeddings, ties, widths) are those of all files. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/regex.h"
#include "recipe/language/field.h"

struct ckpt_files;

/* A tie: the tensor `from` is a copy of `to` (NULL: of the input embedding). A renaming: the
 * pattern `from`, in Python's syntax, becomes `to`. */
struct ckpt_text_pair {
    const char *from, *to;
};

struct ckpt_text_pairs {
    const struct ckpt_text_pair *pair;
    size_t n;
};

/* The hub's tensors of a parameter that has all experts in memory. The module's name ends with
 * `module`, which each of `part` replaces in the tensors' names. "{e}" is an expert's number;
 * without it the tensor has all experts. */
struct ckpt_expert_layout {
    const char *module, *parameter, *part[2];
    size_t npart;
};

struct ckpt_expert_layouts {
    const struct ckpt_expert_layout *layout;
    size_t n;
};

enum { CKPT_LEAST_DIMS = 4 };

/* Tensors whose dimensions are at least the product of these numbers of the config (no key: any
 * size). */
struct ckpt_least {
    const struct ckpt_regex *names;
    struct ckpt_texts dim[CKPT_LEAST_DIMS];
    uint32_t rank;
};

struct ckpt_leasts {
    const struct ckpt_least *least;
    size_t n;
};

/* Parts of a model, by texts that a tensor's name contains. */
struct ckpt_stages {
    struct ckpt_texts embedding; /* the token embedding, on the first stage */
    struct ckpt_texts first;     /* other parts of the first stage */
    struct ckpt_texts
        beside; /* encoders of other modalities: on the first stage, and not counted as layers */
    struct ckpt_texts last;   /* the output matrix */
    struct ckpt_texts layers; /* the text before a layer's number */
};

enum ckpt_experts_turned {
    CKPT_EXPERTS_STRAIGHT,      /* [experts, out, in] in memory and on the hub */
    CKPT_EXPERTS_TURNED_MEMORY, /* [experts, in, out] in both */
    CKPT_EXPERTS_TURNED_HUB,    /* [experts, in, out] on the hub only */
};

struct ckpt_type {
    const char *name; /* "types/llava" */
    struct ckpt_texts model_types;
    struct ckpt_texts embedding; /* the input embedding's tensor, by its possible names */
    struct ckpt_texts output;    /* the output matrix's */
    const char *last_norm; /* a tensor that is stored even if a tied embedding is not; or NULL */
    struct ckpt_text_pairs ties; /* ties that hold if config.json says tie_word_embeddings */
    struct ckpt_texts
        widths; /* config keys of the width of an embedding that is narrower than the model */
    struct ckpt_texts order; /* parts of names, in the order in which modules register them */
    struct ckpt_text_pairs renames; /* the hub's names to those in memory */
    struct ckpt_expert_layouts experts;
    struct ckpt_texts parameters; /* parameters of fused experts, in the order of registration */
    enum ckpt_experts_turned experts_turned;
    struct ckpt_texts headed;    /* classes with a head whose names do not say so */
    struct ckpt_text_pairs bare; /* model types whose class without a head has these names, too, and
                                    a tensor that shows it */
    struct ckpt_texts added_heads; /* first words of names of heads that trainers put beside a model
                                      whose class has them not */
    struct ckpt_texts held_as; /* words before all names of a model that a trainer's class holds */
    bool tied; /* ties hold, too, if config.json does not say tie_word_embeddings and the values are
                  the same */
    bool more_rows;    /* the embedding may have more rows than config.json's vocab_size */
    bool fused_on_hub; /* experts are one tensor on the hub too */
    bool converted;    /* transformers >= 5 converts the weights while it loads them */
    struct ckpt_texts
        absent; /* suffixes of tensors that a checkpoint may lack although its base has them */
    struct ckpt_texts buffers;      /* suffixes of buffers, which are not parameters */
    struct ckpt_texts keeps_dtype;  /* suffixes of tensors that transformers loads as F32, whatever
                                       dtype a file has */
    struct ckpt_texts computed;     /* suffixes of tensors that are computed, not stored */
    struct ckpt_text_pairs unsaved; /* a class and a suffix of its tensors that it does not store */
    struct ckpt_leasts least;
    struct ckpt_texts
        generation; /* attributes of GenerationConfig that a model's config may have */
    struct ckpt_texts tokenizer_files, weight_files; /* patterns of file names (fnmatch) */
    const char *decoder_config; /* the decoder's key in config.json, if it is not a usual one */
    bool no_use_cache;          /* the config class has no attribute use_cache */
    const char *layers; /* the text before the layers' numbers, which are counted; or NULL */
    struct ckpt_stages stages;
};

struct ckpt_types;

/* Parse the files types/NAME.json of a set; nothing of the set is referenced afterwards. FORMAT:
 * the text names the file and the key. The result is immutable. */
int ckpt_types_load(const struct ckpt_files *files, struct ckpt_types **ret, struct ckpt_err *err);
void ckpt_types_free(struct ckpt_types *t);
CKPT_CLEANUP_BY(ckpt_types_free, struct ckpt_types)

/* The facts about a model_type, which may be NULL or unknown; never NULL. */
const struct ckpt_type *ckpt_types_find(const struct ckpt_types *t, const char *model_type);

/* The facts about a type that no file lists. */
const struct ckpt_type *ckpt_types_any(const struct ckpt_types *t);

/* Return the first class that a config.json names in "architectures"; NULL: it names none. Borrowed
 * from the config. */
const char *ckpt_config_class(const json_t *config);

/* Does the config, or that of its text model, say that the weights are quantised? */
bool ckpt_config_is_quantized(const json_t *config);

/* How weights that the option dequantize does not know are dequantised, by the quantization_config:
 * what to do, a static text. NULL: nothing is known. */
const char *ckpt_config_dequantized_by(const json_t *config);

/* Is it a config of transformers, which says of which type, or of which class, the model is? */
bool ckpt_config_is_model(const json_t *config);

/* Is the class one of transformers', as far as names tell: none is named, or it begins with the
 * model type ("LlamaForCausalLM" of 'llama'), and there is no code of its own? */
bool ckpt_config_is_usual(const json_t *config);

/* Return the length of the beginning of a class's name that is text[0..len), but for upper case and
 * "_"; 0: it does not begin so. */
size_t ckpt_class_begins_as(const char *class, const char *text, size_t len);

/* Does the name contain, or end with, one of them? */
bool ckpt_texts_in(const struct ckpt_texts *w, const char *name);
bool ckpt_texts_end(const struct ckpt_texts *w, const char *name);

/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint: what is known and made on the way from a directory to a view, and lives no
 * longer. The way is a straight line:
 *
 *     read        the reader's catalogue and facts     opening.c
 *                 the model's config and tokenizer     base.c
 *     identify    whose names, which adapter           identify.c
 *     decide      every choice, as a pure function     decide.c
 *     make        names, values, config                model.c
 *     average     the mean of several such models      mean.c
 *     add         what the optimizer has of it         optimizer.c
 *     cast        dtypes                               model.c
 *     lay out     the files                            files.c
 *
 * run/checkpoint.c walks it, and gives what was made to the view. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "format/reader.h"
#include "model/base.h"
#include "model/decide.h"
#include "model/state.h"
#include "model/view.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

struct ckpt_opening {
    /* what is opened: borrowed, and given by the caller */
    struct ckpt_shared *shared;
    struct ckpt_dir *dir;
    struct ckpt_dir *above;  /* the folder of its run; or NULL */
    struct ckpt_dir *around; /* the step's folder, if dir is one inside; or NULL */
    const char *step;        /* its name in the run; "" for a single checkpoint */
    bool lists_states;       /* all states are read, and none is chosen */
    const char *state;       /* what is shown of each parameter (model/state.h); NULL: what the
                                options say, as ckpt_opening_begin sets it */
    /* what is found out */
    const struct ckpt_reader *reader;
    struct ckpt_facts facts; /* the reader's; then also what the names say */
    struct ckpt_home home;   /* of the model; none if a base or the reader has its config */
    struct ckpt_decision decision;
    struct ckpt_catalog *cat;     /* the reader's; then the model's */
    struct ckpt_catalog *read;    /* with an optimizer: the reader's, of all states; else NULL */
    struct ckpt_facts read_facts; /* and the reader's facts as they were */
    uint64_t taken;               /* and the most steps that it took of a parameter */
    json_t *groups; /* with an optimizer: its groups of parameters (format/writer.h); or NULL */
    struct ckpt_catalog *adapter; /* the adapter that is merged into cat; or NULL */
    json_t *base_names;           /* {tensor: its name in the base} where they differ; or NULL */
    json_t *corrected; /* the model's config with the options' corrections; NULL: there are none */
    json_t *framework; /* for a writer: the config of the checkpoint's framework, until a recipe
                          makes the one of the format that is written; or NULL */
    bool
        other_form; /* a state is shown, whose parameters are stored in another form than weights */
    bool fuses;     /* the states are those of parameters that have q, k and v */
    bool config_changed; /* config differs from the file that was read (quantisation removed,
                            another vocabulary) */
    bool renamed;        /* at least one tensor has another name than it is stored under */
    bool cast;           /* at least one tensor has another dtype than it is stored in */
    bool as_base;        /* the tensors have the names that the base's files have */
    bool ordered;        /* cat is in the order of the model's state dict */
    /* what the view takes over; its members of these names say more */
    struct ckpt_vtree *tree;
    json_t *config;
    char *recipe, *name;
};

/* Find the reader of the checkpoint. All but the members that the caller gives is zero before. The
 * caller releases the opening, after a failure too. */
int ckpt_opening_begin(struct ckpt_opening *o, struct ckpt_err *err);

/* Read the catalogue and the facts, and find the model's home; to list states, only the former. */
int ckpt_opening_read(struct ckpt_opening *o, struct ckpt_err *err);

/* Begin another opening of what `of` has read, of another state of each parameter; *ret is all zero
 * before, and released by the caller, after a failure too. It is to be identified next. */
int ckpt_opening_begin_state(const struct ckpt_opening *of, const char *state,
                             struct ckpt_opening *ret, struct ckpt_err *err);

/* Add what the optimizer has of each parameter to o->cat, the model, under the names of the format
 * that is written; set o->groups. Nothing to do without the option optimizer. MISSING: the run has
 * no such states, or does not say a number that no option gives. */
int ckpt_optimizer_add(struct ckpt_opening *o, struct ckpt_err *err);

/* Warn, or note, how often the compressed parts of o->cat are decompressed, and tell the temporary
 * file, if there is one, how much room the view's files need. */
int ckpt_opening_tell_decoding(struct ckpt_opening *o, struct ckpt_err *err);

/* The request for ckpt_state_choose and others. */
struct ckpt_state_asked ckpt_opening_asked(const struct ckpt_opening *o);
void ckpt_opening_release(struct ckpt_opening *o);

/* The facts about the model type that o->config names. */
const struct ckpt_type *ckpt_opening_type(const struct ckpt_opening *o);

/* Get the config of a model under transformers' names: the base's, or else one that was found
 * beside the checkpoint, or else the checkpoint's own; with the options' corrections; or NULL. */
const json_t *ckpt_opening_model_config(const struct ckpt_opening *o);

/* Get the facts about the type of a model under the hub's names, and its config: its own, else the
 * base's, or NULL. */
const struct ckpt_type *ckpt_opening_hub_type(const struct ckpt_opening *o,
                                              const json_t **ret_config);

/* Make a copy of a config with what the options correct in it ("vocab_size"). *ret is new. */
int ckpt_opening_correct(const struct ckpt_opening *o, const json_t *config, json_t **ret,
                         struct ckpt_err *err);

/* Get the config of a model under a framework's names, whose own config is the framework's: the
 * base's, or else one that was found beside it; or NULL. */
const json_t *ckpt_opening_base_config(const struct ckpt_opening *o);

/* The options for recipes that rename the tensors: transformers' conversions for a model with the
 * names in memory, else the rules for the framework's names. */
struct ckpt_recipe_options ckpt_opening_recipe_options(const struct ckpt_opening *o);

/* Give the tensors of o->cat these names (as many as there are tensors; NULL: it is left out), also
 * in o->facts. The names lie in the catalogue's arena. */
int ckpt_opening_rename(struct ckpt_opening *o, const char *const *name, struct ckpt_err *err);

/* Find out what the checkpoint is, as far as its reader could not say it: LoRA tensors, and a
 * transformers model below a prefix, occur in checkpoints of any format. Set o->facts.names and,
 * with lora=merge, o->adapter; leave in o->cat the tensors of the model (or of the adapter) without
 * the prefix of a trainer; then make o->decision. */
int ckpt_opening_identify(struct ckpt_opening *o, struct ckpt_err *err);

/* Make the model of what was identified, as o->decision says: o->cat, whose tensors have the view's
 * names and values, and o->config. Building the files needs only these two. */
int ckpt_opening_make_model(struct ckpt_opening *o, struct ckpt_err *err);

/* Give its tensors the view's dtypes, which the config then states. */
int ckpt_opening_cast_model(struct ckpt_opening *o, struct ckpt_err *err);

/* Build o->tree from o->cat, o->config and the files that are shown unchanged, as o->decision says:
 * a Hugging Face model directory (view/vtree.c), or a training framework's files, which a writer
 * (format/writer.h) makes of the same tensors. */
int ckpt_opening_lay_out(struct ckpt_opening *o, struct ckpt_err *err);

/* generation_config.json as transformers derives it from a model's config; a new object. Its
 * transformers_version is the config's, if that has one: what we say about ourselves must not
 * change from one of our versions to the next. */
int ckpt_generation_config(const json_t *config, const struct ckpt_type *type, json_t **ret,
                           struct ckpt_err *err);

/* ---- parts of making a model ---- */

/* Check that the tensors, under Hugging Face's names, fit the base and config.json. Formats that do
 * not record the shapes of whole tensors (HF-sharded DCP) give no sign if shards are missing; a
 * comparison does. CONFLICT: shapes differ. MISSING: o->cat lacks a tensor that the base has,
 * although it has the same tensor of other layers or experts (if the format lists all tensors: any
 * tensor that the base has). The text lists all differences; one that may be intended is a warning.
 */
int ckpt_opening_check(struct ckpt_opening *o, struct ckpt_err *err);

/* Check, before tensors are taken from the base, that those of o->cat fit it. CONFLICT: one has
 * another shape there, or the base has no tensor of its name; with allow_leftover it is left out,
 * with a warning, and listed in the facts under "left_over". */
int ckpt_opening_check_taking(struct ckpt_opening *o, struct ckpt_err *err);

/* Check that the tensors, under Hugging Face's names, are those that config.json describes.
 * CONFLICT: tensors of another shape, or without elements. MISSING: tensors that the model file of
 * its type lists, or all of them. Nothing is checked of an adapter. What cannot be told is in the
 * facts. */
int ckpt_opening_check_config(struct ckpt_opening *o, struct ckpt_err *err);

/* Merge o->adapter, if there is one, into o->cat and o->config. */
int ckpt_merge_finish(struct ckpt_opening *o, struct ckpt_err *err);

/* The folder with the adapter's own files, below o->dir. */
const char *ckpt_merge_folder(const struct ckpt_opening *o);

/* The dtype of a tensor that is stored as `stored` and has the dtype `mapped` in the model from
 * which training started (NULL: not known), where the user asked for `cast` (NULL: for none). This
 * is the rule of NeMo Automodel's export (its `_output_dtype`), which holds for all formats here.
 */
enum ckpt_dtype ckpt_dtype_as_base(enum ckpt_dtype stored, const enum ckpt_dtype *mapped,
                                   const enum ckpt_dtype *cast);

/* The dtype that a config.json states, under its new key or its old one; or NULL. */
const char *ckpt_config_dtype(const json_t *config);

/* The dtype of most floating-point elements, by its name in torch, which transformers would call
 * the model's dtype; NULL: there are none. stored: the dtype from which those are cast. */
const char *ckpt_main_dtype(const struct ckpt_catalog *cat, bool stored);

/* The answers to the readers' questions about names that follow from the facts about model types,
 * which are borrowed. */
struct ckpt_naming ckpt_naming_of(const struct ckpt_types *types);

/* Length of the part before `tail`, if the name ends with `tail` after a dot; else SIZE_MAX. */
size_t ckpt_name_before(const char *name, const char *tail);

/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing names, and choosing among them. */
#include "format/huggingface/weights.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"

#define SUFFIX ".safetensors"

#define EPOCHS "hf_model" /* of torchtune: hf_model_0001_0 is the first file of epoch 0 */

/* The last two are torchtune's, in versions of which the names differ: only a listing finds them.
 */
static const char *const stems[] = {"model", "diffusion_pytorch_model", "ft-model", EPOCHS};
enum { NSTEM = sizeof stems / sizeof stems[0], NUSUAL = 2 };

void ckpt_hf_weights_release(struct ckpt_hf_weights *w)
{
    free(w->single);
    free(w->index);
    free(w->variant);
    for (size_t i = 0; i < w->shard.len; i++)
        free(w->shard.ptr[i]);
    ckpt_vec_release(&w->shard);
}

/* ---- one name ---- */

enum kind { SINGLE, INDEX, SHARD };

struct parsed {
    enum kind kind;
    const char *variant; /* in the name; its length is 0 if there is none */
    size_t variant_len;
    uint64_t number, of; /* of a shard */
};

static bool take_numbers(const char **s, struct parsed *ret)
{
    return ckpt_take_text(s, "-") && ckpt_take_u64(s, &ret->number) && ckpt_take_text(s, "-of-") &&
           ckpt_take_u64(s, &ret->of) && ret->number > 0 && ret->number <= ret->of;
}

/* ".fp16" as the variant "fp16", and "" as none. */
static bool parse_variant(const char *from, const char *to, struct parsed *ret)
{
    if (from < to &&
        (*from != '.' || from + 1 == to || memchr(from + 1, '.', (size_t)(to - from - 1))))
        return false;
    ret->variant = from + (from < to);
    ret->variant_len = (size_t)(to - ret->variant);
    return true;
}

/* "_0001_0" as file 1, which does not say how many there are, of the variant "0". */
static bool parse_epoch(const char *s, struct parsed *ret)
{
    uint64_t epoch;

    if (!ckpt_take_text(&s, "_") || !ckpt_take_u64(&s, &ret->number) || ret->number == 0 ||
        !ckpt_take_text(&s, "_"))
        return false;
    ret->kind = SHARD;
    ret->variant = s;
    if (!ckpt_take_u64(&s, &epoch))
        return false;
    ret->variant_len = (size_t)(s - ret->variant);
    return strcmp(s, SUFFIX) == 0;
}

static bool parse(const char *stem, const char *s, struct parsed *ret)
{
    static const char index[] = SUFFIX ".index";
    const char *end, *after;

    *ret = (struct parsed){0};
    if (!ckpt_take_text(&s, stem))
        return false;
    if (strcmp(stem, EPOCHS) == 0)
        return parse_epoch(s, ret);
    if (ckpt_take_text(&s, index)) {
        ret->kind = INDEX;
        return ckpt_has_suffix(s, ".json") && parse_variant(s, s + strlen(s) - 5, ret);
    }
    if (!ckpt_has_suffix(s, SUFFIX))
        return false;
    end = s + strlen(s) - strlen(SUFFIX);
    for (const char *dash = s; dash < end; dash++) { /* a variant may have dashes, too */
        after = dash;
        if (*dash != '-' || !take_numbers(&after, ret))
            continue;
        ret->kind = SHARD;
        return after == end ? parse_variant(s, dash, ret)
                            : dash == s && parse_variant(after, end, ret);
    }
    ret->kind = SINGLE;
    return parse_variant(s, end, ret);
}

/* ---- which of them ---- */

static bool is_of(const struct parsed *p, const char *variant)
{
    return strlen(variant) == p->variant_len && strncmp(variant, p->variant, p->variant_len) == 0;
}

/* The variants of all names, one after the other, each once and with a comma before it. */
static void list_variants(struct ckpt_entries *entries, struct ckpt_str *out)
{
    struct ckpt_entry e;
    struct parsed p;

    for (entries->at = 0; ckpt_entries_next(entries, &e);)
        for (size_t i = 0; i < NSTEM; i++) {
            if (e.kind != CKPT_ENTRY_FILE || !parse(stems[i], e.name, &p) || !p.variant_len)
                continue;
            ckpt_cleanup(ckpt_freep) char *one =
                ckpt_asprintf(", %.*s,", (int)p.variant_len, p.variant);
            ckpt_cleanup(ckpt_freep) char *all = ckpt_asprintf("%s,", out->len ? out->ptr : "");
            out->failed |= !one || !all;
            if (one && all && !strstr(all, one))
                ckpt_str_printf(out, ", %.*s", (int)p.variant_len, p.variant);
        }
}

/* Has the directory names of this variant, and of which model? */
static const char *stem_of(struct ckpt_entries *entries, const char *variant)
{
    struct ckpt_entry e;
    struct parsed p;

    for (size_t i = 0; i < NSTEM; i++)
        for (entries->at = 0; ckpt_entries_next(entries, &e);)
            if (e.kind == CKPT_ENTRY_FILE && parse(stems[i], e.name, &p) && is_of(&p, variant))
                return stems[i];
    return NULL;
}

static int keep(char **ret, const char *name, struct ckpt_err *err)
{
    return *ret || (*ret = strdup(name)) ? 0 : ckpt_nomem(err);
}

static int take_shard(struct ckpt_hf_weights *w, const struct parsed *p, const char *name,
                      uint64_t *of, const struct ckpt_dir *dir, struct ckpt_err *err)
{
    char *copy = NULL;

    if (*of && *of != p->of)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' has no index, and shards of two models, one of %" PRIu64
                         " and one of %" PRIu64 " files",
                         ckpt_dir_path(dir), *of, p->of);
    *of = p->of;
    if (p->number != w->shard.len + 1) /* names come in natural order */
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has no index, and of %" PRIu64 " shards number %zu is missing: '%s' "
                         "comes instead",
                         ckpt_dir_path(dir), p->of, w->shard.len + 1, name);
    if (keep(&copy, name, err) < 0)
        return -1;
    if (ckpt_vec_push(&w->shard, copy) < 0) {
        free(copy);
        return ckpt_nomem(err);
    }
    return 0;
}

/* Is there no index at all? UNSUPPORTED: it is a link that may not be followed. */
static int check_no_index(const struct ckpt_dir *dir, const char *stem, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *index = ckpt_asprintf("%s" SUFFIX ".index.json", stem);
    struct ckpt_dir_found found;
    struct ckpt_err why = {0};

    if (!index)
        return ckpt_nomem(err);
    return ckpt_dir_look(dir, index, &found, &why) < 0 && why.code == CKPT_UNSUPPORTED
               ? ckpt_err_move(err, &why)
               : 0;
}

/* Note all names of w->stem and the variant. */
static int collect(struct ckpt_entries *entries, const char *variant, struct ckpt_hf_weights *w,
                   const struct ckpt_dir *dir, struct ckpt_err *err)
{
    struct ckpt_entry e;
    struct parsed p;
    uint64_t of = 0;

    for (entries->at = 0; ckpt_entries_next(entries, &e);)
        if (e.kind == CKPT_ENTRY_FILE && parse(w->stem, e.name, &p) && is_of(&p, variant) &&
            p.kind != SHARD && keep(p.kind == SINGLE ? &w->single : &w->index, e.name, err) < 0)
            return -1;
    if (w->single || w->index)
        return 0;
    if (check_no_index(dir, w->stem, err) < 0)
        return -1;
    for (entries->at = 0; ckpt_entries_next(entries, &e);)
        if (e.kind == CKPT_ENTRY_FILE && parse(w->stem, e.name, &p) && is_of(&p, variant) &&
            take_shard(w, &p, e.name, &of, dir, err) < 0)
            return -1;
    w->nshard = of;
    if (w->shard.len < of)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has no index, and of %" PRIu64 " shards number %zu is missing",
                         ckpt_dir_path(dir), of, w->shard.len + 1);
    return 0;
}

static int choose(struct ckpt_entries *entries, const char *variant, struct ckpt_hf_weights *w,
                  const struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str all = {0};

    if ((w->stem = stem_of(entries, variant ? variant : "")))
        return (variant && keep(&w->variant, variant, err) < 0) ||
                       collect(entries, variant ? variant : "", w, dir, err) < 0
                   ? -1
                   : 0;
    list_variants(entries, &all);
    if (all.failed)
        return ckpt_nomem(err);
    if (variant)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no weights of variant '%s'%s%s",
                         ckpt_dir_path(dir), variant, all.len ? "; it has those of " : "",
                         all.len ? all.ptr + 2 : "");
    if (!all.len)
        return 0;
    if (strchr(all.ptr + 2, ','))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' has weights of several variants (%s): choose one with -o variant=",
                         ckpt_dir_path(dir), all.ptr + 2);
    if (keep(&w->variant, all.ptr + 2, err) < 0)
        return -1;
    w->stem = stem_of(entries, w->variant);
    return collect(entries, w->variant, w, dir, err);
}

/* Look for the usual names, without a listing. */
static int look(const struct ckpt_dir *dir, struct ckpt_hf_weights *w, struct ckpt_err *err)
{
    for (size_t i = 0; i < NUSUAL && !w->stem; i++) {
        ckpt_cleanup(ckpt_freep) char *single = ckpt_asprintf("%s" SUFFIX, stems[i]);
        ckpt_cleanup(ckpt_freep) char *index = ckpt_asprintf("%s" SUFFIX ".index.json", stems[i]);
        if (!single || !index)
            return ckpt_nomem(err);
        const bool has_single = ckpt_dir_has_file(dir, single);
        if (!has_single && !ckpt_dir_has_file(dir, index))
            continue;
        w->stem = stems[i];
        *(has_single ? &w->single : &w->index) = ckpt_steal(has_single ? &single : &index);
    }
    return 0;
}

int ckpt_hf_weights_find(const struct ckpt_dir *dir, const char *variant,
                         struct ckpt_hf_weights *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};

    if (!variant && (look(dir, ret, err) < 0 || ret->stem))
        return ret->stem ? 0 : -1;
    return ckpt_entries_read(dir, &entries, err) < 0 ? -1
                                                     : choose(&entries, variant, ret, dir, err);
}

enum ckpt_evidence ckpt_hf_weights_probe(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_hf_weights_release) struct ckpt_hf_weights w = {0};

    return look(dir, &w, NULL) == 0 && w.stem ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

enum ckpt_evidence ckpt_hf_weights_guess(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    struct parsed p;

    if (ckpt_entries_read(dir, &entries, NULL) < 0)
        return CKPT_NOT_MINE;
    while (ckpt_entries_next(&entries, &e))
        for (size_t i = 0; i < NSTEM; i++)
            if (e.kind == CKPT_ENTRY_FILE && parse(stems[i], e.name, &p))
                return CKPT_BY_COMMON_NAMES;
    return CKPT_NOT_MINE;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Walking through the list of a model file: loops, alternatives, conditions. */
#include "recipe/apply/apply.h"

#include <inttypes.h>
#include <string.h>

#include "tensor/read.h"

/* How many tensors of a list the checkpoint can provide. A cheap check, without sizes. */
struct tally {
    size_t need, have;
};

/* A walk does one of these: count what the checkpoint has; add the model's tensors; compare those
 * that are left out; or, for a recipe that is read backwards, see whether the checkpoint has all of
 * the model's tensors, and compare its copies. */
enum pass { PASS_PROBE, PASS_EMIT, PASS_LEAVE_OUT, PASS_CHECK, PASS_CHECK_COPIES };

struct walk {
    struct ckpt_apply *ap;
    enum pass pass;
    struct tally *tally; /* PASS_PROBE */
};

static int walk(const struct walk *w, const struct ckpt_model_items *list);

/* Looks up a key of the model file's conditions, which can also use the numbers of the loops. */
static json_t *item_key(void *ctx, const char *key)
{
    struct ckpt_apply *ap = ctx;

    for (size_t l = ap->nloop; l-- > 0;)
        if (strcmp(ap->loop[l].name, key) == 0)
            return json_integer((json_int_t)ap->loop[l].at);
    return ckpt_settings_after(&ap->set, key);
}

/* The tensor with the model's name, where a recipe is read backwards: the checkpoint has it. */
static const struct ckpt_tensor *stored(const struct ckpt_apply *ap)
{
    return ckpt_catalog_find(ap->src, ckpt_str_get(&ap->name));
}

static int probe_tensor(struct ckpt_apply *ap, const struct ckpt_model_item *it, struct tally *t)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};

    t->need += !it->optional;
    if (ap->recipe->backwards) {
        t->have += !it->optional && stored(ap);
        return 0;
    }
    if (ckpt_apply_resolve(ap, false, &r) < 0)
        return -1;
    t->have += !it->optional && r.presence == CKPT_PRESENT;
    return 0;
}

static int leave_out_missing(struct ckpt_apply *ap, const char *missing)
{
    if (ap->nleft == CKPT_APPLY_LEFT)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors are missing", CKPT_APPLY_LEFT);
    if (ap->lacks) {
        if (ap->nleft++ < CKPT_APPLY_LACKS)
            ckpt_str_printf(&ap->lacks->names, "%s'%s'", ap->nleft > 1 ? ", " : "", missing);
    } else if (ap->nleft++ < CKPT_APPLY_SHOWN) /* further ones are only counted */
        ckpt_catalog_warn(ap->cat, "'%s' is left out: the checkpoint has no tensor '%s'",
                          ckpt_str_get(&ap->name), missing);
    return 0;
}

/* The shape that the list gives a tensor, in want[0..rank). A size that is not known is the
 * tensor's own. False: the list says nothing about tensors of this form. */
static bool listed_shape(const struct ckpt_model_item *it, const struct ckpt_sizes *sizes,
                         const struct ckpt_tensor *t, uint64_t *want)
{
    uint32_t var;

    if (it->shape.rest_at >= 0 || it->shape.ndim > CKPT_MAX_RANK)
        return false;
    for (uint32_t d = 0; d < it->shape.ndim; d++)
        switch (ckpt_factor_size(&it->shape.dim[d], sizes, &want[d], &var)) {
        case CKPT_SIZE_KNOWN:
            break;
        case CKPT_SIZE_OVERFLOW:
            return false;
        case CKPT_SIZE_UNKNOWN:
            if (d >= t->rank)
                return false;
            want[d] = t->dim[d];
        }
    return true;
}

/* Compare the shape of a tensor that is there with the list's. */
static int compare_shape(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                         const struct ckpt_sizes *sizes, const struct ckpt_tensor *t)
{
    uint64_t want[CKPT_MAX_RANK];

    if (!listed_shape(it, sizes, t, want) ||
        (t->rank == it->shape.ndim && memcmp(want, t->dim, t->rank * sizeof *want) == 0))
        return 0;
    return ckpt_lacks_add_shape(ap->lacks, t, want, it->shape.ndim, ap->err);
}

/* Is the model's tensor there? */
static int check_tensor(struct ckpt_apply *ap, const struct ckpt_model_item *it,
                        const struct ckpt_sizes *sizes)
{
    const struct ckpt_tensor *t = stored(ap);

    if (ap->lacks && ap->lacks->tails) {
        ckpt_lacks_relate(ap->lacks, ap->src, ckpt_str_get(&ap->name));
        return 0;
    }
    if (t && ap->lacks) {
        ap->used[t - ap->src->tensors.ptr] = true;
        return compare_shape(ap, it, sizes, t);
    }
    if (it->optional || t || ap->opt->allow_missing)
        return 0;
    if (ap->opt->allow_partial)
        return leave_out_missing(ap, ckpt_str_get(&ap->name));
    return ckpt_fail(ap->err, CKPT_MISSING,
                     "the model needs '%s', which the checkpoint does not have",
                     ckpt_str_get(&ap->name));
}

/* A tensor that the config ties to another, but that is stored too: are they equal? The framework
 * stores ties in its own way: the copy counts as used. */
static int check_copy(struct ckpt_apply *ap)
{
    const struct ckpt_tensor *of = ckpt_catalog_find(ap->src, ap->tied), *copy;
    bool same;

    if (!of || ap->lacks || !(copy = stored(ap)))
        return 0;
    ap->used[copy - ap->src->tensors.ptr] = true;
    if (ckpt_tensor_same(copy, of, &same, ap->err) < 0)
        return -1;
    return same ? 0
                : ckpt_copy_differs(ap->cat, ckpt_str_get(&ap->name), ap->tied,
                                    ap->opt->allow_leftover, ap->err);
}

static int walk_tensor(const struct walk *w, const struct ckpt_model_item *it)
{
    ckpt_cleanup(ckpt_resolution_release) struct ckpt_resolution r = {0};
    struct ckpt_apply *ap = w->ap;
    struct ckpt_sizes sizes;

    if (ckpt_apply_name(ap, it, &sizes) < 0)
        return -1;
    if (w->pass == PASS_PROBE)
        return probe_tensor(ap, it, w->tally);
    if (w->pass == PASS_CHECK)
        return check_tensor(ap, it, &sizes);
    if (w->pass == PASS_CHECK_COPIES)
        return check_copy(ap);
    if (ckpt_apply_resolve(ap, w->pass == PASS_LEAVE_OUT, &r) < 0)
        return -1;
    if (w->pass == PASS_LEAVE_OUT)
        return r.presence == CKPT_PRESENT ? ckpt_apply_add_copy(ap, it, &sizes) : 0;
    if (r.presence == CKPT_PRESENT)
        return ckpt_apply_add(ap, it, &sizes);
    if ((it->optional && r.presence == CKPT_ABSENT) || ap->opt->allow_missing)
        return 0;
    if (!ap->opt->allow_partial || !r.missing)
        return ckpt_apply_missing(ap, &r);
    return leave_out_missing(ap, r.missing);
}

/* Choose the list that the checkpoint fits; if it fits none, the closest one. */
static int choose_list(struct ckpt_apply *ap, const struct ckpt_model_item *it, size_t *ret)
{
    size_t most = 0;
    bool fits = false;

    *ret = 0;
    for (size_t i = 0; i < it->nlist; i++) {
        struct tally t = {0};
        if (walk(&(struct walk){ap, PASS_PROBE, &t}, &it->list[i]) < 0)
            return -1;
        const bool all = t.have == t.need;
        if (all && fits)
            return ckpt_fail(ap->err, CKPT_CONFLICT,
                             "%s: the checkpoint fits several choices of the model file",
                             ap->recipe->name);
        if (all || (!fits && t.have > most)) {
            *ret = i;
            most = t.have;
        }
        fits |= all;
    }
    return 0;
}

static int walk_lists(const struct walk *w, const struct ckpt_model_item *it)
{
    size_t first = 0, end = it->nlist;

    if (it->nlist > 1 && w->pass != PASS_LEAVE_OUT && w->pass != PASS_CHECK_COPIES) {
        if (choose_list(w->ap, it, &first) < 0)
            return -1;
        end = first + 1;
    }
    for (size_t i = first; i < end; i++)
        if (walk(w, &it->list[i]) < 0)
            return -1;
    return 0;
}

/* Leave out a group that the model does not have, unless it is tied to a tensor that the model has.
 */
static int leave_out(const struct walk *w, const struct ckpt_model_item *it)
{
    const bool emits = w->pass == PASS_EMIT || w->pass == PASS_LEAVE_OUT;

    if (!it->tied || w->pass == PASS_PROBE)
        return 0;
    w->ap->tied = it->tied;
    int rc =
        walk_lists(&(struct walk){w->ap, emits ? PASS_LEAVE_OUT : PASS_CHECK_COPIES, NULL}, it);
    w->ap->tied = NULL;
    return rc;
}

/* Walk through a group for one value of its loop. */
static int walk_once(const struct walk *w, const struct ckpt_model_item *it)
{
    const struct ckpt_expr_env env = {item_key, w->ap, w->ap->src};
    struct tally inner = {0};

    switch (it->when ? ckpt_expr_truth(it->when, &env) : CKPT_TRUE) {
    case CKPT_TRUE:
        return walk_lists(w, it);
    case CKPT_FALSE:
        return leave_out(w, it);
    case CKPT_UNKNOWN: /* all or none */
        if (walk_lists(&(struct walk){w->ap, PASS_PROBE, &inner}, it) < 0)
            return -1;
        if (inner.have > 0 && w->pass != PASS_PROBE)
            return walk_lists(w, it);
        if (inner.have > 0) {
            w->tally->need += inner.need;
            w->tally->have += inner.have;
        }
        return 0;
    }
    return 0;
}

static int walk_group(const struct walk *w, const struct ckpt_model_item *it)
{
    struct ckpt_apply *ap = w->ap;
    const uint32_t outer = ap->block;
    uint64_t n;

    if (!it->loop)
        return walk_once(w, it);
    if (!ckpt_settings_dim(&ap->set, it->loop, &n)) {
        char hint[128];
        return ckpt_fail(ap->err, CKPT_MISSING, "the number of '%s' is not known%s", it->loop,
                         ckpt_settings_hint(&ap->set, it->loop, hint, sizeof hint));
    }
    if (n > CKPT_APPLY_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' is %" PRIu64, it->loop, n);
    if (it->block)
        ap->block = ++ap->blocks;
    ap->loop[ap->nloop].name = it->loop;
    ap->nloop++;
    int rc = 0;
    for (uint64_t i = 0; i < n && rc == 0; i++) {
        ap->loop[ap->nloop - 1].at = i;
        rc = walk_once(w, it);
    }
    ap->nloop--;
    ap->block = outer;
    return rc;
}

static int walk(const struct walk *w, const struct ckpt_model_items *list)
{
    for (size_t i = 0; i < list->n; i++) {
        const struct ckpt_model_item *it = &list->item[i];
        if ((it->scope ? walk_tensor(w, it) : walk_group(w, it)) < 0)
            return -1;
    }
    return 0;
}

int ckpt_apply_check(struct ckpt_apply *ap, const struct ckpt_model_items *list)
{
    return walk(&(struct walk){ap, PASS_CHECK, NULL}, list);
}

int ckpt_apply_items(struct ckpt_apply *ap, const struct ckpt_model_items *list)
{
    return walk(&(struct walk){ap, PASS_EMIT, NULL}, list);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Names, stages and ranks of Megatron. */
#include "format/megatron/writer_plan.h"

#include <inttypes.h>
#include <string.h>

#include "base/str.h"

static const char layers_at[] = "decoder.layers.", experts_at[] = "experts.experts.",
                  first_at[] = "embedding.", beside_at[] = "language_model.decoder.layers.",
                  inner_at[] = ".language_model.decoder.layers.";

/* ---- names ---- */

static const char *number(const char *s, uint64_t *ret)
{
    const size_t n = strspn(s, "0123456789");
    unsigned long long value;

    if (s[n] != '.' || !ckpt_parse_u64(s, n, &value))
        return NULL;
    *ret = value;
    return s + n + 1;
}

/* The end of a decoder's list of modules ("decoder.layers."), which a number follows, or NULL. */
static const char *list_end(const char *name)
{
    static const char decoder_at[] = "decoder.";
    const char *at = strstr(name, decoder_at);

    if (!at || (at > name && at[-1] != '.'))
        return NULL;
    at += sizeof decoder_at - 1;
    at += strcspn(at, ".");
    return *at ? at + 1 : NULL;
}

struct ckpt_mg_name ckpt_mg_name_parse(const char *name)
{
    struct ckpt_mg_name out = {.rest = name};
    const char *at = list_end(name), *end = at ? number(at, &out.layer) : NULL;

    if (end) {
        out.stem = (size_t)(at - name);
        out.in_layer = ckpt_has_prefix(name, layers_at) || ckpt_has_prefix(name, beside_at) ||
                       strstr(name, inner_at);
        out.rest = end;
    }
    at = strstr(out.rest, experts_at);
    if (at && (out.leaf = number(at + strlen(experts_at), &out.expert)))
        out.before = (size_t)(at - name) + strlen(experts_at);
    return out;
}

struct ckpt_mg_name ckpt_mg_name_of(const struct ckpt_tensor *t)
{
    return ckpt_mg_name_parse(t->state ? t->state->parameter : t->name);
}

bool ckpt_mg_is_projection(const struct ckpt_tensor *t, const char *name, size_t len)
{
    static const char begin[] = "linear_", end[] = "proj";
    const size_t n = sizeof end - 1;
    const char *dot = memrchr(name, '.', len);

    return dot && (ckpt_has_prefix(dot + 1, begin) || /* encoders of other libraries are whole */
                   (len > n && memcmp(name + len - n, end, n) == 0 &&
                    ckpt_cut_dim(t, CKPT_CUT_OVER_TP) != t->rank));
}

/* ---- the grid ---- */

static uint32_t lcm(uint32_t a, uint32_t b)
{
    uint32_t x = a, y = b;

    while (y) {
        const uint32_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

int ckpt_mg_grid_init(struct ckpt_mg_grid *g, const struct ckpt_writing *w, struct ckpt_err *err)
{
    const struct ckpt_output *o = w->output;

    *g = (struct ckpt_mg_grid){.tp = ckpt_output_parts(o, CKPT_CUT_TP),
                               .pp = ckpt_output_parts(o, CKPT_CUT_PP),
                               .vpp = ckpt_output_parts(o, CKPT_CUT_VPP),
                               .ep = ckpt_output_parts(o, CKPT_CUT_EP),
                               .etp = ckpt_output_parts(o, CKPT_CUT_ETP)};
    for (size_t i = 0; i < w->cat->tensors.len; i++) {
        const struct ckpt_mg_name n = ckpt_mg_name_of(&w->cat->tensors.ptr[i]);
        if (n.in_layer && n.layer >= g->layers)
            g->layers = n.layer + 1;
        if (n.leaf && n.expert >= g->experts)
            g->experts = n.expert + 1;
    }
    if ((uint64_t)g->etp * g->ep > CKPT_CUT_MOST ||
        (uint64_t)lcm(g->tp, g->etp * g->ep) * g->pp > CKPT_CUT_MOST)
        return ckpt_fail(err, CKPT_USAGE, "the layout has more than %d ranks", CKPT_CUT_MOST);
    g->size = lcm(g->tp, g->etp * g->ep);
    if (!g->experts && (g->ep > 1 || g->etp > 1))
        return ckpt_fail(err, CKPT_USAGE, "option %s: the model has no experts",
                         g->ep > 1 ? "ep" : "etp");
    if (g->experts && g->experts % g->ep)
        return ckpt_fail(err, CKPT_USAGE,
                         "option ep: the model has %" PRIu64
                         " experts, which cannot be divided among %" PRIu32 " ranks",
                         g->experts, g->ep);
    if (g->vpp > 1 && g->pp == 1)
        return ckpt_fail(err, CKPT_USAGE, "option vpp: there is only one stage: give pp, too");
    if (g->layers % ((uint64_t)g->pp * g->vpp) == 0)
        return 0;
    ckpt_cleanup(ckpt_freep) char *parts =
        g->vpp > 1 ? ckpt_asprintf(" of %" PRIu32 " parts each", g->vpp) : NULL;
    return ckpt_fail(err, CKPT_USAGE,
                     "option pp: the model has %" PRIu64
                     " layer%s, which cannot be divided among %" PRIu32 " stages%s",
                     g->layers, g->layers == 1 ? "" : "s", g->pp, parts ? parts : "");
}

uint32_t ckpt_mg_stage(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name,
                       uint32_t *ret_virtual)
{
    const uint32_t chunks = g->pp * g->vpp;
    uint32_t chunk = chunks - 1; /* the last norm, the output, layers that look further ahead */

    if (name->in_layer)
        chunk = (uint32_t)(name->layer / (g->layers / chunks));
    else if (ckpt_has_prefix(name->rest, first_at))
        chunk = 0;
    *ret_virtual = chunk / g->pp;
    return chunk % g->pp;
}

enum ckpt_cut_way ckpt_mg_way(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name,
                              uint32_t *ret_ranks)
{
    *ret_ranks = name->leaf ? g->etp : g->tp;
    return name->leaf ? CKPT_CUT_OVER_ETP : CKPT_CUT_OVER_TP;
}

int ckpt_mg_check(const struct ckpt_mg_grid *g, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const struct ckpt_mg_name name = ckpt_mg_name_of(t);
    uint32_t ranks;
    const enum ckpt_cut_way way = ckpt_mg_way(g, &name, &ranks);

    for (uint32_t i = 0; t->cuts && i < t->cuts->n; i++) {
        const struct ckpt_cut *c = &t->cuts->cut[i];
        const uint64_t groups = c->groups ? c->groups : c->n;
        if (c->way == way && (c->n % ranks || (groups % ranks && ranks % groups)))
            return ckpt_cut_fail(t, c, ranks, name.leaf ? "etp" : "tp", err);
    }
    return 0;
}

uint32_t ckpt_mg_expert_rank(const struct ckpt_mg_grid *g, uint64_t expert)
{
    return (uint32_t)(expert / (g->experts / g->ep));
}

uint32_t ckpt_mg_rank(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name, uint32_t index)
{
    uint32_t ignored;
    const uint32_t stage = ckpt_mg_stage(g, name, &ignored);
    const uint32_t in = name->leaf ? ckpt_mg_expert_rank(g, name->expert) * g->etp + index : index;

    return stage * g->size + in;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Telling the layers of a pipeline module apart. */
#include "format/deepspeed/stack.h"

#include <inttypes.h>
#include <string.h>

#include "base/take.h"

#define TIED "tied_modules.embed."

enum kind { OTHER, EMBEDDING, BLOCK, NORM, HEAD };

/* A name in one kind of layer that every such layer has, and no other layer. */
static const struct {
    const char *local;
    enum kind kind;
} marks[] = {
    {"word_embeddings.weight", EMBEDDING},
    {"input_layernorm.weight", BLOCK},
    {"weight", NORM},
    {"lm_head.weight", HEAD},
};

static enum kind kind_of(const char *local)
{
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (strcmp(local, marks[i].local) == 0)
            return marks[i].kind;
    return OTHER;
}

/* Split LL.NAME. A universal checkpoint does not say which layers are tied, only that they are an
 * embedding: it counts as layer 0, which is a function. */
static bool split(const char *name, uint64_t *ret_layer, const char **ret_local)
{
    const char *s = name;

    if (ckpt_take_text(&s, TIED)) {
        *ret_layer = 0;
        *ret_local = s;
        return true;
    }
    if (!ckpt_take_u64(&s, ret_layer) || !ckpt_take_text(&s, "."))
        return false;
    *ret_local = s;
    return true;
}

struct search {
    struct ckpt_ds_stack *stack;
    uint64_t nembedding, nblock, nnorm, nhead;
};

static void see_embedding(struct search *s, uint64_t layer)
{
    if (s->nembedding++ == 0) {
        s->stack->embedding = layer;
        return;
    }
    s->stack->tied = true;
    s->stack->head = layer > s->stack->embedding ? layer : s->stack->embedding;
    if (layer < s->stack->embedding)
        s->stack->embedding = layer;
}

static void see_block(struct search *s, uint64_t layer)
{
    if (s->nblock == 0 || layer < s->stack->first)
        s->stack->first = layer;
    if (s->nblock++ == 0 || layer > s->stack->last)
        s->stack->last = layer;
}

static void see(struct search *s, enum kind kind, uint64_t layer)
{
    if (kind == EMBEDDING)
        see_embedding(s, layer);
    else if (kind == BLOCK)
        see_block(s, layer);
    else if (kind == NORM && s->nnorm++ == 0)
        s->stack->norm = layer;
    else if (kind == HEAD && s->nhead++ == 0)
        s->stack->head = layer;
}

/* Is the number that of a layer whose kind is known? */
static bool is_known(const struct ckpt_ds_stack *stack, uint64_t layer)
{
    return layer == stack->embedding || layer == stack->norm ||
           (layer >= stack->first && layer <= stack->last) ||
           ((stack->has_head || stack->tied) && layer == stack->head);
}

static int fail_order(const struct search *s, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "the layers' order is not Megatron-DeepSpeed's: %" PRIu64
                     " with an embedding, %" PRIu64 " transformer layers (%" PRIu64 " to %" PRIu64
                     "), %" PRIu64 " final norms, %" PRIu64 " output layers",
                     s->nembedding, s->nblock, s->stack->first, s->stack->last, s->nnorm, s->nhead);
}

static int check(const struct search *s, uint64_t nlayer, struct ckpt_err *err)
{
    const struct ckpt_ds_stack *stack = s->stack;
    const bool end = stack->has_head || stack->tied;

    if (s->nblock != nlayer || stack->last - stack->first + 1 != s->nblock)
        return ckpt_fail(err, s->nblock < nlayer ? CKPT_MISSING : CKPT_CONFLICT,
                         "there are %" PRIu64 " transformer layers (%" PRIu64 " to %" PRIu64
                         "), its args say %" PRIu64 " (num_layers)",
                         s->nblock, stack->first, stack->last, nlayer);
    if (!s->nembedding || !s->nnorm)
        return ckpt_fail(err, CKPT_MISSING, "no layer is the %s",
                         s->nembedding ? "final norm" : "embedding");
    if (s->nembedding > 2 || s->nnorm > 1 || s->nhead > 1 || (s->nhead && stack->tied) ||
        stack->embedding >= stack->first || stack->norm <= stack->last ||
        (end && stack->head <= stack->norm))
        return fail_order(s, err);
    return 0;
}

int ckpt_ds_stack_read(const struct ckpt_ds_parts *parts, uint64_t nlayer,
                       struct ckpt_ds_stack *ret, struct ckpt_err *err)
{
    struct search s = {.stack = ret};
    const char *local;
    uint64_t layer;

    *ret = (struct ckpt_ds_stack){0};
    for (size_t i = 0; i < parts->part.len; i++)
        if (split(parts->part.ptr[i].name, &layer, &local))
            see(&s, kind_of(local), layer);
    ret->has_head = s.nhead > 0;
    if (check(&s, nlayer, err) < 0)
        return -1;
    for (size_t i = 0; i < parts->part.len; i++)
        if (!split(parts->part.ptr[i].name, &layer, &local) || !is_known(ret, layer))
            return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is in no layer of a known kind",
                             parts->part.ptr[i].name);
    return 0;
}

bool ckpt_ds_stack_name(const struct ckpt_ds_stack *stack, const char *name, struct ckpt_str *out)
{
    const char *local = name;
    uint64_t layer = 0;

    (void)split(name, &layer, &local);
    ckpt_str_clear(out);
    if (stack->tied && layer == stack->head)
        return false;
    if (layer == stack->embedding) {
        ckpt_str_puts(out, "embedding.");
    } else if (layer == stack->norm) {
        ckpt_str_puts(out, "decoder.final_layernorm.");
    } else if (stack->has_head && layer == stack->head) {
        ckpt_str_puts(out, "output_layer.");
        (void)ckpt_take_text(&local, "lm_head.");
    } else {
        ckpt_str_puts(out, "decoder.layers.");
        ckpt_str_put_u64(out, layer - stack->first);
        ckpt_str_putc(out, '.');
    }
    ckpt_str_puts(out, local);
    return true;
}

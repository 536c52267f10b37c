/* SPDX-License-Identifier: Apache-2.0 */
/* torch_dist, torch_dcp and fsdp_dtensor: a DCP under Megatron's names. */
#include <string.h>

#include "format/dcp/load.h"
#include "format/megatron/load.h"

const char ckpt_megatron_common_state[] = "common_state/shard_0_1";

/* Objects with facts about the run: in Megatron-Core 0.19 and later, and in torch_dcp. */
static const char *const objects[] = {ckpt_megatron_common_state, "args", "iteration",
                                      "checkpoint_version"};

struct naming {
    struct ckpt_arena arena;
    struct ckpt_str buf;
    struct ckpt_megatron_state *st;
    const struct ckpt_catalog *cat;
    bool states; /* the optimizer's tensors are wanted */
    bool dist;   /* it has torch_dist's common state */
    bool failed;
};

static void naming_release(struct naming *n)
{
    ckpt_arena_release(&n->arena);
    ckpt_str_release(&n->buf);
}

static const char *name_tensor(void *ctx, const char *name)
{
    static const struct ckpt_megatron_place whole = {0};
    struct naming *n = ctx;
    char *own;

    if (n->states && ckpt_megatron_is_state(name))
        return name;
    if (!ckpt_megatron_name(name, &whole, &n->buf))
        return NULL;
    if (strcmp(ckpt_str_get(&n->buf), name) == 0)
        return name;
    own = n->buf.failed ? NULL : ckpt_arena_strdup(&n->arena, ckpt_str_get(&n->buf));
    n->failed |= !own;
    return own;
}

static bool is_optional(void *ctx, const char *name)
{
    (void)ctx;
    return ckpt_megatron_is_state(name);
}

static bool wants(void *ctx, const char *name)
{
    (void)ctx;
    for (size_t i = 0; i < sizeof objects / sizeof objects[0]; i++)
        if (strcmp(name, objects[i]) == 0)
            return true;
    return false;
}

static int take_object(void *ctx, const char *name, struct ckpt_source *s, struct ckpt_err *err)
{
    struct naming *n = ctx;

    n->dist |= strcmp(name, ckpt_megatron_common_state) == 0;
    if (strcmp(name, ckpt_megatron_common_state) == 0 || strcmp(name, "args") == 0)
        return ckpt_megatron_state_read(n->st, s, err);
    return ckpt_megatron_state_read_fact(n->st, name, s, err);
}

int ckpt_megatron_load_dcp(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           bool finished, struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                           struct ckpt_err *err)
{
    ckpt_cleanup(naming_release) struct naming n = {.st = st, .states = opt->states};
    const struct ckpt_dcp_format format = {.name = "megatron",
                                           .tensor = name_tensor,
                                           .optional = is_optional,
                                           .replicas = true, /* some forks write them */
                                           .wants = wants,
                                           .object = take_object,
                                           .ctx = &n};

    if (ckpt_dcp_load(dir, opt, &format, cat, err) < 0)
        return -1;
    if (n.failed)
        return ckpt_nomem(err);
    return !finished && n.dist ? ckpt_megatron_unmarked(dir, opt, cat, err) : 0;
}

int ckpt_megatron_unmarked(const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           struct ckpt_catalog *cat, struct ckpt_err *err)
{
    if (!opt->states || !ckpt_dir_has_file(dir, ".metadata"))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s': the save was not finished: metadata.json is missing",
                         ckpt_dir_path(dir));
    ckpt_catalog_warn(cat,
                      "metadata.json is missing: the save was not finished, or a save strategy "
                      "was called by itself; the tensors are those that .metadata names");
    return 0;
}

/* A state that another directory of the same save has, too, is the same. */
static const char *name_state(void *ctx, const char *name)
{
    const struct naming *n = ctx;

    return ckpt_megatron_is_state(name) && !ckpt_catalog_find(n->cat, name) ? name : NULL;
}

int ckpt_megatron_load_states(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                              struct ckpt_catalog *cat, struct ckpt_err *err)
{
    struct naming n = {.cat = cat};
    const struct ckpt_dcp_format format = {.name = "megatron",
                                           .tensor = name_state,
                                           .optional = is_optional,
                                           .replicas = true,
                                           .may_be_empty = true,
                                           .ctx = &n};

    /* the facts are those of the weights */
    ckpt_cleanup(ckpt_json_decrefp) json_t *about = json_copy(cat->about);
    if (!about)
        return ckpt_nomem(err);
    if (ckpt_dcp_load(dir, opt, &format, cat, err) < 0)
        return -1;
    return json_object_update(cat->about, about) < 0 ? ckpt_nomem(err) : 0;
}

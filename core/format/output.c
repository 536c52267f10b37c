/* SPDX-License-Identifier: Apache-2.0 */
/* Options that describe an output, and whether its format has them. */
#include "format/output.h"

#include <string.h>

#include "base/str.h"

const char *const ckpt_output_keys[CKPT_NCUT] = {
    [CKPT_CUT_TP] = "tp",
    [CKPT_CUT_PP] = "pp",
    [CKPT_CUT_EP] = "ep",
    [CKPT_CUT_ETP] = "etp",
    [CKPT_CUT_VPP] = "vpp",
    [CKPT_CUT_RANKS] = "ranks",
    [CKPT_CUT_VOCAB] = "make_vocab_size_divisible_by",
};

static const char names_key[] = "names";

uint32_t ckpt_output_parts(const struct ckpt_output *t, enum ckpt_cut_by cut)
{
    return t->cut[cut] ? t->cut[cut] : 1;
}

/* CKPT_NCUT: it is none. */
static enum ckpt_cut_by find_cut(const char *key)
{
    int i = 0;

    while (i < CKPT_NCUT && strcmp(ckpt_output_keys[i], key) != 0)
        i++;
    return (enum ckpt_cut_by)i;
}

bool ckpt_output_knows(const char *key)
{
    return find_cut(key) < CKPT_NCUT || strcmp(key, names_key) == 0;
}

static int set_names(struct ckpt_output *t, const char *value, struct ckpt_err *err)
{
    if (value && strcmp(value, "hub") == 0)
        t->names = CKPT_OUTPUT_NAMES_HUB;
    else if (value && strcmp(value, "memory") == 0)
        t->names = CKPT_OUTPUT_NAMES_MEMORY;
    else
        return ckpt_fail(err, CKPT_USAGE, "option names: '%s' is neither hub nor memory",
                         value ? value : "");
    return 0;
}

int ckpt_output_set(struct ckpt_output *t, const char *key, const char *value, struct ckpt_err *err)
{
    const enum ckpt_cut_by cut = find_cut(key);
    unsigned long long n;

    if (cut == CKPT_NCUT)
        return set_names(t, value, err);
    if (!value || !ckpt_parse_u64(value, strlen(value), &n) || n == 0 || n > CKPT_CUT_MOST)
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not a number from 1 to %d", key,
                         value ? value : "", CKPT_CUT_MOST);
    t->cut[cut] = (uint32_t)n;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt explain: where a tensor's bytes come from. */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

static int explain(const struct ckpt_tool *t, struct ckpt_view *view, const char *tensor,
                   json_t **list, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *facts = NULL;

    if (ckpt_view_explain(view, tensor, &text, err) < 0 || ckpt_out_parse(text, &facts, err) < 0)
        return -1;
    if (t->svg && ckpt_summary_to_svg(facts, t->svg, err) < 0)
        return -1;
    if (*list)
        return json_array_append(*list, facts) < 0 ? ckpt_nomem(err) : 0;
    if (t->json)
        return ckpt_out_json(facts, err);
    if (t->verbose)
        ckpt_out_outline(facts);
    else
        ckpt_summary_of_tensor(facts);
    return 0;
}

/* Explain all tensors whose names match the pattern. */
static int explain_all(const struct ckpt_tool *t, struct ckpt_view *view, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = t->json ? json_array() : NULL;
    size_t found = 0;

    for (size_t i = 0, n = ckpt_view_tensors(view); i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(view, i);
        if (fnmatch(t->operand[0], info.name, 0) != 0)
            continue;
        if (found++ && !t->json)
            (void)putchar('\n');
        if (explain(t, view, info.name, &list, err) < 0)
            return -1;
    }
    if (!found)
        return ckpt_fail(err, CKPT_MISSING, "no tensor's name matches '%s' (ckpt ls lists them)",
                         t->operand[0]);
    return t->json ? ckpt_out_json(list, err) : 0;
}

int ckpt_cmd_explain(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    const bool pattern = strpbrk(t->operand[0], "*?[");

    if (t->svg && pattern)
        return ckpt_fail(err, CKPT_USAGE, "--svg draws one tensor: give its name");
    if (ckpt_tool_open(t, &view, err) < 0)
        return -1;
    return pattern ? explain_all(t, view, err)
                   : explain(t, view, t->operand[0], &(json_t *){NULL}, err);
}

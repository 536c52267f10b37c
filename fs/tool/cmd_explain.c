/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt explain: where a tensor's bytes come from. */
#include <stdlib.h>

#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

int ckpt_cmd_explain(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_runp) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *facts = NULL;

    if (ckpt_tool_open(t, &run, &view, err) < 0 ||
        ckpt_view_explain(view, t->operand[0], &text, err) < 0 ||
        ckpt_out_parse(text, &facts, err) < 0)
        return -1;
    if (t->json)
        return ckpt_out_json(facts, err);
    if (t->verbose)
        ckpt_out_outline(facts);
    else
        ckpt_summary_of_tensor(facts);
    return CKPT_TOOL_GOOD;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt digest: XXH3-128 of every file of a view, or of every tensor, as `xxhsum -H2` writes it. */
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool.h"
#include "tool/items.h"
#include "tool/pump.h"

int ckpt_cmd_digest(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_items_release) struct ckpt_items items = {0};
    XXH128_hash_t whole;
    char hex[CKPT_HEX];

    if (ckpt_tool_open(t, &view, err) < 0 ||
        (t->tensors ? ckpt_items_tensors : ckpt_items_files)(view, &items, err) < 0)
        return -1;
    const struct ckpt_pump pump = {
        .view = view, .items = &items, .jobs = t->jobs, .quiet = t->quiet, .hash = true};
    if (ckpt_pump_run(&pump, NULL, err) < 0 || ckpt_view_verify_unchanged(view, err) < 0 ||
        ckpt_hash_whole(&items, &whole, err) < 0)
        return -1;
    if (t->json) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
            "{s:s, s:o}", "xxh3", ckpt_hash_hex(&whole, hex), "items", ckpt_hash_list(&items));
        return ckpt_out_json(j, err);
    }
    for (size_t i = 0; i < items.n; i++) {
        ckpt_cleanup(ckpt_freep) char *shown = ckpt_printable(items.item[i].path);
        if (!shown)
            return ckpt_nomem(err);
        (void)printf("%s  %s\n", ckpt_hash_hex(&items.item[i].hash, hex), shown);
    }
    (void)printf("# %s  the %zu lines above, ordered by name\n", ckpt_hash_hex(&whole, hex),
                 items.n);
    return CKPT_TOOL_GOOD;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Reports of exports, for people and as JSON. */
#include <inttypes.h>
#include <stdio.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "tool/export/export.h"
#include "tool/pump.h"

static void print_part(const struct exporting *x, double seconds, const char *how)
{
    char size[CKPT_OUT_SIZE];

    (void)printf("%s: part %" PRIu32 "/%" PRIu32 ", %s in %.1f s%s\n", x->dest, x->part.index + 1,
                 x->part.count, ckpt_out_size(x->pieces.bytes, size), seconds, how);
}

int ckpt_report_whole(const struct ckpt_export *e, const struct exporting *x, double seconds,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    char hex[CKPT_HEX], size[CKPT_OUT_SIZE], rate[CKPT_OUT_SIZE];
    XXH128_hash_t whole;

    if (ckpt_hash_whole(x->items, &whole, err) < 0)
        return -1;
    (void)ckpt_hash_hex(&whole, hex);
    j = json_pack("{s:o, s:I, s:f, s:b, s:b, s:s, s:o}", "dest", ckptfs_json_text(x->dest), "bytes",
                  (json_int_t)x->items->bytes, "seconds", seconds, "resumed", x->resumed,
                  "already_complete", x->finished, "xxh3", hex, "files", ckpt_hash_list(x->items));
    if (e->step)
        (void)json_object_set_new(j, "step", ckptfs_json_text(e->step));
    if (x->part.count > 1)
        (void)json_object_update_new(j, json_pack("{s:I, s:I, s:I, s:b}", "part",
                                                  (json_int_t)x->part.index + 1, "parts",
                                                  (json_int_t)x->part.count, "part_bytes",
                                                  (json_int_t)x->pieces.bytes, "whole", 1));
    if (e->tool->json)
        return (e->step || x->part.count > 1 ? ckpt_out_json_line : ckpt_out_json)(j, err);
    if (x->part.count > 1) {
        print_part(x, seconds, "; all parts are there");
        (void)printf("%s: %zu files, %s%s\nxxh3 %s\n", x->dest, x->items->n,
                     ckpt_out_size(x->items->bytes, size), x->resumed ? ", resumed" : "", hex);
        return 0;
    }
    (void)printf(
        "%s: %zu files, %s in %.1f s (%s/s)%s\nxxh3 %s\n", x->dest, x->items->n,
        ckpt_out_size(x->items->bytes, size), seconds,
        ckpt_out_size(seconds > 0 ? (uint64_t)((double)x->items->bytes / seconds) : 0, rate),
        x->finished  ? ", already complete: every byte was compared"
        : x->resumed ? ", resumed"
                     : "",
        hex);
    return 0;
}

static void print_lacking(const struct exporting *x, const json_t *lacking)
{
    size_t i;
    json_t *lack;

    json_array_foreach(lacking, i, lack) {
        char size[CKPT_OUT_SIZE];
        const json_int_t files = json_integer_value(json_object_get(lack, "files"));
        (void)printf(
            "%s: part %lld/%" PRIu32 " lacks: %lld file%s, %s, %s\n", x->dest,
            (long long)json_integer_value(json_object_get(lack, "part")), x->part.count,
            (long long)files, files == 1 ? "" : "s",
            ckpt_out_size((uint64_t)json_integer_value(json_object_get(lack, "bytes")), size),
            ckpt_json_str_or(lack, "state", ""));
    }
}

int ckpt_report_part(const struct ckpt_export *e, struct exporting *x, bool whole, double seconds,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *lacking = whole ? json_array() : ckpt_rest_lacking(x);

    if (!lacking)
        return ckpt_nomem(err);
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:o, s:I, s:I, s:I, s:f, s:b, s:b, s:b, s:O}", "dest", ckptfs_json_text(x->dest), "part",
        (json_int_t)x->part.index + 1, "parts", (json_int_t)x->part.count, "part_bytes",
        (json_int_t)x->pieces.bytes, "seconds", seconds, "resumed", x->resumed, "already_complete",
        x->finished, "whole", whole, "lacking", lacking);
    if (e->step)
        (void)json_object_set_new(j, "step", ckptfs_json_text(e->step));
    if (e->tool->json)
        return ckpt_out_json_line(j, err);
    print_part(x, seconds,
               x->finished ? ", already complete: every byte of it was compared"
               : whole     ? "; all parts are there"
               : json_array_size(lacking)
                   ? ""
                   : "; all parts are written, and another process reads back the rest");
    print_lacking(x, lacking);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt ls: the tensors of a view, or its files. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool.h"
#include "tool/items.h"

static json_t *tensor_json(const struct ckpt_tensor_info *info)
{
    return json_pack("{s:s, s:s, s:o, s:I, s:s, s:I}", "name", info->name, "dtype", info->dtype,
                     "shape", ckptfs_json_shape(info), "bytes", (json_int_t)info->nbytes, "file",
                     info->file ? ckpt_node_name(info->file) : "", "offset",
                     (json_int_t)info->file_off);
}

static int json_tensors(const struct ckpt_view *view, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();

    for (size_t i = 0, n = ckpt_view_tensors(view); i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(view, i);
        ckpt_json_append(&list, tensor_json(&info));
    }
    return ckpt_out_json(list, err);
}

/* Print a table of n rows whose cells `row` allocates. */
static int table(const char *const *head, const char *align, size_t ncolumn, size_t n,
                 int (*row)(const void *ctx, size_t i, char **cell), const void *ctx,
                 struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char **cell = calloc(n * ncolumn + 1, sizeof *cell);
    bool good = cell;

    for (size_t i = 0; good && i < n; i++)
        good = row(ctx, i, cell + i * ncolumn) == 0;
    if (good)
        ckpt_out_table(head, align, ncolumn, cell, n * ncolumn);
    for (size_t i = 0; cell && i < n * ncolumn; i++)
        free(cell[i]);
    return good ? 0 : ckpt_nomem(err);
}

static int tensor_row(const void *ctx, size_t i, char **cell)
{
    const struct ckpt_tensor_info info = ckptfs_tensor(ctx, i);

    cell[0] = strdup(info.name);
    cell[1] = strdup(info.dtype);
    cell[2] = info.rank ? ckpt_out_numbers(info.shape, info.rank, " x ") : strdup("-");
    cell[3] = ckpt_asprintf("%" PRIu64, info.nbytes);
    cell[4] = strdup(info.file ? ckpt_node_name(info.file) : "-");
    return cell[0] && cell[1] && cell[2] && cell[3] && cell[4] ? 0 : -1;
}

static int file_row(const void *ctx, size_t i, char **cell)
{
    const struct ckpt_items *items = ctx;

    cell[0] = ckpt_asprintf("%" PRIu64, items->item[i].size);
    cell[1] = strdup(items->item[i].path);
    return cell[0] && cell[1] ? 0 : -1;
}

static int list_files(const struct ckpt_tool *t, const struct ckpt_view *view, struct ckpt_err *err)
{
    static const char *const head[] = {"BYTES", "FILE"};
    ckpt_cleanup(ckpt_items_release) struct ckpt_items items = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = NULL;

    if (ckpt_items_files(view, &items, err) < 0)
        return -1;
    if (!t->json)
        return table(head, "rl", 2, items.n, file_row, &items, err);
    list = json_array();
    for (size_t i = 0; i < items.n; i++)
        ckpt_json_append(&list,
                         json_pack("{s:o, s:I}", "name", ckptfs_json_text(items.item[i].path),
                                   "bytes", (json_int_t)items.item[i].size));
    return ckpt_out_json(list, err);
}

int ckpt_cmd_ls(const struct ckpt_tool *t, struct ckpt_err *err)
{
    static const char *const head[] = {"TENSOR", "DTYPE", "SHAPE", "BYTES", "FILE"};
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;

    if (ckpt_tool_open(t, &view, err) < 0)
        return -1;
    if (t->files)
        return list_files(t, view, err);
    if (t->json)
        return json_tensors(view, err);
    return table(head, "lllrl", 5, ckpt_view_tensors(view), tensor_row, view, err);
}

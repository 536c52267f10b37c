/* SPDX-License-Identifier: Apache-2.0 */
/* Computed tensors. Input, a line each: adapter_config.json, config.json, then tensors: "a" (of the
 * adapter) or "b" (of the base), name, dtype, dimensions. What dequantises and merges is read whole
 * and in parts, to the same bytes. */
#include "fuzz.h"

#include <stdio.h>

#include "base/json.h"
#include "model/dequantize.h"
#include "model/lora.h"
#include "recipe/library/recipe.h"

enum { MOST_TENSORS = 24, MOST_BYTES = 1 << 14 };

static void add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype, uint32_t rank,
                const uint64_t *dim)
{
    static unsigned char data[MOST_BYTES];
    struct ckpt_box box = {.rank = rank};
    struct ckpt_piece_draft p;
    struct ckpt_source *s;
    struct ckpt_err err = {0};
    uint64_t numel, stride[CKPT_MAX_RANK];
    size_t index;

    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 37 + i / 256);
    if (!ckpt_shape_numel(dim, rank, &numel) || numel > MOST_BYTES / ckpt_dtype_size(dtype) ||
        ckpt_catalog_add(cat, name, dtype, dim, rank, &index, &err) < 0 || numel == 0)
        return;
    MUST(ckpt_source_mem_new("data", data, sizeof data, &s, &err) == 0);
    ckpt_shape_strides(dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++) {
        box.n[d] = dim[d];
        stride[d] *= ckpt_dtype_size(dtype);
    }
    ckpt_piece_from_box(dim, &box, ckpt_catalog_add_source(cat, s, &err), 0, stride, &p);
    ckpt_source_unref(s);
    MUST(ckpt_catalog_set_pieces(cat, index, &p, 1, &err) == 0);
}

static void add_line(struct ckpt_catalog *base, struct ckpt_catalog *adapter, const char *line)
{
    char which, name[200], dtype[20];
    uint64_t dim[CKPT_MAX_RANK];
    enum ckpt_dtype type;
    uint32_t rank = 0;
    int at = 0, end;
    unsigned long n;

    if (sscanf(line, "%c %199s %19s%n", &which, name, dtype, &at) < 3 ||
        !ckpt_dtype_parse(dtype, strlen(dtype), &type))
        return;
    for (line += at; rank < CKPT_MAX_RANK && sscanf(line, "%9lu%n", &n, &end) == 1; line += end)
        dim[rank++] = n;
    add(which == 'a' ? adapter : base, name, type, rank, dim);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    char *config = input_text(&in, '\n'), *model = input_text(&in, '\n');
    struct ckpt_catalog *base, *adapter;
    struct ckpt_lora_options opt = {0};
    struct ckpt_err err = {0};
    json_t *lora = NULL, *hf = NULL;
    static struct ckpt_recipes *recipes;

    MUST(recipes || ckpt_recipes_load(NULL, &recipes, &err) == 0);
    MUST(ckpt_catalog_new(&base, &err) == 0 && ckpt_catalog_new(&adapter, &err) == 0);
    for (int i = 0; i < MOST_TENSORS && in.left; i++) {
        char *line = input_text(&in, '\n');
        add_line(base, adapter, line);
        free(line);
    }
    (void)ckpt_json_parse(config, strlen(config), "adapter_config.json", &lora, NULL);
    (void)ckpt_json_parse(model, strlen(model), "config.json", &hf, NULL);
    opt.adapter = lora;
    opt.config = hf;
    opt.type = ckpt_types_find(ckpt_recipes_types(recipes), ckpt_json_str(hf, "model_type"));
    int result = ckpt_dequantize(base, hf, NULL, &err);
    if (result == 0 && json_object_size(lora))
        result = ckpt_lora_merge(base, adapter, &opt, &err);
    if (result < 0)
        check_err(&err);
    else
        read_back_all(base);
    json_decref(lora);
    json_decref(hf);
    ckpt_catalog_free(base);
    ckpt_catalog_free(adapter);
    free(config);
    free(model);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: the input is a file; every tensor of an accepted one reads back as the bytes that
 * its offsets name, and its metadata, written again, as itself. */
#include "fuzz.h"

#include "container/safetensors.h"
#include "container/st_metadata.h"
#include "mutate.h"

static void add(struct ckpt_catalog *cat, const struct ckpt_st_tensor *t)
{
    struct ckpt_box box = {.rank = t->rank};
    struct ckpt_piece_draft piece;
    struct ckpt_err err = {0};
    uint64_t stride[CKPT_MAX_RANK];
    size_t index;

    MUST(ckpt_catalog_add(cat, t->name, t->dtype, t->dim, t->rank, &index, &err) == 0);
    if (t->len == 0)
        return;
    ckpt_shape_strides(t->dim, t->rank, stride);
    for (uint32_t d = 0; d < t->rank; d++) {
        box.n[d] = t->dim[d];
        stride[d] *= ckpt_dtype_size(t->dtype);
    }
    ckpt_piece_from_box(t->dim, &box, 0, t->off, stride, &piece);
    MUST(ckpt_catalog_set_pieces(cat, index, &piece, 1, &err) == 0);
}

static void compare(const struct ckpt_catalog *cat, const struct ckpt_st *st, const uint8_t *data,
                    size_t size)
{
    struct ckpt_err err = {0};

    for (size_t i = 0; i < st->ntensor; i++) {
        const struct ckpt_st_tensor *t = &st->tensor[i];
        MUST(ckpt_range_ok(t->off, t->len, size));
        unsigned char *buf = malloc(t->len + 1);
        MUST(buf);
        MUST(ckpt_tensor_pread(ckpt_catalog_find(cat, t->name), NULL, buf, t->len, 0, &err) == 0);
        MUST(memcmp(buf, data + t->off, t->len) == 0);
        free(buf);
    }
}

static void write_metadata(const struct ckpt_st *st)
{
    struct ckpt_str head = {0};
    struct ckpt_err err = {0};
    json_t *files = NULL, *joined, *differ, *again;
    size_t size = 0;
    bool kept;

    MUST(ckpt_st_metadata_keep(&files, &size, "a", st, &kept, &err) == 0 && kept);
    MUST(ckpt_st_metadata_join(files, &joined, &differ, &err) == 0);
    MUST(json_array_size(differ) == 0);
    ckpt_st_header_begin_with(&head, joined);
    ckpt_st_header_end(&head);
    MUST(!head.failed && ckpt_json_parse(head.ptr, head.len, "header", &again, &err) == 0);
    if (!json_object_get(joined, "format"))
        MUST(json_object_set_new(joined, "format", json_string("pt")) == 0);
    MUST(json_equal(json_object_get(again, "__metadata__"), joined));
    json_decref(again);
    json_decref(differ);
    json_decref(joined);
    json_decref(files);
    ckpt_str_release(&head);
}

/* With unknown dtypes kept, whatever is read lies within the file, and all that is read without
 * them is read. */
static void read_unknown(struct ckpt_source *s, size_t size, bool readable)
{
    struct ckpt_st st = {.keep_unknown = true};
    struct ckpt_err err = {0};

    if (ckpt_st_read(s, &st, &err) < 0) {
        check_err(&err);
        MUST(!readable);
        return;
    }
    for (size_t i = 0; i < st.ntensor; i++) {
        MUST(ckpt_range_ok(st.tensor[i].off, st.tensor[i].len, size));
        MUST((st.tensor[i].dtype == CKPT_OPAQUE) == (st.tensor[i].opaque != NULL));
    }
    ckpt_st_release(&st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_source *s;
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    struct ckpt_st st = {0};

    MUST(ckpt_source_mem_new("input", data, size, &s, &err) == 0);
    const bool readable = ckpt_st_read(s, &st, &err) == 0;
    read_unknown(s, size, readable);
    if (!readable) {
        check_err(&err);
        MUST(strstr(err.text, "input"));
        ckpt_source_unref(s);
        return 0;
    }
    MUST(ckpt_catalog_new(&cat, &err) == 0);
    MUST(ckpt_catalog_add_source(cat, s, &err) == 0);
    for (size_t i = 0; i < st.ntensor; i++)
        add(cat, &st.tensor[i]);
    compare(cat, &st, data, size);
    read_back_all(cat);
    write_metadata(&st);
    ckpt_catalog_free(cat);
    ckpt_st_release(&st);
    ckpt_source_unref(s);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    return mutate_safetensors(data, size, max, seed);
}

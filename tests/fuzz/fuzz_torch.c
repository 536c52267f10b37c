/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a torch.save archive of one tensor, or its pickle alone: what is accepted has all
 * its bytes. */
#include "fuzz.h"

#include "container/torch.h"
#include "mutate.h"

static void check_tensor(struct ckpt_source *s, const struct ckpt_torch_tensor *t)
{
    uint64_t last = t->off + ckpt_dtype_size(t->dtype) - 1;
    struct ckpt_err err = {0};
    unsigned char byte;

    if (t->numel == 0)
        return;
    for (uint32_t d = 0; d < t->rank; d++)
        last += (t->dim[d] - 1) * t->stride[d];
    MUST(t->off <= last && last < s->size);
    MUST(ckpt_source_pread(s, &byte, 1, last, &err) == 0);
}

static void visit(const struct ckpt_pickle *p, ckpt_pv v, int depth)
{
    const struct ckpt_pv_text text = ckpt_pv_text(p, v);

    MUST(memchr(text.text, 0, sizeof text.text));
    (void)ckpt_pv_str(p, v);
    if (depth == 0)
        return;
    for (size_t i = 0; i < ckpt_pv_len(p, v) && i < 16; i++)
        visit(p, ckpt_pv_at(p, v, i), depth - 1);
    for (size_t i = 0; i < ckpt_pv_npair(p, v) && i < 16; i++) {
        visit(p, ckpt_pv_key(p, v, i), depth - 1);
        visit(p, ckpt_pv_value(p, v, i), depth - 1);
    }
    for (unsigned i = 0; i < CKPT_PICKLE_MAX_SLOTS; i++)
        visit(p, ckpt_pv_slot(p, v, i), depth - 1);
}

static void parse_alone(struct ckpt_source *s)
{
    struct ckpt_torch_layout layout;
    struct ckpt_err err = {0};
    struct ckpt_pickle p;

    if (ckpt_pickle_read(s, 0, s->size, &ckpt_torch_rules, NULL, &p, &err) < 0) {
        check_err(&err);
        return;
    }
    visit(&p, p.root, 3);
    if (ckpt_torch_layout_of(&p, p.root, &layout, &err) < 0)
        check_err(&err);
    ckpt_pickle_release(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_torch_memo memo = {0};
    struct ckpt_torch_tensor tensor, again;
    struct ckpt_source *s = NULL;
    struct ckpt_err err = {0};

    MUST(ckpt_source_mem_new("input", data, size, &s, &err) == 0);
    if (ckpt_torch_item(s, 0, size, &memo, &tensor, &err) == 0) {
        check_tensor(s, &tensor);
        MUST(ckpt_torch_item(s, 0, size, &memo, &again, &err) == 0 && again.off == tensor.off);
        MUST(again.numel == tensor.numel && again.rank == tensor.rank);
    } else {
        check_err(&err);
    }
    ckpt_torch_memo_release(&memo);
    parse_alone(s);
    ckpt_source_unref(s);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    const bool zip = size >= 4 && memcmp(data, "PK\3\4", 4) == 0;

    return zip ? mutate_zip(data, size, max, seed) : mutate_pickle(data, size, max, seed);
}

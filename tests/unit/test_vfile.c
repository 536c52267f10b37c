/* SPDX-License-Identifier: Apache-2.0 */
#include "small_catalog.h"
#include "tensor/value.h"
#include "view/text.h"
#include "view/view.h"

/* A file of every kind of segment, with empty ones between; its bytes are known. */
struct sample {
    struct small_catalog c;
    struct ckpt_arena arena;
    struct ckpt_text text;
    struct ckpt_source *side;
    struct ckpt_segment segment[8];
    struct ckpt_vnode node;
    unsigned char want[256];
    size_t len;
};

static void put_ten(const void *ctx, size_t i, struct ckpt_str *out)
{
    (void)ctx;
    ckpt_str_printf(out, "entry%05zu", i);
}

static void append(struct sample *s, struct ckpt_segment segment, const void *bytes)
{
    segment.off = s->len;
    s->segment[s->node.nsegment++] = segment;
    if (segment.len)
        memcpy(s->want + s->len, bytes, (size_t)segment.len);
    s->len += (size_t)segment.len;
    s->node.size = s->len;
}

static void sample_init(struct sample *s)
{
    unsigned char tensor[24];
    struct ckpt_err err = {0};

    memset(s, 0, sizeof *s);
    s->c = small_catalog_new();
    (void)small_add(&s->c, "w", CKPT_F32, 6, 0);
    (void)small_add(&s->c, "none", CKPT_F32, 0, 0);
    for (size_t i = 0; i < sizeof tensor; i++)
        tensor[i] = small_byte(i);
    if (ckpt_text_init(&s->text, put_ten, NULL, 2, CKPT_TEXT_SHORT, &s->arena, &err) < 0 ||
        ckpt_source_mem_new("side", "side file", 9, &s->side, &err) < 0)
        fail_msg("%s", err.text);
    const struct ckpt_tensor *t = s->c.cat->tensors.ptr;
    append(s, (struct ckpt_segment){.len = 5, .kind = CKPT_SEGMENT_MEM, .mem = "hello"}, "hello");
    append(s, (struct ckpt_segment){.kind = CKPT_SEGMENT_MEM, .mem = ""}, "");
    append(s, (struct ckpt_segment){.len = 20, .kind = CKPT_SEGMENT_TEXT, .text = &s->text},
           "entry00000entry00001");
    append(s, (struct ckpt_segment){.kind = CKPT_SEGMENT_TENSOR, .tensor = &t[1]}, "");
    append(s, (struct ckpt_segment){.len = 24, .kind = CKPT_SEGMENT_TENSOR, .tensor = &t[0]},
           tensor);
    append(s, (struct ckpt_segment){.len = 9, .kind = CKPT_SEGMENT_SOURCE, .source = s->side},
           "side file");
    append(s, (struct ckpt_segment){.kind = CKPT_SEGMENT_TENSOR, .tensor = &t[1]}, "");
    s->node.name = "sample";
    s->node.segment = s->segment;
}

static void sample_release(struct sample *s)
{
    ckpt_source_unref(s->side);
    ckpt_arena_release(&s->arena);
    small_catalog_free(&s->c);
}

/* Exactly what exists of [off, off+len) comes, and nothing is written after it. */
static bool reads(const struct sample *s, size_t len, uint64_t off)
{
    unsigned char buf[512];
    size_t got = 999, want = off >= s->len ? 0 : len < s->len - off ? len : s->len - (size_t)off;
    struct ckpt_err err = {0};

    memset(buf, 0x5a, sizeof buf);
    return ckpt_vfile_pread(NULL, &s->node, buf, len, off, &got, &err) == 0 && got == want &&
           memcmp(buf, s->want + (want ? off : 0), want) == 0 && buf[want] == 0x5a;
}

TEST(vfile, every_range_is_delivered_in_full)
{
    struct sample s;

    sample_init(&s);
    for (uint64_t off = 0; off <= s.len + 2; off++)
        for (size_t len = 0; len <= s.len + 2; len++)
            CHECK(reads(&s, len, off));
    sample_release(&s);
}

TEST(vfile, ranges_at_the_end_of_the_world_do_not_wrap)
{
    struct sample s;
    unsigned char buf[256];
    size_t got;
    struct ckpt_err err = {0};

    sample_init(&s);
    CHECK(reads(&s, 10, UINT64_MAX));
    CHECK(reads(&s, 10, UINT64_MAX - 5));
    CHECK_OK(ckpt_vfile_pread(NULL, &s.node, buf, SIZE_MAX, s.len - 3, &got, &err));
    CHECK_EQ(got, 3);
    sample_release(&s);
}

TEST(vfile, an_empty_file_reads_as_nothing)
{
    struct ckpt_vnode empty = {.name = "empty"};
    size_t got = 1;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_vfile_pread(NULL, &empty, NULL, 10, 0, &got, &err));
    CHECK_EQ(got, 0);
}

static int broken_compute(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                          uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    (void)t, (void)rd, (void)buf, (void)lo, (void)hi;
    return ckpt_fail(err, CKPT_IO, "the disk is gone");
}

TEST(vfile, a_failed_segment_fails_the_read_and_names_the_file)
{
    static const struct ckpt_value_ops ops = {.name = "broken", .compute = broken_compute};
    static const struct ckpt_value value = {.ops = &ops};
    struct sample s;
    unsigned char buf[256];
    size_t got = 77;
    struct ckpt_err err = {0};

    sample_init(&s);
    s.c.cat->tensors.ptr[0].value = &value;
    CHECK(reads(&s, 25, 0));
    CHECK_FAILS(ckpt_vfile_pread(NULL, &s.node, buf, 26, 0, &got, &err), CKPT_IO,
                "sample: the disk is gone");
    CHECK_EQ(got, 77);
    sample_release(&s);
}

TESTS(T(vfile, every_range_is_delivered_in_full),
      T(vfile, ranges_at_the_end_of_the_world_do_not_wrap),
      T(vfile, an_empty_file_reads_as_nothing),
      T(vfile, a_failed_segment_fails_the_read_and_names_the_file))

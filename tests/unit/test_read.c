/* SPDX-License-Identifier: Apache-2.0 */
/* Reading tensors: every byte range of random pieces against their definition, and how many source
 * reads a request costs. */
#include "test.h"

#include <stdlib.h>

#include "random.h"
#include "tensor/read.h"
#include "tree.h"

enum { SOURCE_BYTES = 1 << 16 };

static unsigned char source_byte(uint32_t source, uint64_t off)
{
    return (unsigned char)(off * 131 + (off >> 8) * 7 + source * 29 + 3);
}

static void add_source(struct ckpt_catalog *cat, uint32_t number, size_t len)
{
    struct ckpt_err err = {0};
    unsigned char *data = malloc(len);
    struct ckpt_source *s;
    for (size_t i = 0; i < len; i++)
        data[i] = source_byte(number, i);
    assert_int_equal(ckpt_source_mem_new("memory", data, len, &s, &err), 0);
    assert_int_equal(ckpt_catalog_add_source(cat, s, &err), number);
    ckpt_source_unref(s);
    free(data);
}

/* What the piece says, element by element. */
static void expect_piece(const struct ckpt_piece_draft *p, size_t esize, unsigned char *expected,
                         unsigned *times)
{
    uint64_t total = 1;
    for (uint32_t j = 0; j < p->naxis; j++)
        total *= p->axis[j].n;
    for (uint64_t i = 0; i < total; i++) {
        uint64_t rest = i, dst = p->dst, src = p->src;
        for (uint32_t j = p->naxis; j-- > 0; rest /= p->axis[j].n) {
            dst += rest % p->axis[j].n * p->axis[j].dst;
            src += rest % p->axis[j].n * p->axis[j].src;
        }
        for (size_t b = 0; b < esize; b++)
            expected[dst * esize + b] = source_byte(p->source, src + b);
        times[dst]++;
    }
}

/* Split [0, n) of the tensor (as axes that nest) at random into pieces with random source strides.
 */
static size_t random_pieces(uint64_t *rng, const uint64_t *dim, uint32_t rank, size_t esize,
                            struct ckpt_piece_draft *out, size_t cap)
{
    struct ckpt_box box[64] = {{.rank = rank}};
    size_t n = 1;
    for (uint32_t d = 0; d < rank; d++)
        box[0].n[d] = dim[d];
    for (int cut = 0; cut < 6 && n < cap; cut++) {
        size_t i = random_range(rng, 0, n);
        unsigned d = (unsigned)random_range(rng, 0, rank);
        if (box[i].n[d] < 2)
            continue;
        uint64_t at = random_range(rng, 1, box[i].n[d]);
        box[n] = box[i];
        box[i].n[d] = at;
        box[n].lo[d] += at;
        box[n++].n[d] -= at;
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t stride[CKPT_MAX_RANK], unit = esize * random_range(rng, 1, 3);
        uint32_t order[3] = {0, 1, 2};
        for (uint32_t d = 0; d < rank; d++) { /* dimensions in any order in the source, with gaps */
            uint32_t k = (uint32_t)random_range(rng, d, rank), t = order[d];
            order[d] = order[k];
            order[k] = t;
            stride[order[d]] = unit;
            unit = unit * box[i].n[order[d]] + esize * random_range(rng, 0, 3);
        }
        ckpt_piece_from_box(dim, &box[i], (uint32_t)random_range(rng, 0, 3),
                            esize * random_range(rng, 0, 8), stride, &out[i]);
    }
    return n;
}

TEST(read, any_range_of_random_pieces_is_what_they_say)
{
    static const enum ckpt_dtype dtypes[] = {CKPT_U8, CKPT_BF16, CKPT_F32, CKPT_I64};
    uint64_t rng = 42;
    for (int round = 0; round < 400; round++) {
        struct ckpt_catalog *cat;
        struct ckpt_err err = {0};
        struct ckpt_piece_draft piece[16];
        uint32_t rank = (uint32_t)random_range(&rng, 1, 4);
        uint64_t dim[3] = {random_range(&rng, 1, 12), random_range(&rng, 1, 12),
                           random_range(&rng, 1, 12)};
        enum ckpt_dtype dtype = dtypes[random_range(&rng, 0, 4)];
        size_t esize = ckpt_dtype_size(dtype), index;
        CHECK_OK(ckpt_catalog_new(&cat, &err));
        for (uint32_t s = 0; s < 3; s++)
            add_source(cat, s, SOURCE_BYTES);
        CHECK_OK(ckpt_catalog_add(cat, "t", dtype, dim, rank, &index, &err));
        size_t n = random_pieces(&rng, dim, rank, esize, piece, 16);
        CHECK_OK(ckpt_catalog_set_pieces(cat, index, piece, n, &err));

        const struct ckpt_tensor *t = ckpt_catalog_find(cat, "t");
        size_t nbytes = (size_t)ckpt_tensor_nbytes(t);
        unsigned char *expected = malloc(nbytes), *got = malloc(nbytes + 2);
        unsigned *times = calloc(t->numel, sizeof *times);
        for (size_t i = 0; i < n; i++)
            expect_piece(&piece[i], esize, expected, times);
        for (uint64_t i = 0; i < t->numel; i++)
            CHECK_EQ(times[i], 1);
        for (int r = 0; r < 30; r++) {
            size_t off = random_range(&rng, 0, nbytes + 1),
                   len = random_range(&rng, 0, nbytes - off + 1);
            got[0] = got[len + 1] = 0xa5;
            CHECK_OK(ckpt_tensor_pread(t, NULL, got + 1, len, off, &err));
            CHECK(memcmp(got + 1, expected + off, len) == 0);
            CHECK(got[0] == 0xa5 && got[len + 1] == 0xa5);
        }
        free(expected);
        free(got);
        free(times);
        ckpt_catalog_free(cat);
    }
}

/* ---- cost ---- */

struct fixture {
    struct ckpt_catalog *cat;
    struct ckpt_read_stats stats;
    struct ckpt_reading rd;
    const struct ckpt_tensor *t;
};

static void setup(struct fixture *f, const uint64_t *dim, uint32_t nsource, size_t source_len,
                  const struct ckpt_piece_draft *piece, size_t npiece)
{
    struct ckpt_err err = {0};
    size_t index;
    memset(f, 0, sizeof *f);
    assert_int_equal(ckpt_catalog_new(&f->cat, &err), 0);
    for (uint32_t s = 0; s < nsource; s++)
        add_source(f->cat, s, source_len);
    assert_int_equal(ckpt_catalog_add(f->cat, "t", CKPT_BF16, dim, 2, &index, &err), 0);
    assert_int_equal(ckpt_catalog_set_pieces(f->cat, index, piece, npiece, &err), 0);
    f->t = ckpt_catalog_find(f->cat, "t");
    f->rd.stats = &f->stats;
}

/* Parts of the first and the last row are no reads of their own. */
TEST(cost, a_mebibyte_of_an_eight_way_row_parallel_tensor_is_eight_reads)
{
    enum { ROWS = 1024, COLS = 4096, WAYS = 8, MIB = 1 << 20 };
    uint64_t dim[] = {ROWS, COLS}, stride[] = {COLS / WAYS * 2, 2};
    struct ckpt_piece_draft piece[WAYS];
    struct ckpt_err err = {0};
    struct fixture f;
    unsigned char *buf = malloc(MIB);
    for (uint32_t i = 0; i < WAYS; i++) {
        struct ckpt_box b = {.rank = 2, .lo = {0, i * COLS / WAYS}, .n = {ROWS, COLS / WAYS}};
        ckpt_piece_from_box(dim, &b, i, 0, stride, &piece[i]);
    }
    setup(&f, dim, WAYS, ROWS * COLS / WAYS * 2, piece, WAYS);
    for (uint64_t off = 2 * MIB; off < 3 * MIB; off += 1234 * 2) {
        f.stats.source_reads = f.stats.source_bytes = 0;
        CHECK_OK(ckpt_tensor_pread(f.t, &f.rd, buf, MIB, off, &err));
        CHECK_EQ(f.stats.source_reads, WAYS);
        CHECK_EQ(f.stats.source_bytes, MIB);
    }
    free(buf);
    ckpt_catalog_free(f.cat);
}

TEST(cost, a_contiguous_tensor_in_two_files_is_one_read_each)
{
    enum { ROWS = 1024, COLS = 512, MIB = 1 << 20 };
    uint64_t dim[] = {ROWS, COLS}, stride[] = {COLS * 2, 2};
    struct ckpt_piece_draft piece[2];
    struct ckpt_err err = {0};
    struct fixture f;
    unsigned char *buf = malloc(MIB);
    for (uint32_t i = 0; i < 2; i++) {
        struct ckpt_box b = {.rank = 2, .lo = {i * ROWS / 2, 0}, .n = {ROWS / 2, COLS}};
        ckpt_piece_from_box(dim, &b, i, 0, stride, &piece[i]);
    }
    setup(&f, dim, 2, ROWS * COLS, piece, 2);
    CHECK_OK(ckpt_tensor_pread(f.t, &f.rd, buf, MIB, 0, &err));
    CHECK_EQ(f.stats.source_reads, 2);
    CHECK_EQ(f.stats.source_bytes, MIB);
    free(buf);
    ckpt_catalog_free(f.cat);
}

TEST(cost, a_transposed_tensor_is_read_once_however_it_is_asked_for)
{
    enum { ROWS = 1024, COLS = 1024, BYTES = ROWS * COLS * 2, ASK = 128 * 1024 };
    uint64_t dim[] = {ROWS, COLS}, stride[] = {2, ROWS * 2};
    struct ckpt_piece_draft piece;
    struct ckpt_box b = {.rank = 2, .n = {ROWS, COLS}};
    struct ckpt_err err = {0};
    struct fixture f;
    unsigned char *buf = malloc(ASK);
    ckpt_piece_from_box(dim, &b, 0, 0, stride, &piece);
    setup(&f, dim, 1, BYTES, &piece, 1);
    CHECK_OK(ckpt_slabs_new(64 << 20, &f.rd.slabs, &err));
    for (uint64_t off = 0; off < BYTES; off += ASK) {
        CHECK_OK(ckpt_tensor_pread(f.t, &f.rd, buf, ASK, off, &err));
        for (uint64_t i = 0; i < ASK / 2; i += 997) {
            uint64_t e = off / 2 + i, src = e / COLS * 2 + e % COLS * ROWS * 2;
            CHECK_EQ(buf[i * 2], source_byte(0, src));
            CHECK_EQ(buf[i * 2 + 1], source_byte(0, src + 1));
        }
    }
    CHECK_EQ(f.stats.source_bytes, BYTES);
    free(buf);
    ckpt_slabs_unref(f.rd.slabs);
    ckpt_catalog_free(f.cat);
}

TEST(cost, a_transposed_tensor_is_prepared_slab_by_slab)
{
    enum { ROWS = 4096, COLS = 10000, BYTES = ROWS * COLS * 2, SLABS = 2 };
    uint64_t dim[] = {COLS, ROWS}, stride[] = {2, COLS * 2};
    struct ckpt_piece_draft piece;
    struct ckpt_box b = {.rank = 2, .n = {COLS, ROWS}};
    struct ckpt_err err = {0};
    struct fixture f;
    unsigned char *buf = malloc(BYTES);
    ckpt_piece_from_box(dim, &b, 0, 0, stride, &piece);
    setup(&f, dim, 1, BYTES, &piece, 1);
    CHECK_EQ(ckpt_tensor_prepare(f.t, &f.rd, 0, f.t->numel), CKPT_PREPARED_BEFORE);
    CHECK_OK(ckpt_slabs_new(256 << 20, &f.rd.slabs, &err));
    for (int i = 0; i < SLABS; i++)
        CHECK_EQ(ckpt_tensor_prepare(f.t, &f.rd, 0, f.t->numel), CKPT_PREPARED_NOW);
    CHECK_EQ(ckpt_tensor_prepare(f.t, &f.rd, 0, f.t->numel), CKPT_PREPARED_BEFORE);
    const unsigned long long made = f.stats.source_bytes;
    CHECK_OK(ckpt_tensor_pread(f.t, &f.rd, buf, BYTES, 0, &err));
    CHECK_EQ(f.stats.source_bytes, made);
    for (uint64_t i = 0; i < BYTES / 2; i += 9973)
        CHECK_EQ(buf[i * 2], source_byte(0, i / ROWS * 2 + i % ROWS * COLS * 2));
    free(buf);
    ckpt_slabs_unref(f.rd.slabs);
    ckpt_catalog_free(f.cat);
}

/* One of eight column slices of a file, or of a range of a file, as it is or transposed. Where
 * nothing tells whether the
 * page cache has the bytes (tmpfs of older kernels), the holes are read, too. */
TEST(cost, holes_of_a_slice_are_not_read_if_the_page_cache_has_the_file)
{
    enum { ROWS = 300, COLS = 4096, WAYS = 8, BYTES = ROWS * COLS / WAYS * 2, BEFORE = 4096 };
    enum { LEN = BEFORE + ROWS * COLS * 2 };
    const uint64_t dims[2][2] = {{ROWS, COLS / WAYS}, {COLS / WAYS, ROWS}};
    const uint64_t strides[2][2] = {{COLS * 2, 2}, {2, COLS * 2}};
    unsigned char *data = malloc(LEN), *buf = malloc(BYTES);
    struct ckpt_err err = {0};
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    struct ckpt_source *file, *s;
    struct tree tree;

    for (size_t i = 0; i < LEN; i++)
        data[i] = source_byte(0, i);
    tree_open(&tree);
    tree_put(&tree, "data", data, LEN);
    CHECK_OK(ckpt_dir_open(tree.path, CKPT_LINKS_BENEATH, &dir, &err));
    CHECK_OK(ckpt_fdpool_new(4, &pool, &err));
    CHECK_OK(ckpt_source_file_new(dir, "data", pool, &file, &err));
    struct iovec all = {data, LEN};
    const struct ckpt_source_way cached = {CKPT_READ_CACHED, NULL};
    const bool tells =
        ckpt_source_read(file, &cached, &(struct ckpt_source_run){0, &all, 1}, 1, NULL) == 0;
    for (int way = 0; way < 4; way++) {
        const bool window = way % 2;
        const uint64_t *dim = dims[way / 2], *stride = strides[way / 2];
        const struct ckpt_box box = {.rank = 2, .n = {dim[0], dim[1]}};
        const uint64_t at = window ? 0 : BEFORE;
        struct ckpt_piece_draft piece;
        struct fixture f;
        CHECK_OK(ckpt_source_window_new(file, BEFORE - at, LEN - BEFORE + at, &s, &err));
        ckpt_piece_from_box(dim, &box, 0, at + 3 * COLS / WAYS * 2, stride, &piece);
        setup(&f, dim, 0, 0, NULL, 0);
        CHECK_EQ(ckpt_catalog_add_source(f.cat, window ? s : file, &err), 0);
        CHECK_OK(ckpt_catalog_set_pieces(f.cat, 0, &piece, 1, &err));
        CHECK_OK(ckpt_tensor_pread(f.t, &f.rd, buf, BYTES, 0, &err));
        for (size_t i = 0; i < BYTES; i++)
            CHECK_EQ(buf[i], data[BEFORE + 3 * COLS / WAYS * 2 + i / 2 / dim[1] * stride[0] +
                                  i / 2 % dim[1] * stride[1] + i % 2]);
        CHECK(f.stats.source_bytes == BYTES || !tells);
        CHECK(f.stats.source_reads == 1 || !tells);
        ckpt_catalog_free(f.cat);
        ckpt_source_unref(s);
    }
    ckpt_source_unref(file);
    ckpt_fdpool_unref(pool);
    ckpt_dir_unref(dir);
    tree_close(&tree);
    free(data);
    free(buf);
}

TEST(catalog, a_piece_past_the_end_of_its_source_is_refused)
{
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    struct ckpt_piece_draft p = {.src = 10, .naxis = 1, .axis = {{.n = 4, .dst = 1, .src = 2}}};
    uint64_t dim[] = {4};
    size_t index;
    CHECK_OK(ckpt_catalog_new(&cat, &err));
    add_source(cat, 0, 18);
    CHECK_OK(ckpt_catalog_add(cat, "t", CKPT_BF16, dim, 1, &index, &err));
    CHECK_OK(ckpt_catalog_set_pieces(cat, index, &p, 1, &err));
    p.src = 11;
    CHECK_FAILS(ckpt_catalog_set_pieces(cat, index, &p, 1, &err), CKPT_FORMAT,
                "'memory' has 18 bytes");
    p.axis[0].src = UINT64_MAX / 2;
    CHECK_FAILS(ckpt_catalog_set_pieces(cat, index, &p, 1, &err), CKPT_FORMAT,
                "'memory' has 18 bytes");
    CHECK_FAILS(ckpt_catalog_add(cat, "t", CKPT_BF16, dim, 1, &index, &err), CKPT_CONFLICT,
                "twice");
    ckpt_catalog_free(cat);
}

TESTS(T(read, any_range_of_random_pieces_is_what_they_say),
      T(cost, a_mebibyte_of_an_eight_way_row_parallel_tensor_is_eight_reads),
      T(cost, a_contiguous_tensor_in_two_files_is_one_read_each),
      T(cost, a_transposed_tensor_is_read_once_however_it_is_asked_for),
      T(cost, a_transposed_tensor_is_prepared_slab_by_slab),
      T(cost, holes_of_a_slice_are_not_read_if_the_page_cache_has_the_file),
      T(catalog, a_piece_past_the_end_of_its_source_is_refused))

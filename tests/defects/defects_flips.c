/* SPDX-License-Identifier: Apache-2.0 */
/* One flipped bit in what is no tensor's data: real checkpoints give the same tensors, an error, or
 * a tensor's name, or the word of its dtype, that differs in this bit; never other bytes.
 *
 * Headers are all bytes of all files that no tensor's elements lie in. Some hundred flips of each
 * checkpoint, spread evenly and others with CKPTFS_SEED; CKPTFS_FLIPS=N for N of them, or `all`.
 * defects_flips NAME: those whose names contain it; or a checkpoint of yours by its absolute path.
 */
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "defects.h"
#include "run/checkpoint.h"
#include "tensor/dtype.h"
#include "tree.h"

enum { FLIPS = 400, FLIPS_SANITIZED = 60, MOST_FILES = 512 };

/* ---- a checkpoint in a folder that may be changed ---- */

struct file {
    char *path;
    size_t size;
    unsigned char *is_data; /* per byte */
};

static struct {
    struct file file[MOST_FILES];
    size_t n;
    const char *from, *to;
} files;

static void copy_bytes(const char *from, const char *to, size_t size)
{
    unsigned char *data = malloc(size + 1);
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);

    TREE_MUST(data && in >= 0 && out >= 0 && read(in, data, size) == (ssize_t)size &&
              write(out, data, size) == (ssize_t)size);
    (void)close(in);
    (void)close(out);
    free(data);
}

static int copy_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    char to[4096];

    (void)ftw;
    (void)snprintf(to, sizeof to, "%s%s", files.to, path + strlen(files.from));
    if (kind == FTW_D) {
        TREE_MUST(mkdir(to, 0755) == 0 || errno == EEXIST);
        return 0;
    }
    TREE_MUST(kind == FTW_F && files.n < MOST_FILES);
    copy_bytes(path, to, (size_t)st->st_size);
    files.file[files.n++] =
        (struct file){strdup(to), (size_t)st->st_size, calloc(1, (size_t)st->st_size + 1)};
    return 0;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->path, ((const struct file *)b)->path);
}

static void copy_tree(const char *from, const char *to)
{
    files.n = 0;
    files.from = from;
    files.to = to;
    TREE_MUST(nftw(from, copy_one, 64, FTW_PHYS) == 0);
    qsort(files.file, files.n, sizeof *files.file, by_path);
}

static void forget_files(void)
{
    for (size_t i = 0; i < files.n; i++) {
        free(files.file[i].path);
        free(files.file[i].is_data);
    }
}

static void flip(const struct file *f, size_t at, unsigned bit)
{
    unsigned char byte;
    int fd = open(f->path, O_RDWR | O_CLOEXEC);

    TREE_MUST(fd >= 0 && pread(fd, &byte, 1, (off_t)at) == 1);
    byte ^= (unsigned char)(1u << bit);
    TREE_MUST(pwrite(fd, &byte, 1, (off_t)at) == 1);
    (void)close(fd);
}

/* ---- what is in it ---- */

struct content {
    struct ckpt_view *view;
    size_t n;
    unsigned char **data; /* per tensor */
};

static void content_release(struct content *c)
{
    for (size_t i = 0; c->data && i < c->n; i++)
        free(c->data[i]);
    free(c->data);
    ckpt_view_release(c->view);
    *c = (struct content){0};
}

static int read_content(const char *path, const struct ckpt_options *opt, struct content *c,
                        struct ckpt_err *err)
{
    struct ckpt_run *run;

    *c = (struct content){0};
    if (ckpt_run_open(path, opt, &run, err) < 0)
        return -1;
    int rc = ckpt_run_view(run, NULL, &c->view, err);
    ckpt_run_close(run);
    if (rc < 0)
        return -1;
    c->n = ckpt_view_tensors(c->view);
    c->data = calloc(c->n + 1, sizeof *c->data);
    for (size_t i = 0; i < c->n && rc == 0; i++) {
        struct ckpt_tensor_info t = {.size = sizeof t};
        (void)ckpt_view_tensor(c->view, i, &t, NULL);
        c->data[i] = malloc(t.nbytes + 1);
        rc = ckpt_view_tensor_pread(c->view, i, c->data[i], t.nbytes, 0, err);
    }
    if (rc < 0)
        content_release(c);
    return rc;
}

/* Bytes that elements lie in. */
static void mark_piece(const struct ckpt_catalog *cat, const struct ckpt_piece *p, size_t esize)
{
    char *name = ckpt_source_name(cat->sources.ptr[p->source]);
    struct file *f = NULL;

    for (size_t i = 0; i < files.n && name; i++)
        if (strcmp(files.file[i].path, name) == 0)
            f = &files.file[i];
    TREE_MUST(f);
    free(name);
    for (uint64_t k = 0; k < ckpt_piece_numel(p); k++) {
        uint64_t at = p->src, rest = k;
        for (uint32_t a = p->naxis; a-- > 0;) {
            at += rest % p->axis[a].n * p->axis[a].src;
            rest /= p->axis[a].n;
        }
        memset(f->is_data + at, 1, esize);
    }
}

static void mark_data(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        for (size_t k = 0; k < t->npiece; k++)
            mark_piece(cat, &t->piece[k], ckpt_dtype_size(t->dtype));
    }
}

static bool differ_in_a_bit(const char *a, const char *b)
{
    unsigned n = 0;

    if (strlen(a) != strlen(b))
        return false;
    for (; *a; a++, b++)
        n += (unsigned)__builtin_popcount((unsigned char)(*a ^ *b));
    return n == 1;
}

/* Are the dtypes equal? Or is one a word in which the bit makes no dtype that is known, so that the
 * same bytes are shown with a warning, and nobody reads them as numbers? */
static bool same_dtype(const struct ckpt_tensor_info *was, const struct ckpt_tensor_info *is)
{
    enum ckpt_dtype known;

    return strcmp(was->dtype, is->dtype) == 0 ||
           (differ_in_a_bit(was->dtype, is->dtype) &&
            !ckpt_dtype_parse(is->dtype, strlen(is->dtype), &known));
}

static bool same_tensor(const struct content *a, size_t i, const struct content *b, size_t k)
{
    struct ckpt_tensor_info s = {.size = sizeof s}, t = {.size = sizeof t};

    (void)ckpt_view_tensor(a->view, i, &s, NULL);
    (void)ckpt_view_tensor(b->view, k, &t, NULL);
    return s.rank == t.rank && same_dtype(&s, &t) && s.nbytes == t.nbytes &&
           memcmp(s.shape, t.shape, s.rank * sizeof *s.shape) == 0 &&
           memcmp(a->data[i], b->data[k], s.nbytes) == 0;
}

static const char *name_of(const struct content *c, size_t i)
{
    struct ckpt_tensor_info t = {.size = sizeof t};

    (void)ckpt_view_tensor(c->view, i, &t, NULL);
    return t.name;
}

/* Every tensor of `was` is in `is`, by its name or, once, by another one; NULL, or what differs. */
static const char *difference(const struct content *was, const struct content *is, char text[256])
{
    size_t renamed = 0;

    if (was->n != is->n) {
        (void)snprintf(text, 256, "%zu tensors instead of %zu", is->n, was->n);
        return text;
    }
    for (size_t i = 0; i < was->n; i++) {
        size_t k, old;
        bool found = ckpt_view_find_tensor(is->view, name_of(was, i), &k);
        for (size_t j = 0; j < is->n && !found; j++)
            if (differ_in_a_bit(name_of(was, i), name_of(is, j)) &&
                !ckpt_view_find_tensor(was->view, name_of(is, j), &old) && renamed++ == 0) {
                found = true;
                k = j;
            }
        if (!found || !same_tensor(was, i, is, k)) {
            (void)snprintf(text, 256, "'%.200s' %s", name_of(was, i),
                           found ? "differs" : "is gone");
            return text;
        }
    }
    return NULL;
}

/* ---- flips ---- */

static uint64_t header_bits(void)
{
    uint64_t n = 0;

    for (size_t i = 0; i < files.n; i++)
        for (size_t k = 0; k < files.file[i].size; k++)
            n += files.file[i].is_data[k] ? 0 : 8;
    return n;
}

/* The n-th bit of the headers. */
static const struct file *find_bit(uint64_t n, size_t *ret_at, unsigned *ret_bit)
{
    for (size_t i = 0; i < files.n; i++)
        for (size_t k = 0; k < files.file[i].size; k++) {
            if (files.file[i].is_data[k])
                continue;
            if (n < 8) {
                *ret_at = k;
                *ret_bit = (unsigned)n;
                return &files.file[i];
            }
            n -= 8;
        }
    return NULL;
}

struct count {
    unsigned same, refused, wrong;
};

static void try_flip(const char *path, const struct ckpt_options *opt, const struct content *was,
                     uint64_t bit_number, struct count *count)
{
    struct ckpt_err err = {0};
    struct content is;
    char text[256];
    unsigned bit = 0;
    size_t at = 0;
    const struct file *f = find_bit(bit_number, &at, &bit);

    flip(f, at, bit);
    if (read_content(path, opt, &is, &err) < 0) {
        count->refused++;
        if (!err.text[0]) {
            (void)fprintf(stderr, "%s byte %zu bit %u: an error without a text\n", f->path, at,
                          bit);
            count->wrong++;
        }
    } else {
        const char *why = difference(was, &is, text);
        count->same += why == NULL;
        count->wrong += why != NULL;
        if (why)
            (void)fprintf(stderr, "%s byte %zu bit %u: %s\n", f->path, at, bit, why);
        content_release(&is);
    }
    flip(f, at, bit);
}

static uint64_t flips_wanted(void)
{
    const char *text = getenv("CKPTFS_FLIPS");

    const uint64_t n = SANITIZED ? FLIPS_SANITIZED : FLIPS;
    return !text ? n : strcmp(text, "all") == 0 ? UINT64_MAX : strtoull(text, NULL, 10);
}

static bool check(const char *name)
{
    const char *source = *name == '/' ? "" : getenv("CKPTFS_SOURCE"), *seed = getenv("CKPTFS_SEED");
    struct ckpt_options *opt;
    struct ckpt_err err = {0};
    struct count count = {0};
    struct content was;
    struct tree t;
    char from[4096];

    tree_open(&t);
    (void)snprintf(from, sizeof from, "%s%s%s", source ? source : ".",
                   *name == '/' ? "" : "/tests/golden/", name);
    copy_tree(from, t.path);
    TREE_MUST(ckpt_options_new(&opt, &err) == 0 && ckpt_options_set(opt, "view", "raw", &err) == 0);
    if (read_content(t.path, opt, &was, &err) < 0) {
        (void)fprintf(stderr, "%s: %s\n", name, err.text);
        exit(1);
    }
    mark_data(was.view->cat);
    const uint64_t total = header_bits(), wanted = flips_wanted();
    const uint64_t n = wanted < total ? wanted : total;
    const uint64_t first = seed ? strtoull(seed, NULL, 10) : 0;
    for (uint64_t i = 0; i < n; i++)
        try_flip(t.path, opt, &was, (i * total / n + first) % total, &count);
    (void)printf("%s: %" PRIu64 " of %" PRIu64 " flips: %u the same, %u refused, %u wrong\n", name,
                 n, total, count.same, count.refused, count.wrong);
    (void)fflush(stdout);
    content_release(&was);
    ckpt_options_free(opt);
    forget_files();
    tree_close(&t);
    return count.wrong == 0 && count.refused > 0;
}

int main(int argc, char **argv)
{
    static const char *const runs[] = {
        "dcp/pickle_proto5_2r/run",
        "dcp/strides_1r/run",
        "dcp/st_format_2r/run",
        "dcp/torch22_fsdp1_4r/run",
        "dcp/torch214_fsdp1_4r/run",
        "dcp/hf_sharded_scalars_ints_4r/run",
        "megatron/l12_tp2pp2",
        "megatron/d15_tp2pp2",
        "megatron/z12_tp2pp2",
        "megatron/n16_llama_tp2/run",
        "nanotron/llama_tp2_pp2_tied",
        "nanotron/llama_tp2_pp2_tied.expected",
        "accelerate/fsdp2_rankbin_llama_w2/run",
    };
    int failed = 0, run = 0;

    if (argc > 1 && *argv[1] == '/') /* one by its path */
        return !check(argv[1]);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        if (argc > 1 && !strstr(runs[i], argv[1]))
            continue;
        run++;
        failed += !check(runs[i]);
    }
    (void)printf("%d checkpoints, %d failed\n", run, failed);
    return failed || run == 0;
}

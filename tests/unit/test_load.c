/* SPDX-License-Identifier: Apache-2.0 */
/* The loader's interface: wants of trainers in their own names, destinations, waiting, cancelling,
 * and what is refused. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include <ckptfs/load.h>

#include "test.h"
#include "tree.h"

enum { HIDDEN = 32 };

static struct ckpt_view *open_view(const char *name, const char *mode)
{
    struct ckpt_options *opt;
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};
    char path[4096];
    const char *source = getenv("CKPTFS_SOURCE");

    (void)snprintf(path, sizeof path, "%s/tests/golden/%s", source ? source : ".", name);
    if (ckpt_options_new(&opt, &err) < 0 || ckpt_options_set(opt, "view", mode, &err) < 0 ||
        ckpt_run_open(path, opt, &run, &err) < 0 || ckpt_run_view(run, NULL, &view, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_run_close(run);
    ckpt_options_free(opt);
    return view;
}

static struct ckpt_view *open_raw(const char *name) { return open_view(name, "raw"); }

static unsigned char *whole(struct ckpt_view *view, const char *name, struct ckpt_tensor_info *t)
{
    struct ckpt_err err = {0};
    unsigned char *data;
    size_t i;

    if (!ckpt_view_find_tensor(view, name, &i))
        fail_msg("no tensor %s", name);
    (void)ckpt_view_tensor(view, i, t, NULL);
    data = malloc(t->nbytes);
    if (ckpt_view_tensor_pread(view, i, data, t->nbytes, 0, &err) < 0)
        fail_msg("%s", err.text);
    return data;
}

static void run(struct ckpt_load *load)
{
    struct ckpt_err err = {0};

    if (ckpt_load_plan(load, &err) < 0 || ckpt_load_start(load, &err) < 0 ||
        ckpt_load_wait(load, UINT32_MAX, &err) != 0)
        fail_msg("%s", err.text);
}

/* nanotron's parameter of rank 1 of 4 is several slice pairs of the global one: its query heads,
 * its key head and its value head, one below the other. */
TEST(load, nanotron_parameter_of_several_slice_pairs)
{
    static const char name[] = "model.decoder.0.pp_block.attn.qkv_proj.weight";
    struct ckpt_view *view = open_raw("nanotron/llama_tp2_pp2_tied");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct ckpt_tensor_info t = {.size = sizeof t};
    unsigned char *data = whole(view, name, &t), *local;
    const uint64_t rows = t.shape[0], part = rows / 8, row = HIDDEN * 2;
    const struct {
        uint64_t global, local, n;
    } pair[3] = {
        {part, 0, part}, {4 * part, part, part / 2}, {6 * part, part + part / 2, part / 2}};

    CHECK_EQ(t.shape[1], HIDDEN);
    local = calloc(2 * part, row);
    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
    for (int i = 0; i < 3; i++) {
        const uint64_t lo[2] = {pair[i].global, 0}, n[2] = {pair[i].n, HIDDEN};
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = local + pair[i].local * row};
        CHECK_OK(ckpt_load_want(load, name, lo, n, &dest, NULL, &err));
    }
    run(load);
    for (int i = 0; i < 3; i++)
        CHECK(memcmp(local + pair[i].local * row, data + pair[i].global * row, pair[i].n * row) ==
              0);
    ckpt_load_free(load);
    ckpt_comm_free(comm);
    free(local);
    free(data);
    ckpt_view_release(view);
}

/* Megatron's ShardedTensor: key, global offset, local shape; the layer is the first dimension. */
TEST(load, megatron_key_and_global_offset)
{
    static const char key[] = "decoder.layers.self_attention.linear_qkv.weight";
    struct ckpt_view *view = open_raw("megatron/d15_tp2pp2");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct ckpt_tensor_info t = {.size = sizeof t};
    unsigned char *data = whole(view, key, &t);
    const uint64_t offset[3] = {2, 8, 0}, shape[3] = {1, 8, t.shape[2]};
    const uint64_t unit = t.shape[2] * 2;
    float *local = calloc(8 * t.shape[2], sizeof *local);
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = local, .dtype = "float32"};

    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
    CHECK_OK(ckpt_load_want(load, key, offset, shape, &dest, NULL, &err));
    run(load);
    for (uint64_t i = 0; i < 8 * t.shape[2]; i++) { /* bf16 is the upper half of a float */
        uint32_t is;
        uint16_t stored;
        memcpy(&is, &local[i], sizeof is);
        memcpy(&stored, data + (2 * t.shape[1] + 8) * unit + i * 2, sizeof stored);
        CHECK_EQ(is, (uint32_t)stored << 16);
    }
    ckpt_load_free(load);
    ckpt_comm_free(comm);
    free(local);
    free(data);
    ckpt_view_release(view);
}

TEST(load, wants_that_can_not_be)
{
    static const char name[] = "model.decoder.0.pp_block.attn.o_proj.weight";
    struct ckpt_view *view = open_raw("nanotron/llama_tp2_pp2_tied");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct ckpt_load_options opt = {.size = 3};
    const uint64_t lo[2] = {30, 0}, n[2] = {3, HIDDEN};
    const uint32_t two = 2, one = 1, seven = 7;
    const double bad_rate[] = {INFINITY, -1, 1e-310, NAN};
    const struct ckpt_placement shard = {CKPT_SHARD, 5};
    const size_t size = sizeof(struct ckpt_mesh);
    const struct ckpt_mesh large = {size, 1, &two, NULL}, small = {size, 1, &one, NULL},
                           strange = {size, 1, &one, &seven}, none = {0, 1, &one, NULL};
    struct ckpt_dest dest = {.size = sizeof dest, .dtype = "int8"};
    char *text = NULL;
    size_t want;

    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_FAILS(ckpt_load_new(view, comm, &opt, &load, &err), CKPT_USAGE, "has");
    memset(&err, 0, sizeof err);
    opt.size = offsetof(struct ckpt_load_options, rates);
    CHECK_OK(ckpt_load_model(view, "dp=1", 1, 1, 0, NULL, &opt, &text, &err));
    free(text);
    opt = (struct ckpt_load_options){.size = sizeof opt, .readers = 17};
    CHECK_FAILS(ckpt_load_model(view, "dp=1", 1, 1, 0, NULL, &opt, &text, &err), CKPT_USAGE,
                "readers is 17");
    memset(&err, 0, sizeof err);
    opt = (struct ckpt_load_options){.size = sizeof opt, .share = 1};
    CHECK_FAILS(ckpt_load_model(view, "dp=1", 1, 1, 0, NULL, &opt, &text, &err), CKPT_USAGE,
                "share_ranks");
    memset(&err, 0, sizeof err);
    for (size_t i = 0; i < sizeof bad_rate / sizeof *bad_rate; i++) {
        opt = (struct ckpt_load_options){.size = sizeof opt, .rates = {.copy = bad_rate[i]}};
        CHECK_FAILS(ckpt_load_model(view, "dp=1", 1, 1, 0, NULL, &opt, &text, &err), CKPT_USAGE,
                    "bytes a second");
        memset(&err, 0, sizeof err);
    }
    CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
    CHECK_FAILS(ckpt_load_want(load, "no", NULL, NULL, NULL, NULL, &err), CKPT_MISSING, "'no'");
    CHECK_FAILS(ckpt_load_want(load, name, lo, n, NULL, NULL, &err), CKPT_USAGE, "outside");
    CHECK_FAILS(ckpt_load_want(load, name, NULL, NULL, &dest, NULL, &err), CKPT_USAGE, "no cast");
    dest.dtype = "float99";
    CHECK_FAILS(ckpt_load_want(load, name, NULL, NULL, &dest, NULL, &err), CKPT_USAGE, "float99");
    CHECK_FAILS(ckpt_load_want_part(load, name, NULL, NULL, &large, &shard, NULL, NULL, &err),
                CKPT_USAGE, "mesh");
    CHECK_FAILS(ckpt_load_want_part(load, name, NULL, NULL, &strange, &shard, NULL, NULL, &err),
                CKPT_USAGE, "rank 7");
    CHECK_FAILS(ckpt_load_want_part(load, name, NULL, NULL, &small, &shard, NULL, NULL, &err),
                CKPT_USAGE, "no dimension 5");
    CHECK_FAILS(ckpt_load_want_part(load, name, NULL, NULL, &none, &shard, NULL, NULL, &err),
                CKPT_USAGE, "struct ckpt_mesh has");
    dest = (struct ckpt_dest){.size = sizeof dest + 8};
    CHECK_FAILS(ckpt_load_want(load, name, NULL, NULL, &dest, NULL, &err), CKPT_USAGE,
                "struct ckpt_dest has");
    CHECK_FAILS(ckpt_load_start(load, &err), CKPT_USAGE, "before each start");
    CHECK_FAILS(ckpt_load_wait(load, 0, &err), CKPT_USAGE, "not started");
    CHECK_FAILS(ckpt_load_want_layout(load, "tp=2", &err), CKPT_USAGE, "2 ranks");
    CHECK_FAILS(ckpt_load_want_layout(load, "tq=1", &err), CKPT_USAGE, "expected tp=N");
    memset(&err, 0, sizeof err);
    CHECK_EQ(ckpt_load_wants(load), 0);
    CHECK_OK(ckpt_load_want(load, name, NULL, NULL, NULL, &want, &err));
    CHECK_EQ(want, 0);
    CHECK_OK(ckpt_load_plan(load, &err));
    CHECK_FAILS(ckpt_load_plan(load, &err), CKPT_USAGE, "once");
    CHECK_FAILS(ckpt_load_want(load, name, NULL, NULL, NULL, NULL, &err), CKPT_USAGE, "no more");
    CHECK_FAILS(ckpt_load_start(load, &err), CKPT_USAGE, "has no destination");
    ckpt_load_free(load);
    ckpt_comm_free(comm);
    ckpt_view_release(view);
}

/* Ranks that differ in tp are neighbours; there are 4 layers, 4 heads and 2 key heads of 8. */
TEST(load, layouts_follow_the_marks_of_the_model_file)
{
    static const struct {
        const char *layout, *tensor;
        uint32_t ranks, rank;
        bool wanted;
        uint64_t lo[2], n[2];
    } expect[] = {
        {"tp=2,pp=2", "model.embed_tokens.weight", 4, 1, true, {64, 0}, {64, 32}},
        {"tp=2,pp=2", "model.layers.0.self_attn.o_proj.weight", 4, 1, true, {0, 16}, {32, 16}},
        {"tp=2,pp=2", "model.layers.2.self_attn.o_proj.weight", 4, 1, false, {0, 0}, {0, 0}},
        {"tp=2,pp=2", "model.layers.3.mlp.up_proj.weight", 4, 2, true, {0, 0}, {32, 32}},
        {"tp=2,pp=2", "model.embed_tokens.weight", 4, 3, true, {64, 0}, {64, 32}}, /* tied */
        {"tp=2,pp=2", "model.norm.weight", 4, 0, false, {0, 0}, {0, 0}},
        {"tp=4", "model.layers.1.self_attn.q_proj.weight", 4, 3, true, {24, 0}, {8, 32}},
        {"tp=4", "model.layers.1.self_attn.k_proj.weight", 4, 1, true, {0, 0}, {8, 32}},
        {"tp=4", "model.layers.1.self_attn.k_proj.weight", 4, 2, true, {8, 0}, {8, 32}},
        {"tp=2,fsdp=2", "model.layers.1.self_attn.q_proj.weight", 4, 3, true, {24, 0}, {8, 32}},
        {"fsdp=3", "model.layers.1.self_attn.q_proj.weight", 3, 2, true, {22, 0}, {10, 32}},
        {"dp=2", "model.layers.1.self_attn.q_proj.weight", 2, 1, true, {0, 0}, {32, 32}},
    };
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied", "hf");

    for (size_t i = 0; i < sizeof expect / sizeof *expect; i++) {
        struct ckpt_err err = {0};
        struct ckpt_comm *comm[8];
        struct ckpt_load *load;
        bool found = false;
        CHECK_OK(ckpt_comm_threads(expect[i].ranks, comm, &err));
        CHECK_OK(ckpt_load_new(view, comm[expect[i].rank], NULL, &load, &err));
        CHECK_OK(ckpt_load_want_layout(load, expect[i].layout, &err));
        for (size_t w = 0; w < ckpt_load_wants(load); w++) {
            struct ckpt_want_info info = {.size = sizeof info};
            (void)ckpt_load_want_info(load, w, &info, NULL);
            if (strcmp(info.tensor, expect[i].tensor) != 0)
                continue;
            found = true;
            for (uint32_t d = 0; d < info.rank; d++) {
                CHECK_EQ(info.lo[d], expect[i].lo[d]);
                CHECK_EQ(info.n[d], expect[i].n[d]);
            }
        }
        CHECK_EQ(found, expect[i].wanted);
        ckpt_load_free(load);
        for (uint32_t r = 0; r < expect[i].ranks; r++)
            ckpt_comm_free(comm[r]);
    }
    struct ckpt_comm *comm[8];
    struct ckpt_load *load;
    struct ckpt_err err = {0};
    CHECK_OK(ckpt_comm_threads(3, comm, &err));
    CHECK_OK(ckpt_load_new(view, comm[0], NULL, &load, &err));
    CHECK_FAILS(ckpt_load_want_layout(load, "tp=3", &err), CKPT_USAGE,
                "heads, which is no multiple");
    ckpt_load_free(load);
    for (uint32_t r = 0; r < 3; r++)
        ckpt_comm_free(comm[r]);
    ckpt_view_release(view);
}

/* Whatever the moment, it ends, and nothing is written afterwards. */
TEST(load, cancelled_at_any_moment)
{
    struct ckpt_view *view = open_raw("nanotron/llama_tp2_pp2_tied");
    const size_t n = ckpt_view_tensors(view);
    unsigned char **mem = calloc(n, sizeof *mem);

    for (int round = 0; round < 50; round++) {
        struct ckpt_err err = {0};
        struct ckpt_comm *comm;
        struct ckpt_load *load;
        CHECK_OK(ckpt_comm_self(&comm, &err));
        CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
        for (size_t i = 0; i < n; i++) {
            struct ckpt_tensor_info t = {.size = sizeof t};
            (void)ckpt_view_tensor(view, i, &t, NULL);
            mem[i] = malloc(t.nbytes + 1);
            const struct ckpt_dest dest = {.size = sizeof dest, .ptr = mem[i]};
            CHECK_OK(ckpt_load_want(load, t.name, NULL, NULL, &dest, NULL, &err));
        }
        CHECK_OK(ckpt_load_plan(load, &err));
        CHECK_OK(ckpt_load_start(load, &err));
        for (int spin = 0; spin < round * 2000; spin++)
            __asm__ volatile("");
        if (round % 2) {
            ckpt_load_cancel(load);
            int rc = ckpt_load_wait(load, UINT32_MAX, &err);
            CHECK(rc == 0 || (rc == -1 && err.code == CKPT_CANCELLED));
        }
        ckpt_load_free(load);
        ckpt_comm_free(comm);
        for (size_t i = 0; i < n; i++)
            free(mem[i]); /* a late write would be seen by the sanitizers */
    }
    free(mem);
    ckpt_view_release(view);
}

/* One of three ranks, whose want may have no destination. */
struct starter {
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    bool forgetful;
    int rc;
    struct ckpt_err err;
};

static void *start_rank(void *arg)
{
    struct starter *s = arg;
    struct ckpt_tensor_info t = {.size = sizeof t};
    struct ckpt_load *load = NULL;

    (void)ckpt_view_tensor(s->view, 0, &t, NULL);
    unsigned char *mem = malloc(t.nbytes);
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = s->forgetful ? NULL : mem};
    s->rc = ckpt_load_new(s->view, s->comm, NULL, &load, &s->err);
    if (s->rc == 0)
        s->rc = ckpt_load_want(load, t.name, NULL, NULL, &dest, NULL, &s->err);
    if (s->rc == 0)
        s->rc = ckpt_load_plan(load, &s->err);
    if (s->rc == 0)
        s->rc = ckpt_load_start(load, &s->err);
    if (s->rc == 0)
        s->rc = ckpt_load_wait(load, UINT32_MAX, &s->err);
    ckpt_load_free(load);
    free(mem);
    return NULL;
}

TEST(load, that_can_not_start_on_one_rank_fails_on_all)
{
    struct ckpt_view *view = open_raw("nanotron/llama_tp2_pp2_tied");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm[3];
    pthread_t thread[3];

    CHECK_OK(ckpt_comm_threads(3, comm, &err));
    for (int round = 0; round < 3; round++) { /* and then it works again */
        struct starter s[3];
        for (int r = 0; r < 3; r++) {
            s[r] = (struct starter){.view = view, .comm = comm[r], .forgetful = r == round};
            s[r].forgetful &= round < 2;
            CHECK_EQ(pthread_create(&thread[r], NULL, start_rank, &s[r]), 0);
        }
        for (int r = 0; r < 3; r++)
            CHECK_EQ(pthread_join(thread[r], NULL), 0);
        for (int r = 0; r < 3; r++) {
            char who[32];
            (void)snprintf(who, sizeof who, "rank %d: want 0", round);
            CHECK_EQ(s[r].rc, round < 2 ? -1 : 0);
            CHECK(round == 2 || (s[r].err.code == CKPT_USAGE && strstr(s[r].err.text, who)));
        }
    }
    for (int r = 0; r < 3; r++)
        ckpt_comm_free(comm[r]);
    ckpt_view_release(view);
}

/* The first tensors of the layout are wanted before the one is found that can't be divided. */
TEST(load, a_layout_that_fails_half_way_leaves_no_wants)
{
    static const char name[] = "model.layers.1.self_attn.q_proj.weight";
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied", "hf");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm[3];
    struct ckpt_load *load;
    struct ckpt_want_info info = {.size = sizeof info};
    struct ckpt_tensor_info t = {.size = sizeof t};
    unsigned char *data = whole(view, name, &t), *mem = malloc(t.nbytes);
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = mem};
    size_t want;

    CHECK_OK(ckpt_comm_threads(3, comm, &err));
    CHECK_OK(ckpt_load_new(view, comm[0], NULL, &load, &err));
    CHECK_FAILS(ckpt_load_want_layout(load, "tp=3", &err), CKPT_USAGE, "no multiple");
    memset(&err, 0, sizeof err);
    CHECK_EQ(ckpt_load_wants(load), 0);
    (void)ckpt_load_want_info(load, 0, &info, NULL);
    CHECK(info.tensor == NULL && info.dtype == NULL && info.nbytes == 0);
    CHECK_OK(ckpt_load_want(load, name, NULL, NULL, &dest, &want, &err));
    CHECK_EQ(want, 0);
    (void)ckpt_load_want_info(load, want, &info, NULL);
    CHECK_STR(info.tensor, name);
    CHECK_EQ(info.nbytes, t.nbytes);
    ckpt_load_free(load);
    CHECK_OK(ckpt_load_new(view, comm[0], NULL, &load, &err));
    CHECK_FAILS(ckpt_load_want_layout(load, "tp=3", &err), CKPT_USAGE, "no multiple");
    memset(&err, 0, sizeof err);
    CHECK_OK(
        ckpt_load_want_layout(load, "fsdp=3", &err)); /* and another one is all that is wanted */
    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        (void)ckpt_load_want_info(load, i, &info, NULL);
        CHECK(strcmp(info.tensor, name) != 0 || info.n[0] == (t.shape[0] + 2) / 3);
    }
    ckpt_load_free(load);
    for (uint32_t r = 0; r < 3; r++)
        ckpt_comm_free(comm[r]);
    free(mem);
    free(data);
    ckpt_view_release(view);
}

/* ---- a system that starts no more threads ---- */

int __real_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *arg);
static bool refuse_threads;
static int allowed_threads; /* before it refuses */

int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    if (refuse_threads && allowed_threads-- <= 0)
        return EAGAIN;
    return __real_pthread_create(id, attr, fn, arg);
}

TEST(load, that_failed_to_start_is_not_started_again)
{
    struct ckpt_view *view = open_raw("nanotron/llama_tp2_pp2_tied");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_tensor_info t = {.size = sizeof t};

    (void)ckpt_view_tensor(view, 0, &t, NULL);
    unsigned char *mem = malloc(t.nbytes);
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = mem};
    const struct ckpt_load_options opt = {.size = sizeof opt, .threads = 2};
    CHECK_OK(ckpt_comm_self(&comm, &err));
    for (int i = 0; i < 400; i++) {
        const int allowed = i % 2 * 2; /* no worker; workers, but no pump */
        struct ckpt_load *load;
        CHECK_OK(ckpt_load_new(view, comm, &opt, &load, &err));
        CHECK_OK(ckpt_load_want(load, t.name, NULL, NULL, &dest, NULL, &err));
        CHECK_OK(ckpt_load_plan(load, &err));
        refuse_threads = true;
        allowed_threads = allowed;
        CHECK_FAILS(ckpt_load_start(load, &err), CKPT_NOMEM, "no thread");
        refuse_threads = false;
        CHECK_FAILS(ckpt_load_start(load, &err), CKPT_USAGE, "make a new one");
        CHECK_FAILS(ckpt_load_wait(load, 0, &err), CKPT_USAGE, "not started");
        memset(mem, 0xee, t.nbytes); /* no worker writes there any more */
        ckpt_load_free(load);
        memset(&err, 0, sizeof err);
    }
    struct ckpt_load *load; /* the comm is still good */
    CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
    CHECK_OK(ckpt_load_want(load, t.name, NULL, NULL, &dest, NULL, &err));
    run(load);
    ckpt_load_free(load);
    ckpt_comm_free(comm);
    free(mem);
    ckpt_view_release(view);
}

/* A load that reads from open descriptors what another save has replaced has bytes of the old save;
 * of its other files nobody can tell. */
TEST(load, fails_if_a_file_that_it_read_was_saved_again)
{
    struct ckpt_options *opt;
    struct ckpt_err err = {0};
    struct ckpt_run *steps;
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct tree t;

    tree_open(&t);
    nt_checkpoint(&t, "10/");
    CHECK_OK(ckpt_options_new(&opt, &err));
    CHECK_OK(ckpt_options_set(opt, "view", "raw", &err));
    CHECK_OK(ckpt_run_open(t.path, opt, &steps, &err));
    CHECK_OK(ckpt_run_view(steps, NULL, &view, &err));
    CHECK_OK(ckpt_comm_self(&comm, &err));
    for (int changed = 0; changed < 3; changed++) {
        unsigned char data[16];
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = data};
        const char *name = changed == 1 ? "10/model/model/rows/model_weight_pp-rank-0-of-1_tp-rank-"
                                          "0-of-2.safetensors"
                                        : "10/model/model/norm/model_weight.safetensors";
        if (changed) { /* of 1 it reads nothing */
            tree_text(&t, "10/new", "another save");
            TREE_MUST(renameat(t.fd, "10/new", t.fd, name) == 0);
        }
        CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
        CHECK_OK(ckpt_load_want(load, "model.norm.weight", NULL, NULL, &dest, NULL, &err));
        CHECK_OK(ckpt_load_plan(load, &err));
        CHECK_OK(ckpt_load_start(load, &err));
        if (changed < 2)
            CHECK_OK(ckpt_load_wait(load, UINT32_MAX, &err));
        else
            CHECK_FAILS(ckpt_load_wait(load, UINT32_MAX, &err), CKPT_STALE,
                        "norm/model_weight.safetensors' changed");
        ckpt_load_free(load);
    }
    ckpt_comm_free(comm);
    ckpt_view_release(view);
    ckpt_run_close(steps);
    ckpt_options_free(opt);
    tree_close(&t);
}

TEST(load, a_struct_whose_size_is_not_set_is_named)
{
    static const char name[] = "model.norm.weight";
    struct ckpt_view *view = open_view("nanotron/llama_tp2_pp2_tied", "hf");
    const struct ckpt_load_options options = {0};
    const struct ckpt_mesh mesh = {0};
    const struct ckpt_dest dest = {0}, good = {.size = sizeof good};
    struct ckpt_load_stats stats = {0};
    struct ckpt_want_info info = {0};
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    size_t want;

    CHECK_OK(ckpt_comm_self(&comm, &err));
    CHECK_FAILS(ckpt_load_new(view, comm, &options, &load, &err), CKPT_USAGE,
                "struct ckpt_load_options has size 0");
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_load_new(view, comm, NULL, &load, &err));
    CHECK_FAILS(ckpt_load_want(load, name, NULL, NULL, &dest, &want, &err), CKPT_USAGE,
                "struct ckpt_dest has size 0");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_load_want_part(load, name, NULL, NULL, &mesh, NULL, &good, &want, &err),
                CKPT_USAGE, "struct ckpt_mesh has size 0");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_load_want_info(load, 0, &info, &err), CKPT_USAGE,
                "struct ckpt_want_info has size 0");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_load_stats(load, &stats, NULL, &err), CKPT_USAGE,
                "struct ckpt_load_stats has size 0");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_load_stats(load, NULL, &stats, &err), CKPT_USAGE,
                "struct ckpt_load_stats has size 0");
    ckpt_load_free(load);
    ckpt_comm_free(comm);
    ckpt_view_release(view);
}

TESTS(T(load, a_struct_whose_size_is_not_set_is_named),
      T(load, a_layout_that_fails_half_way_leaves_no_wants),
      T(load, that_failed_to_start_is_not_started_again),
      T(load, layouts_follow_the_marks_of_the_model_file),
      T(load, nanotron_parameter_of_several_slice_pairs), T(load, megatron_key_and_global_offset),
      T(load, wants_that_can_not_be), T(load, cancelled_at_any_moment),
      T(load, that_can_not_start_on_one_rank_fails_on_all),
      T(load, fails_if_a_file_that_it_read_was_saved_again))

/* SPDX-License-Identifier: Apache-2.0 */
/* Two ranks agree on a load and run it, while control messages between them are spoilt. Whatever
 * they say, both come to an end, soon as the deadlines are short, and destinations are good if a
 * load is. If nothing is spoilt both loads are good, however slow the machine is.
 *
 * Input: patches (which message u8, offset u16, value u8); offset 0xffff cuts it short at `value`
 * bytes, 0xfffe loses it. */
#include "fuzz.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include <ckptfs/load.h>

#include "comm/comm.h"

enum { RANKS = 2, MOST_PATCHES = 8, DEADLINE_MS = 60, PATIENCE_MS = 60000 };

static struct {
    struct {
        uint8_t message, value;
        uint16_t off;
    } patch[MOST_PATCHES];
    unsigned n;
    atomic_uint message;
} spoil;

/* A transport around another one. */
struct between {
    struct ckpt_xport x;
    struct ckpt_xport *in;
};

static struct ckpt_xport *in(struct ckpt_xport *x) { return ((struct between *)x)->in; }

static int between_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    return in(x)->ops->post(in(x), t, err);
}

static int between_progress(struct ckpt_xport *x, bool *moved, struct ckpt_err *err)
{
    return in(x)->ops->progress(in(x), moved, err);
}

static void between_fetched(struct ckpt_xport *x, const struct ckpt_xfer *t)
{
    in(x)->ops->fetched(in(x), t);
}

static void between_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    in(x)->ops->wait(in(x), timeout_ms < DEADLINE_MS / 4 ? timeout_ms : DEADLINE_MS / 4);
}

static void between_kick(struct ckpt_xport *x) { in(x)->ops->kick(in(x)); }

static int between_send(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                        struct ckpt_err *err)
{
    const unsigned number = atomic_fetch_add(&spoil.message, 1);
    unsigned char *own = malloc(len + 1);
    bool lost = false;
    int rc = 0;

    MUST(own);
    memcpy(own, msg, len);
    for (unsigned i = 0; i < spoil.n; i++) {
        if (spoil.patch[i].message != number)
            continue;
        if (spoil.patch[i].off == 0xfffe)
            lost = true;
        else if (spoil.patch[i].off == 0xffff)
            len = spoil.patch[i].value < len ? spoil.patch[i].value : len;
        else if (spoil.patch[i].off < len)
            own[spoil.patch[i].off] = spoil.patch[i].value;
    }
    if (!lost)
        rc = in(x)->ops->ctl_send(in(x), peer, own, len, err);
    free(own);
    return rc;
}

static int between_recv(struct ckpt_xport *x, struct ckpt_ctl_message **ret, struct ckpt_err *err)
{
    return in(x)->ops->ctl_recv(in(x), ret, err);
}

static bool between_gone(struct ckpt_xport *x, uint32_t peer)
{
    return in(x)->ops->gone && in(x)->ops->gone(in(x), peer);
}

static bool between_cancel(struct ckpt_xport *x) { return in(x)->ops->cancel(in(x)); }

static void between_free(struct ckpt_xport *x)
{
    in(x)->ops->free(in(x));
    free(x);
}

static struct ckpt_xport_ops between_ops = {
    .name = "between",
    .post = between_post,
    .progress = between_progress,
    .wait = between_wait,
    .kick = between_kick,
    .ctl_send = between_send,
    .ctl_recv = between_recv,
    .gone = between_gone,
    .cancel = between_cancel,
    .free = between_free,
};

/* ---- the ranks ---- */

struct rank {
    struct ckpt_comm *comm;
    struct ckpt_view *view;
    uint32_t number;
    int rc;
};

static int load_box(struct rank *r, struct ckpt_load *load, unsigned char *got)
{
    const uint64_t lo[2] = {r->number * 3, 0}, n[2] = {5, 8};
    const struct ckpt_dest dest = {.size = sizeof dest, .ptr = got};
    struct ckpt_err err = {0};
    int rc = ckpt_load_want(load, "w", lo, n, &dest, NULL, &err);

    if (rc == 0)
        rc = ckpt_load_plan(load, &err);
    if (rc == 0)
        rc = ckpt_load_start(load, &err);
    if (rc == 0)
        rc = ckpt_load_wait(load, UINT32_MAX, &err);
    if (rc < 0)
        MUST(err.code != CKPT_OK && err.text[0]);
    return rc;
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct ckpt_load_options opt = {
        .size = sizeof opt, .readers = CKPT_READERS_ONCE, .threads = 1, .verify = true};
    struct ckpt_load *load;
    struct ckpt_err err = {0};
    unsigned char got[5 * 8];

    opt.read_timeout_ms = opt.exchange_timeout_ms = spoil.n ? DEADLINE_MS : PATIENCE_MS;
    MUST(ckpt_load_new(r->view, r->comm, &opt, &load, &err) == 0);
    r->rc = load_box(r, load, got);
    ckpt_load_free(load);
    ckpt_comm_free(r->comm);
    for (unsigned i = 0; i < sizeof got && r->rc == 0 && spoil.n == 0; i++)
        MUST(got[i] == (unsigned char)(r->number * 24 + i));
    return NULL;
}

static void write_file(const char *top, const char *name, const void *data, size_t len)
{
    char path[128];

    (void)snprintf(path, sizeof path, "%s/%s", top, name);
    FILE *f = fopen(path, "wb");
    MUST(f && fwrite(data, 1, len, f) == len && fclose(f) == 0);
}

static struct ckpt_view *make_view(void)
{
    static const char header[] =
        "{\"w\":{\"dtype\":\"U8\",\"shape\":[9,8],\"data_offsets\":[0,72]}}";
    char top[] = "/tmp/fuzz_rounds.XXXXXX";
    unsigned char file[8 + sizeof header - 1 + 72] = {sizeof header - 1};
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};

    MUST(mkdtemp(top));
    memcpy(file + 8, header, sizeof header - 1);
    for (unsigned i = 0; i < 72; i++)
        file[8 + sizeof header - 1 + i] = (unsigned char)i;
    write_file(top, "model.safetensors", file, sizeof file);
    static const char config[] = "{\"model_type\": \"odd\"}";
    write_file(top, "config.json", config, sizeof config - 1);
    MUST(ckpt_run_open(top, NULL, &run, &err) == 0 && ckpt_run_view(run, NULL, &view, &err) == 0);
    ckpt_run_close(run);
    unsigned char byte;
    const uint64_t lo[2] = {0}, n[2] = {1, 1};
    MUST(ckpt_view_box_pread(view, 0, lo, n, &byte, &err) == 0); /* it is open from now on */
    return view;
}

static void take_patches(const uint8_t *data, size_t size)
{
    struct input input = {data, size};

    spoil.n = 0;
    atomic_store(&spoil.message, 0);
    while (input.left && spoil.n < MOST_PATCHES) {
        spoil.patch[spoil.n].message = input_u8(&input);
        spoil.patch[spoil.n].off = input_u16(&input);
        spoil.patch[spoil.n++].value = input_u8(&input);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ckpt_view *view;
    struct ckpt_comm *comm[RANKS];
    struct rank rank[RANKS];
    pthread_t thread[RANKS];
    struct ckpt_err err = {0};

    if (!view)
        view = make_view();
    take_patches(data, size);
    MUST(ckpt_comm_threads(RANKS, comm, &err) == 0);
    for (uint32_t r = 0; r < RANKS; r++) {
        struct between *b = calloc(1, sizeof *b);
        MUST(b);
        if (comm[r]->x->ops->fetched)
            between_ops.fetched = between_fetched;
        *b = (struct between){{.ops = &between_ops, .rank = r, .size = RANKS}, comm[r]->x};
        comm[r]->x = &b->x;
        rank[r] = (struct rank){.comm = comm[r], .view = view, .number = r};
    }
    for (uint32_t r = 0; r < RANKS; r++)
        MUST(pthread_create(&thread[r], NULL, run_rank, &rank[r]) == 0);
    for (uint32_t r = 0; r < RANKS; r++)
        MUST(pthread_join(thread[r], NULL) == 0);
    if (spoil.n == 0)
        MUST(rank[0].rc == 0 && rank[1].rc == 0);
    return 0;
}

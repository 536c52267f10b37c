/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of include/ckptfs/load.h that declare wants and destinations and run a load. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/sized.h"
#include "comm/comm.h"
#include "device/device.h"
#include "load/load_inner.h"
#include "load/plan/policy.h"
#include "tensor/strided.h"
#include "view/ahead.h"

enum { PAGE = 4096 };

/* ---- life ---- */

int ckpt_load_new(struct ckpt_view *view, struct ckpt_comm *comm,
                  const struct ckpt_load_options *opt, struct ckpt_load **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_load *load = calloc(1, sizeof *load);

    if (!load)
        return ckpt_nomem(err);
    if (ckpt_load_take_options(&load->opt, opt, err) < 0)
        return -1;
    load->view = ckpt_view_hold(view);
    load->comm = comm;
    *ret = ckpt_steal(&load);
    return 0;
}

void ckpt_load_free(struct ckpt_load *load)
{
    if (!load)
        return;
    ckpt_engine_end(load->engine);
    ckpt_plan_free(load->inputs.plan);
    if (load->inputs.job_wants)
        ckpt_job_wants_release(load->inputs.job_wants);
    free(load->inputs.job_wants);
    ckpt_wants_release(&load->wants);
    ckpt_vec_release(&load->target);
    ckpt_view_release(load->view);
    free(load);
}

/* ---- wants ---- */

/* Look up a tensor's number in the catalogue. MISSING: there is none of that name. */
static int find_tensor(const struct ckpt_load *load, const char *tensor, uint32_t *ret,
                       struct ckpt_err *err)
{
    size_t i;

    if (!ckpt_view_find_tensor(load->view, tensor, &i))
        return ckpt_fail(err, CKPT_MISSING, "there is no tensor '%s'", tensor);
    *ret = (uint32_t)i;
    return 0;
}

/* The tensor of a want. */
static const struct ckpt_tensor *tensor_of(const struct ckpt_load *load, size_t want)
{
    return &load->view->cat->tensors.ptr[load->wants.entries.ptr[want].tensor];
}

static int set_dest(struct ckpt_load *load, size_t want, const struct ckpt_dest *given,
                    struct ckpt_err *err)
{
    struct ckpt_dest dest = {0};
    struct ckpt_target *t = &load->target.ptr[want];
    const struct ckpt_tensor *tensor = tensor_of(load, want);
    enum ckpt_dtype dtype = t->dtype;

    if (given && ckpt_sized_take(&dest, sizeof dest, given, "ckpt_dest", err) < 0)
        return -1;
    if (dest.dtype && !ckpt_dtype_parse(dest.dtype, strlen(dest.dtype), &dtype))
        return ckpt_fail(err, CKPT_USAGE, "tensor '%s': there is no dtype '%s'", tensor->name,
                         dest.dtype);
    if (dtype != tensor->dtype &&
        !(ckpt_dtype_is_castable(dtype) && ckpt_dtype_is_castable(tensor->dtype)))
        return ckpt_fail(err, CKPT_USAGE, "tensor '%s' is %s: there is no cast to %s", tensor->name,
                         ckpt_dtype_name(tensor->dtype), ckpt_dtype_name(dtype));
    if (load->planned && load->comm->x->device && given && !t->host && (dest.host || dest.put))
        return ckpt_fail(err, CKPT_USAGE,
                         "tensor '%s': that its destination is on the host must be said before the "
                         "load is planned",
                         tensor->name);
    if (given && load->inputs.job_wants && load->inputs.job_wants->skip &&
        load->inputs.job_wants->skip[load->wants.entries.ptr[want].tensor])
        return ckpt_fail(err, CKPT_USAGE,
                         "tensor '%s' has not changed and is not sent again (changed_only): its "
                         "destination stays where it is",
                         tensor->name);
    t->dtype = dtype;
    if (!load->planned)
        load->wants.entries.ptr[want].dtype = dtype;
    if (given) {
        t->ptr = dest.ptr;
        t->host = dest.host || dest.put;
        t->put = dest.put;
        t->ctx = dest.ctx;
    }
    ckpt_shape_strides(t->box.n, t->box.rank, t->stride);
    for (uint32_t d = 0; d < t->box.rank; d++)
        t->stride[d] = (dest.stride ? dest.stride[d] : t->stride[d]) * ckpt_dtype_size(dtype);
    return 0;
}

/* Add the target of the next want that has none. On failure none is added. */
static int add_target(struct ckpt_load *load, const struct ckpt_dest *dest, struct ckpt_err *err)
{
    const size_t want = load->target.len;
    const struct ckpt_tensor *tensor = tensor_of(load, want);
    struct ckpt_target target = {.dtype = tensor->dtype};

    (void)ckpt_wants_box(&load->wants, &load->wants.entries.ptr[want], tensor, load->comm->x->rank,
                         &target.box);
    if (ckpt_vec_push(&load->target, target) < 0)
        return ckpt_nomem(err);
    if (set_dest(load, want, dest, err) < 0) {
        load->target.len--;
        return -1;
    }
    return 0;
}

/* Add a want of tensor t: of `box` (NULL: the whole tensor), divided as `spec` of load->wants says
 * (CKPT_NONE: not divided). On failure no want is added. */
static int add_want(struct ckpt_load *load, uint32_t t, uint32_t spec, const struct ckpt_box *box,
                    const struct ckpt_dest *dest, size_t *ret_want, struct ckpt_err *err)
{
    if (load->planned)
        return ckpt_fail(err, CKPT_USAGE,
                         "the load has been planned: no more wants can be declared");
    if (ckpt_wants_add(&load->wants, load->view->cat, t, spec, box, err) < 0)
        return -1;
    if (add_target(load, dest, err) < 0) {
        load->wants.entries.len--;
        return -1;
    }
    if (ret_want)
        *ret_want = load->target.len - 1;
    return 0;
}

static int take_box(const struct ckpt_tensor *t, const uint64_t *lo, const uint64_t *n,
                    struct ckpt_box *ret, struct ckpt_err *err)
{
    ret->rank = t->rank;
    for (uint32_t d = 0; d < t->rank; d++) {
        ret->lo[d] = lo[d];
        ret->n[d] = n[d];
        if (!ckpt_range_ok(lo[d], n[d], t->dim[d]))
            return ckpt_fail(err, CKPT_USAGE,
                             "elements %" PRIu64 "..%" PRIu64 " of dimension %" PRIu32
                             " are outside of tensor '%s', which is %s",
                             lo[d], lo[d] + n[d], d, t->name,
                             ckpt_shape_text(t->dim, t->rank).text);
    }
    return 0;
}

int ckpt_load_want(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                   const uint64_t *n, const struct ckpt_dest *dest, size_t *ret_want,
                   struct ckpt_err *err)
{
    struct ckpt_box box;
    uint32_t t = 0;

    if (find_tensor(load, tensor, &t, err) < 0 ||
        (lo && take_box(&load->view->cat->tensors.ptr[t], lo, n, &box, err) < 0))
        return -1;
    return add_want(load, t, CKPT_NONE, lo ? &box : NULL, dest, ret_want, err);
}

/* Check a mesh and add its grid to the wants; *ret is its index. */
static int take_mesh(struct ckpt_load *load, const struct ckpt_mesh *mesh, uint32_t *ret,
                     struct ckpt_err *err)
{
    const uint32_t size = load->comm->x->size;
    uint32_t n = 1;

    if (mesh->ndim > CKPT_LOAD_CUTS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "the mesh has %" PRIu32 " dimensions, at most %d are possible", mesh->ndim,
                         CKPT_LOAD_CUTS);
    for (uint32_t d = 0; d < mesh->ndim; d++)
        if (mesh->dim[d] == 0 || ckd_mul(&n, n, mesh->dim[d]) || n > size)
            return ckpt_fail(err, CKPT_USAGE,
                             "the mesh has no ranks, or more than the %" PRIu32 " of the job",
                             size);
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc(n * sizeof *rank);
    ckpt_cleanup(ckpt_freep) bool *seen = calloc((size_t)size + 1, sizeof *seen);
    if (!rank || !seen)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++) {
        rank[i] = mesh->ranks ? mesh->ranks[i] : i;
        if (rank[i] >= size || seen[rank[i]])
            return ckpt_fail(err, CKPT_USAGE, "the mesh names rank %" PRIu32 "%s of %" PRIu32,
                             rank[i], rank[i] < size ? " twice" : "", size);
        seen[rank[i]] = true;
    }
    if ((*ret = ckpt_wants_grid(&load->wants, mesh->ndim, mesh->dim, rank, err)) == CKPT_NONE)
        return -1;
    if (ckpt_grid_find(&load->wants.grids.ptr[*ret], load->comm->x->rank) == CKPT_NONE)
        return ckpt_fail(err, CKPT_USAGE, "rank %" PRIu32 " is not in the mesh",
                         load->comm->x->rank);
    return 0;
}

/* Turn placements into cuts, in the order of the mesh dimensions; STRIDED ones come last. */
static int take_places(const struct ckpt_tensor *t, const struct ckpt_mesh *mesh,
                       const struct ckpt_placement *place, struct ckpt_spec *ret,
                       struct ckpt_err *err)
{
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t m = 0; m < mesh->ndim; m++) {
            const enum ckpt_placement_kind now = pass ? CKPT_STRIDED : CKPT_SHARD;
            if (place[m].kind < CKPT_REPLICATE || place[m].kind > CKPT_STRIDED)
                return ckpt_fail(err, CKPT_USAGE, "there is no placement %d", (int)place[m].kind);
            if (place[m].kind != now)
                continue;
            if (place[m].dim >= t->rank)
                return ckpt_fail(err, CKPT_USAGE,
                                 "tensor '%s' has no dimension %" PRIu32
                                 ", which its placement shards",
                                 t->name, place[m].dim);
            if (mesh->dim[m] > 1)
                ret->cut[ret->ncut++] = (struct ckpt_division){place[m].dim, m};
        }
    return 0;
}

int ckpt_load_want_part(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                        const uint64_t *n, const struct ckpt_mesh *mesh,
                        const struct ckpt_placement *place, const struct ckpt_dest *dest,
                        size_t *ret_want, struct ckpt_err *err)
{
    struct ckpt_mesh own = {0};
    struct ckpt_spec spec = {0};
    struct ckpt_box box;
    uint32_t t = 0, s;

    if (find_tensor(load, tensor, &t, err) < 0 ||
        (lo && take_box(&load->view->cat->tensors.ptr[t], lo, n, &box, err) < 0) ||
        ckpt_sized_take(&own, sizeof own, mesh, "ckpt_mesh", err) < 0 ||
        take_mesh(load, &own, &spec.grid, err) < 0 ||
        take_places(&load->view->cat->tensors.ptr[t], &own, place, &spec, err) < 0 ||
        (s = ckpt_wants_spec(&load->wants, &spec, err)) == CKPT_NONE)
        return -1;
    return add_want(load, t, spec.ncut ? s : CKPT_NONE, lo ? &box : NULL, dest, ret_want, err);
}

/* After a failure no want may remain without a target: entry i of both lists is want i. */
int ckpt_load_want_layout(struct ckpt_load *load, const char *layout, struct ckpt_err *err)
{
    if (load->planned || load->wants.entries.len)
        return ckpt_fail(
            err, CKPT_USAGE,
            "a layout must be the first and only declaration of wants, and come before the plan");
    int rc = ckpt_layout_wants(load->view, layout, load->comm->x->rank, load->comm->x->size,
                               &load->wants, err);
    while (rc == 0 && load->target.len < load->wants.entries.len)
        rc = add_target(load, NULL, err);
    if (rc < 0) {
        ckpt_wants_release(&load->wants);
        load->target.len = 0;
    }
    return rc;
}

size_t ckpt_load_wants(const struct ckpt_load *load) { return load->wants.entries.len; }

int ckpt_load_want_info(const struct ckpt_load *load, size_t want, struct ckpt_want_info *ret,
                        struct ckpt_err *err)
{
    struct ckpt_want_info info = {0};

    if (want < load->target.len) {
        const struct ckpt_target *t = &load->target.ptr[want];
        info.tensor = tensor_of(load, want)->name;
        info.dtype = ckpt_dtype_name(t->dtype);
        info.rank = t->box.rank;
        info.nbytes = ckpt_box_numel(&t->box) * ckpt_dtype_size(t->dtype);
        memcpy(info.lo, t->box.lo, t->box.rank * sizeof *info.lo);
        memcpy(info.n, t->box.n, t->box.rank * sizeof *info.n);
    }
    return ckpt_sized_give(ret, &info, sizeof info, "ckpt_want_info", err);
}

int ckpt_load_set_dest(struct ckpt_load *load, size_t want, const struct ckpt_dest *dest,
                       struct ckpt_err *err)
{
    if (load->started || want >= load->target.len)
        return ckpt_fail(err, CKPT_USAGE,
                         "the load has started, or there is no want %zu: no destination can be set",
                         want);
    return set_dest(load, want, dest, err);
}

/* ---- running ---- */

/* On a device, all destinations must be in memory that it can write to, and be aligned. */
static int check_device(const struct ckpt_load *load, struct ckpt_err *err)
{
    struct ckpt_device *d = load->comm->x->device;

    for (size_t i = 0; i < load->target.len && d; i++) {
        const struct ckpt_target *t = &load->target.ptr[i];
        const char *name = tensor_of(load, i)->name;
        if (ckpt_box_numel(&t->box) == 0 || t->host)
            continue;
        if (!d->ops->reaches(d, t->ptr))
            return ckpt_fail(err, CKPT_USAGE,
                             "the destination of tensor '%s' is not in memory of this rank's "
                             "device",
                             name);
        if ((uintptr_t)t->ptr % ckpt_dtype_size(t->dtype))
            return ckpt_fail(err, CKPT_USAGE,
                             "the destination of tensor '%s' is not aligned to its elements", name);
    }
    return 0;
}

static int check_targets(const struct ckpt_load *load, struct ckpt_err *err)
{
    for (size_t i = 0; i < load->target.len; i++)
        if (!load->target.ptr[i].ptr && !load->target.ptr[i].put &&
            ckpt_box_numel(&load->target.ptr[i].box))
            return ckpt_fail(err, CKPT_USAGE, "want %zu (of tensor '%s') has no destination", i,
                             tensor_of(load, i)->name);
    return 0;
}

int ckpt_load_start(struct ckpt_load *load, struct ckpt_err *err)
{
    struct ckpt_err why = {0};

    if (load->started && !load->engine)
        return ckpt_fail(err, CKPT_USAGE, "this load failed to start: make a new one");
    if (!load->ready)
        return ckpt_fail(err, CKPT_USAGE, "plan the load, or reload it, before each start");
    if (load->comm->busy)
        return ckpt_fail(err, CKPT_USAGE, "another load of this comm runs");
    load->inputs.target = load->target.ptr;
    load->inputs.ntarget = load->target.len;
    if (check_targets(load, &why) < 0 || check_device(load, &why) < 0 ||
        ckpt_engine_start(&load->inputs, &load->engine_opt, &load->sizes, &load->engine, &why) <
            0) {
        ckpt_engine_refuse(load->comm, load->opt.exchange_timeout_ms, &why);
        load->started =
            load->comm->x->size > 1 || !load->inputs.plan; /* the engine has taken the plan */
        load->ready = !load->started;
        return ckpt_err_move(err, &why);
    }
    load->started = true;
    load->ready = false;
    return 0;
}

static int not_started(struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_USAGE, "the load was not started");
}

int ckpt_load_wait(struct ckpt_load *load, uint32_t timeout_ms, struct ckpt_err *err)
{
    return load->engine ? ckpt_engine_wait(load->engine, timeout_ms, err) : not_started(err);
}

int ckpt_load_next(struct ckpt_load *load, uint32_t timeout_ms, size_t *ret_want,
                   struct ckpt_err *err)
{
    return load->engine ? ckpt_engine_next(load->engine, timeout_ms, ret_want, err)
                        : not_started(err);
}

void ckpt_load_cancel(struct ckpt_load *load)
{
    if (load->engine)
        ckpt_engine_cancel(load->engine);
}

int ckpt_load_pause(struct ckpt_load *load, uint32_t timeout_ms, struct ckpt_err *err)
{
    return load->engine ? ckpt_engine_pause(load->engine, timeout_ms, err) : not_started(err);
}

int ckpt_load_resume(struct ckpt_load *load, struct ckpt_err *err)
{
    return load->engine ? ckpt_engine_resume(load->engine, err) : not_started(err);
}

int ckpt_load_stats(const struct ckpt_load *load, struct ckpt_load_stats *own,
                    struct ckpt_load_stats *job, struct ckpt_err *err)
{
    if (own) {
        struct ckpt_load_stats s = {0};
        if (load->engine)
            ckpt_engine_own(load->engine, &s);
        s.needed_bytes = load->inputs.needed_bytes;
        s.unique_bytes = load->inputs.unique_bytes;
        s.plan_s = (double)load->plan_ns / 1e9;
        if (ckpt_sized_give(own, &s, sizeof s, "ckpt_load_stats", err) < 0)
            return -1;
    }
    if (job) {
        struct ckpt_load_stats s = {0};
        if (load->engine)
            s = *ckpt_engine_job(load->engine);
        s.plan_s = (double)load->plan_ns / 1e9;
        if (ckpt_sized_give(job, &s, sizeof s, "ckpt_load_stats", err) < 0)
            return -1;
    }
    return 0;
}

const char *ckpt_load_readers(const struct ckpt_load *load)
{
    static const char *const name[] = {"auto", "once", "node", "each"};

    return name[load->readers];
}

/* ---- memory for destinations, on the host or a device ---- */

int ckpt_comm_alloc(struct ckpt_comm *comm, size_t len, void **ret, struct ckpt_err *err)
{
    struct ckpt_device *d = comm->x->device;

    if (d)
        return d->ops->alloc(d, len ? len : 1, ret, err);
    return posix_memalign(ret, PAGE, len + !len) == 0 ? 0 : ckpt_nomem(err);
}

void ckpt_comm_dealloc(struct ckpt_comm *comm, void *mem)
{
    struct ckpt_device *d = comm->x->device;

    if (mem && d)
        d->ops->dealloc(d, mem);
    else
        free(mem);
}

int ckpt_comm_fetch(struct ckpt_comm *comm, void *dst, const void *mem, size_t len,
                    struct ckpt_err *err)
{
    struct ckpt_device *d = comm->x->device;

    if (d)
        return d->ops->fetch(d, dst, mem, len, err);
    memcpy(dst, mem, len);
    return 0;
}

uint64_t ckpt_comm_release(struct ckpt_comm *comm)
{
    struct ckpt_device *d = comm->x->device;

    if (d && !comm->busy)
        (void)d->ops->drain(d);
    return d ? d->ops->unpin(d, NULL) : 0;
}

void ckpt_load_rates(const struct ckpt_load *load, struct ckpt_rates *ret) { *ret = load->rates; }

/* ---- reading one box without a load ---- */

int ckpt_view_box_pread(struct ckpt_view *view, size_t i, const uint64_t *lo, const uint64_t *n,
                        void *buf, struct ckpt_err *err)
{
    static const struct ckpt_box_cost cost = {
        CKPT_STRIDED_GAP, CKPT_STRIDED_BOUND, CKPT_STRIDED_LONG_RUN, {CKPT_DIRECT_NONE, NULL}};
    static const uint64_t zero[CKPT_MAX_RANK];

    if (i >= view->cat->tensors.len)
        return ckpt_fail(err, CKPT_USAGE, "there is no tensor %zu", i);
    const struct ckpt_tensor *t = &view->cat->tensors.ptr[i];
    const size_t esize = ckpt_dtype_size(t->dtype);
    struct ckpt_box_read read = {.tensor = t, .buf = buf};
    uint64_t from = 0, to = 0;
    if (take_box(t, lo ? lo : zero, lo ? n : t->dim, &read.box, err) < 0)
        return -1;
    const uint64_t numel = ckpt_box_numel(&read.box);
    if (numel)
        ckpt_box_range(&read.box, t->dim, &from, &to);
    if (numel == to - from)
        ckpt_ahead_note_tensor(&view->reading, view->tree, i, from * esize, to * esize);
    if (ckpt_boxes_pread(&view->reading, &read, 1, &cost, err) < 0)
        return ckpt_err_in(err, "tensor '%s'", t->name);
    return 0;
}

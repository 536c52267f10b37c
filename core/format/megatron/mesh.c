/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the ranks' files of a legacy Megatron checkpoint, and assigning their coordinates. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/take.h"
#include "container/torch_file.h"
#include "format/megatron/load.h"

enum { MAX_RANKS = 1024 };

const char *const ckpt_megatron_rank_files[] = {"model_optim_rng.pt", "model_rng.pt",
                                                "model_weights.ckpt", NULL};

static void rank_release(struct ckpt_megatron_rank *r)
{
    ckpt_torch_file_release(&r->file);
    free(r->path);
}

void ckpt_megatron_mesh_release(struct ckpt_megatron_mesh *m)
{
    for (size_t i = 0; i < m->ranks.len; i++)
        rank_release(&m->ranks.ptr[i]);
    ckpt_vec_release(&m->ranks);
}

/* ---- the files ---- */

/* Parse NeMo's tp_rank_TT_pp_rank_PPP. */
static bool parse_nemo_folder(const char *s, struct ckpt_megatron_rank *r)
{
    uint64_t tp, pp;

    if (!ckpt_take_text(&s, "tp_rank_") || !ckpt_take_u64(&s, &tp) ||
        !ckpt_take_text(&s, "_pp_rank_") || !ckpt_take_u64(&s, &pp) || *s || tp >= MAX_RANKS ||
        pp >= MAX_RANKS)
        return false;
    r->tp = tp;
    r->field[r->nfield++] = pp;
    return true;
}

/* Parse mp_rank_TT with up to two more numbers. */
static bool parse_folder(const char *s, struct ckpt_megatron_rank *r)
{
    uint64_t v;

    if (parse_nemo_folder(s, r))
        return true;
    if (!ckpt_take_text(&s, "mp_rank_") || !ckpt_take_u64(&s, &r->tp) || r->tp >= MAX_RANKS)
        return false;
    while (r->nfield < 2 && ckpt_take_text(&s, "_")) {
        if (!ckpt_take_u64(&s, &v) || v >= MAX_RANKS)
            return false;
        r->field[r->nfield++] = v;
    }
    return *s == '\0';
}

/* Add a rank's folder. */
static int add_rank(struct ckpt_megatron_mesh *m, const char *name, struct ckpt_err *err)
{
    struct ckpt_megatron_rank r = {0};

    if (!parse_folder(name, &r))
        return 0;
    if (!(r.folder = ckpt_dir_intern(m->dir, name)))
        return ckpt_nomem(err);
    for (size_t i = 0; !r.path && ckpt_megatron_rank_files[i]; i++) {
        if (!(r.path = ckpt_asprintf("%s/%s", r.folder, ckpt_megatron_rank_files[i])))
            return ckpt_nomem(err);
        if (!ckpt_dir_has_file(m->dir, r.path))
            free(ckpt_steal(&r.path));
    }
    if (!r.path)
        return ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no %s", ckpt_dir_path(m->dir), r.folder,
                         ckpt_megatron_rank_files[0]);
    if (ckpt_vec_push(&m->ranks, r) == 0)
        return 0;
    free(r.path);
    return ckpt_nomem(err);
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct ckpt_megatron_mesh *m = ctx;
    struct ckpt_megatron_rank *r = &m->ranks.ptr[i];

    return ckpt_torch_file_open(m->dir, r->path, m->opt->pool, &r->file, err);
}

int ckpt_megatron_mesh_read(struct ckpt_megatron_mesh *m, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    if (ckpt_entries_read(m->dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_DIR && add_rank(m, e.name, err) < 0)
            return -1;
    if (m->ranks.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no mp_rank_* directory",
                         ckpt_dir_path(m->dir));
    if (ckpt_parallel(m->ranks.len, 0, read_one, m, err) < 0)
        return -1;
    for (size_t i = 0; i < m->ranks.len; i++) {
        const struct ckpt_pickle *p = &m->ranks.ptr[i].file.p;
        if (ckpt_pv_kind(p->root) != CKPT_PV_DICT)
            (void)ckpt_fail(err, CKPT_FORMAT, "it holds %s instead of a dict",
                            ckpt_pv_text(p, p->root).text);
        else if (ckpt_megatron_state_take(m->st, p, p->root, err) == 0)
            continue;
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(m->dir), m->ranks.ptr[i].path);
    }
    return 0;
}

/* ---- the mesh ---- */

ckpt_pv ckpt_megatron_rank_model(const struct ckpt_megatron_rank *r, uint32_t stage, bool numbered)
{
    char key[24] = "model";

    if (numbered)
        (void)snprintf(key, sizeof key, "model%u", stage);
    ckpt_pv v = ckpt_pv_get(&r->file.p, r->file.p.root, key);
    if (!numbered && ckpt_pv_kind(v) != CKPT_PV_DICT)
        v = ckpt_pv_get(&r->file.p, r->file.p.root, "state_dict");
    return v;
}

static bool has_embedding(const struct ckpt_megatron_rank *r)
{
    ckpt_pv model = ckpt_megatron_rank_model(r, 0, false);

    if (ckpt_pv_kind(model) != CKPT_PV_DICT)
        model = ckpt_megatron_rank_model(r, 0, true);
    for (size_t i = 0; i < ckpt_pv_npair(&r->file.p, model); i++) {
        const char *key = ckpt_pv_str(&r->file.p, ckpt_pv_key(&r->file.p, model, i));
        if (key && strstr(key, "word_embeddings.weight"))
            return true;
    }
    return false;
}

/* Is a single number after TT the pipeline rank, and not the expert rank? The run's arguments say
 * so; without them, the fact that all expert ranks have the embedding. */
static bool is_pipeline(const struct ckpt_megatron_mesh *m)
{
    if (ckpt_megatron_state_size(m->st, "pipeline_model_parallel_size") > 1)
        return true;
    if (ckpt_megatron_state_size(m->st, "expert_model_parallel_size") > 1)
        return false;
    for (size_t i = 0; i < m->ranks.len; i++)
        if (m->ranks.ptr[i].field[0] > 0)
            return !has_embedding(&m->ranks.ptr[i]);
    return true;
}

static uint64_t at_least(uint64_t n, uint64_t rank) { return rank >= n ? rank + 1 : n; }

static int by_place(const void *a, const void *b)
{
    const struct ckpt_megatron_rank *p = a, *q = b;
    int c = ckpt_u64_cmp(p->pp, q->pp);

    c = c ? c : ckpt_u64_cmp(p->ep, q->ep);
    return c ? c : ckpt_u64_cmp(p->tp, q->tp);
}

static const struct ckpt_megatron_rank *find_rank(const struct ckpt_megatron_mesh *m, uint64_t tp,
                                                  uint64_t pp, uint64_t ep)
{
    const struct ckpt_megatron_rank key = {.tp = tp, .pp = pp, .ep = ep};

    return bsearch(&key, m->ranks.ptr, m->ranks.len, sizeof key, by_place);
}

static int fail_missing(const struct ckpt_megatron_mesh *m, uint64_t tp, uint64_t pp, uint64_t ep,
                        struct ckpt_err *err)
{
    const struct ckpt_megatron_rank *first = &m->ranks.ptr[0];
    char tail[64] = "";

    if (first->nfield == 2)
        (void)snprintf(tail, sizeof tail, "_%03" PRIu64 "_%03" PRIu64, pp, ep);
    else if (first->nfield == 1)
        (void)snprintf(tail, sizeof tail, "_%03" PRIu64, m->npp > 1 ? pp : ep);
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s': rank 'mp_rank_%02" PRIu64 "%s' is missing: the run had tensor parallel "
                     "%" PRIu64 ", pipeline parallel %" PRIu64 ", expert parallel %" PRIu64,
                     ckpt_dir_path(m->dir), tp, tail, m->ntp, m->npp, m->nep);
}

/* Check which ranks of a stage wrote files. If experts are divided as all other tensors are, all
 * ranks did. With another division (expert tensor parallelism N), only the first N x expert ranks
 * of each stage did. */
static int check_stage(const struct ckpt_megatron_mesh *m, uint64_t pp, struct ckpt_err *err)
{
    if (m->netp == m->ntp) {
        for (uint64_t e = 0; e < m->nep; e++)
            for (uint64_t t = 0; t < m->ntp; t++)
                if (!find_rank(m, t, pp, e))
                    return fail_missing(m, t, pp, e, err);
        return 0;
    }
    for (uint64_t r = 0; r < m->netp * m->nep; r++)
        if (!find_rank(m, r % m->ntp, pp, r / m->netp))
            return fail_missing(m, r % m->ntp, pp, r / m->netp, err);
    for (uint64_t t = 0; t < m->ntp; t++) {
        bool found = false;
        for (uint64_t e = 0; e < m->nep; e++)
            found |= find_rank(m, t, pp, e) != NULL;
        if (!found)
            return fail_missing(m, t, pp, t / m->netp % m->nep, err);
    }
    return 0;
}

/* Drop files of ranks that the run did not have, which are left from an earlier and larger run. */
static void drop_stale(struct ckpt_megatron_mesh *m, struct ckpt_catalog *cat)
{
    size_t kept = 0;

    for (size_t i = 0; i < m->ranks.len; i++) {
        struct ckpt_megatron_rank *r = &m->ranks.ptr[i];
        if ((m->ntp && r->tp >= m->ntp) || (m->npp && r->pp >= m->npp) ||
            (m->nep && r->ep >= m->nep)) {
            ckpt_catalog_warn(
                cat,
                "left out: '%s', whose rank does not exist in this run (tensor parallel %" PRIu64
                ", pipeline parallel %" PRIu64 ", expert parallel %" PRIu64 ")",
                r->folder, m->ntp, m->npp, m->nep);
            rank_release(r);
        } else {
            m->ranks.ptr[kept++] = *r;
        }
    }
    m->ranks.len = kept;
}

/* Find out what the numbers after mp_rank_TT mean. */
static void name_fields(struct ckpt_megatron_mesh *m)
{
    const uint32_t nfield = m->ranks.ptr[0].nfield;
    const bool pipeline = nfield == 2 || is_pipeline(m);

    for (size_t i = 0; i < m->ranks.len; i++) {
        struct ckpt_megatron_rank *r = &m->ranks.ptr[i];
        if (nfield)
            *(pipeline ? &r->pp : &r->ep) = r->field[0];
        if (nfield == 2)
            r->ep = r->field[1];
    }
}

/* The sizes of the mesh: those in the run's arguments, but at least as large as the files require.
 */
static int size_mesh(struct ckpt_megatron_mesh *m, uint32_t nfield, struct ckpt_err *err)
{
    for (size_t i = 0; i < m->ranks.len; i++) {
        struct ckpt_megatron_rank *r = &m->ranks.ptr[i];
        if (r->nfield != nfield)
            return ckpt_fail(
                err, CKPT_CONFLICT,
                "'%s' holds ranks of several saves ('%s', '%s'): remove the stale ones",
                ckpt_dir_path(m->dir), m->ranks.ptr[0].folder, r->folder);
        m->ntp = at_least(m->ntp, r->tp);
        m->npp = at_least(m->npp, r->pp);
        m->nep = at_least(m->nep, r->ep);
    }
    return m->ntp > MAX_RANKS || m->npp > MAX_RANKS || m->nep > MAX_RANKS
               ? ckpt_fail(err, CKPT_LIMIT, "more than %d ranks", MAX_RANKS)
               : 0;
}

static int size_experts(struct ckpt_megatron_mesh *m, struct ckpt_err *err)
{
    m->netp = ckpt_megatron_state_size(m->st, "expert_tensor_parallel_size");
    if (m->netp == 0 || m->nep == 1)
        m->netp = m->netp && ckpt_megatron_state_size(m->st, "num_experts") ? m->netp : m->ntp;
    if (m->netp > m->ntp || m->ntp % m->netp)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "expert tensor parallel %" PRIu64 " with tensor parallel %" PRIu64
                         " is not supported in legacy checkpoints",
                         m->netp, m->ntp);
    return 0;
}

int ckpt_megatron_mesh_place(struct ckpt_megatron_mesh *m, struct ckpt_catalog *cat,
                             struct ckpt_err *err)
{
    const uint32_t nfield = m->ranks.ptr[0].nfield;

    name_fields(m);
    m->ntp = ckpt_megatron_state_size(m->st, "tensor_model_parallel_size");
    m->npp = ckpt_megatron_state_size(m->st, "pipeline_model_parallel_size");
    m->nep = ckpt_megatron_state_size(m->st, "expert_model_parallel_size");
    drop_stale(m, cat);
    if (m->ranks.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no rank of the run", ckpt_dir_path(m->dir));
    if (size_mesh(m, nfield, err) < 0 || size_experts(m, err) < 0)
        return -1;
    qsort(m->ranks.ptr, m->ranks.len, sizeof *m->ranks.ptr, by_place);
    for (uint64_t p = 0; p < m->npp; p++)
        if (check_stage(m, p, err) < 0)
            return -1;
    return 0;
}

/* ---- the common state ---- */

void ckpt_megatron_state_release(struct ckpt_megatron_state *st)
{
    json_decref(st->args);
    st->args = NULL;
}

uint64_t ckpt_megatron_state_size(const struct ckpt_megatron_state *st, const char *key)
{
    uint64_t n = 0;

    return st->args && ckpt_json_u64(st->args, key, &n) ? n : 0;
}

static int take_args(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                     struct ckpt_err *err)
{
    json_t *args;

    if (st->args)
        return 0;
    if (ckpt_pickle_plain(p, v, &args, err) < 0)
        return -1;
    if (json_is_object(args))
        st->args = args;
    else
        json_decref(args);
    return 0;
}

static void take_fact(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, const char *name,
                      ckpt_pv v)
{
    int64_t i = 0;
    bool is_int = ckpt_pv_int(v, &i), is_float = ckpt_pv_kind(v) == CKPT_PV_FLOAT;

    if (strcmp(name, "iteration") == 0 && is_int && i >= 0 && !st->has_iteration) {
        st->iteration = (uint64_t)i;
        st->has_iteration = true;
    }
    if (strcmp(name, "checkpoint_version") == 0 && (is_int || is_float) && !st->has_version) {
        st->version = is_float ? p->floats.ptr[ckpt_pv_id(v)] : (double)i;
        st->has_version = true;
    }
}

int ckpt_megatron_state_take(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                             struct ckpt_err *err)
{
    if (ckpt_torch_refuse_attack(p, err) < 0)
        return -1;
    if (ckpt_pv_kind(v) == CKPT_PV_LIST)
        v = ckpt_pv_at(p, v, 0);
    if (ckpt_pv_kind(v) == CKPT_PV_OBJ)
        return take_args(st, p, v, err);
    if (ckpt_pv_kind(v) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_FORMAT, "it holds %s instead of a dict",
                         ckpt_pv_text(p, v).text);
    take_fact(st, p, "iteration", ckpt_pv_get(p, v, "iteration"));
    take_fact(st, p, "checkpoint_version", ckpt_pv_get(p, v, "checkpoint_version"));
    return take_args(st, p, ckpt_pv_get(p, v, "args"), err);
}

int ckpt_megatron_state_read(struct ckpt_megatron_state *st, struct ckpt_source *s,
                             struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};

    return ckpt_torch_file_read(s, &f, err) < 0 ? -1
                                                : ckpt_megatron_state_take(st, &f.p, f.p.root, err);
}

int ckpt_megatron_state_read_fact(struct ckpt_megatron_state *st, const char *name,
                                  struct ckpt_source *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};

    if (ckpt_torch_file_read(s, &f, err) < 0 || ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    take_fact(st, &f.p, name, f.p.root);
    return 0;
}

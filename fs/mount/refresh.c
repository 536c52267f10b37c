/* SPDX-License-Identifier: Apache-2.0 */
/* Opening the run, and scanning it again and again; inotify does not work on NFS and Lustre. */
#include "mount/refresh.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "common.h"

void ckptfs_steps_release(struct ckptfs_steps *s)
{
    if (!s || atomic_fetch_sub(&s->nref, 1) > 1)
        return;
    ckpt_steps_free(s->step, s->n);
    ckpt_step_links_free(s->link, s->nlink);
    free(s);
}

struct ckptfs_steps *ckptfs_steps_hold(struct ckptfs_refresh *r)
{
    (void)pthread_mutex_lock(&r->lock);
    struct ckptfs_steps *s = r->now;
    if (s)
        atomic_fetch_add(&s->nref, 1);
    (void)pthread_mutex_unlock(&r->lock);
    return s;
}

const struct ckpt_step *ckptfs_steps_find(const struct ckptfs_steps *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (strcmp(s->step[i].name, name) == 0)
            return &s->step[i];
    return NULL;
}

const struct ckpt_step *ckptfs_steps_latest(const struct ckptfs_steps *s)
{
    for (size_t i = s->n; i-- > 0;)
        if (s->step[i].is_latest)
            return &s->step[i];
    return NULL;
}

const struct ckpt_step_link *ckptfs_steps_link(const struct ckptfs_steps *s, const char *name)
{
    for (size_t i = 0; i < s->nlink; i++)
        if (strcmp(s->link[i].name, name) == 0)
            return &s->link[i];
    return NULL;
}

/* Replace the list by the run's current steps. */
static int publish(struct ckptfs_refresh *r, struct ckpt_run *run, struct ckpt_err *err)
{
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *s = calloc(1, sizeof *s);

    if (!s)
        return ckpt_nomem(err);
    atomic_init(&s->nref, 1);
    s->folder = ckpt_run_is_folder(run);
    if (ckpt_run_steps(run, &s->step, &s->n, err) < 0 ||
        ckpt_run_links(run, &s->link, &s->nlink, err) < 0)
        return -1;
    (void)pthread_mutex_lock(&r->lock);
    struct ckptfs_steps *old = r->now;
    r->now = ckpt_steal(&s);
    (void)pthread_mutex_unlock(&r->lock);
    ckptfs_steps_release(old);
    return 0;
}

static uint64_t bytes_below(const struct ckpt_node *node)
{
    uint64_t sum = ckpt_node_is_dir(node) ? 0 : ckpt_node_size(node);

    for (size_t i = 0, n = ckpt_node_children(node); i < n; i++)
        sum += bytes_below(ckpt_node_child(node, i));
    return sum;
}

static int open_run(struct ckptfs_refresh *r, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_run_closep) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    struct ckpt_err own = {0};

    if (ckpt_run_open(r->config->run, r->config->opt, &run, &own) < 0) {
        ckptfs_sandbox_explain(r->sandbox, &own);
        return own.code == CKPT_MISSING
                   ? ckpt_fail(err, own.code, "%.800s (-o wait mounts it before its first save)",
                               own.text)
                   : ckpt_err_move(err, &own);
    }
    ckpt_run_watch(run);
    const bool readable = ckpt_run_newest_view(run, &view, err) == 0;
    if (view)
        atomic_store(&r->bytes, bytes_below(ckpt_view_root(view)));
    if ((!readable && !r->config->wait) || publish(r, run, err) < 0) {
        ckptfs_sandbox_explain(r->sandbox, err);
        return -1;
    }
    atomic_store(&r->run, ckpt_steal(&run));
    return 0;
}

int ckptfs_refresh_open(struct ckptfs_refresh *r, const struct ckptfs_config *config,
                        const struct ckptfs_log *log, const struct ckptfs_sandbox *sandbox,
                        struct ckpt_err *err)
{
    *r = (struct ckptfs_refresh){.config = config, .log = log, .sandbox = sandbox};
    (void)pthread_mutex_init(&r->lock, NULL);
    ckpt_cond_init(&r->wake);
    ckptfs_silences_init(&r->silences);
    if (open_run(r, err) == 0)
        return 0;
    if (!config->wait || err->code == CKPT_USAGE)
        return -1;
    ckptfs_logf(log, CKPT_INFO, "waiting for a first step: %s", err->text);
    *err = (struct ckpt_err){0};
    return 0;
}

static void look(struct ckptfs_refresh *r)
{
    struct ckpt_run *run = atomic_load(&r->run);
    struct ckpt_err err = {0};
    bool changed = false;

    if (!run) {
        if (open_run(r, &err) == 0)
            ckptfs_logf(r->log, CKPT_INFO, "%s: the first step has appeared", r->config->run);
        return;
    }
    if (ckpt_run_scan(run, &changed, &err) < 0 || (changed && publish(r, run, &err) < 0)) {
        ckptfs_sandbox_explain(r->sandbox, &err);
        if (!r->failing)
            ckptfs_logf(r->log, CKPT_WARNING, "looking for new steps: %s", err.text);
        r->failing = true;
        return;
    }
    if (r->failing)
        ckptfs_logf(r->log, CKPT_INFO, "%s can be listed again", r->config->run);
    r->failing = false;
}

static void *watch(void *arg)
{
    struct ckptfs_refresh *r = arg;
    uint64_t took = 0;

    (void)pthread_mutex_lock(&r->lock);
    while (!r->stop) {
        const struct timespec until = ckpt_deadline(ckptfs_scan_pause(r->config->run, took));
        while (!r->stop && !r->kicked)
            if (pthread_cond_timedwait(&r->wake, &r->lock, &until) != 0)
                break;
        if (r->stop)
            break;
        r->kicked = false;
        (void)pthread_mutex_unlock(&r->lock);
        const uint64_t begin = ckpt_now_ms();
        look(r);
        took = ckpt_now_ms() - begin;
        (void)pthread_mutex_lock(&r->lock);
    }
    (void)pthread_mutex_unlock(&r->lock);
    return NULL;
}

int ckptfs_refresh_start(struct ckptfs_refresh *r, struct ckpt_err *err)
{
    int rc = pthread_create(&r->thread, NULL, watch, r);

    return rc ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

void ckptfs_refresh_kick(struct ckptfs_refresh *r)
{
    (void)pthread_mutex_lock(&r->lock);
    r->kicked = true;
    (void)pthread_cond_signal(&r->wake);
    (void)pthread_mutex_unlock(&r->lock);
}

void ckptfs_refresh_stop(struct ckptfs_refresh *r)
{
    (void)pthread_mutex_lock(&r->lock);
    r->stop = true;
    (void)pthread_cond_signal(&r->wake);
    (void)pthread_mutex_unlock(&r->lock);
    (void)pthread_join(r->thread, NULL);
}

void ckptfs_refresh_release(struct ckptfs_refresh *r)
{
    ckptfs_steps_release(r->now);
    ckpt_run_close(atomic_load(&r->run));
    ckptfs_silences_release(&r->silences);
    (void)pthread_cond_destroy(&r->wake);
    (void)pthread_mutex_destroy(&r->lock);
}

static uint64_t hash_of(const char *step) { return XXH3_64bits(step, strlen(step)); }

/* Has this error of this step not been logged yet? It is logged once, however many requests get it.
 */
static bool is_news(struct ckptfs_refresh *r, const char *step, const struct ckpt_err *err)
{
    const size_t room = sizeof r->said / sizeof *r->said;
    const uint64_t hash = XXH3_64bits_withSeed(err->text, strlen(err->text), hash_of(step));
    bool known = false;

    (void)pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < room && i < r->nsaid; i++)
        known |= r->said[i] == hash;
    if (!known)
        r->said[r->nsaid++ % room] = hash;
    (void)pthread_mutex_unlock(&r->lock);
    return !known;
}

/* Has the step that could not be opened been deleted? Then also update the list. */
static bool is_gone(struct ckptfs_refresh *r, struct ckpt_run *run, const char *step)
{
    if (publish(r, run, NULL) < 0)
        return false;
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps = ckptfs_steps_hold(r);
    return steps->folder && !ckptfs_steps_find(steps, step);
}

int ckptfs_view_of(struct ckptfs_refresh *r, const char *step, struct ckpt_view **ret,
                   struct ckpt_err *err)
{
    struct ckpt_err own = {0};
    struct ckpt_run *run = atomic_load(&r->run);
    const uint64_t begin_ms = ckpt_now_ms();
    uint64_t ms;

    if (!run)
        return ckpt_fail(err, CKPT_MISSING, "%s: there is no step yet", r->config->run);
    if (ckpt_run_view(run, *step ? step : NULL, ret, &own) == 0) {
        if (ckptfs_silence_ends(&r->silences, hash_of(step), &ms))
            ckptfs_logf(r->log, CKPT_WARNING, "%s%s%s can be opened again, after %.0f s",
                        r->config->run, *step ? "/" : "", step, (double)ms / 1000);
        return 0;
    }
    if (own.code == CKPT_MISSING && is_gone(r, run, step))
        return ckpt_fail(err, CKPT_STALE, "step %s is gone", step);
    ckptfs_sandbox_explain(r->sandbox, &own);
    /* while storage gives no answer, another file may be named each time */
    if (own.code == CKPT_TIMEOUT ? ckptfs_silence_begins(&r->silences, hash_of(step), begin_ms)
                                 : is_news(r, step, &own))
        ckptfs_logf(r->log, CKPT_ERROR, "%s%s%s%s", *step ? "step " : "", step, *step ? ": " : "",
                    own.text);
    return ckpt_err_move(err, &own);
}

int ckptfs_view_of_node(struct ckptfs_refresh *r, const struct ckptfs_id *id,
                        struct ckpt_view **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps = ckptfs_steps_hold(r);

    if (id->kind == CKPTFS_STEP) {
        const struct ckpt_step *s = steps ? ckptfs_steps_find(steps, id->step) : NULL;
        if (!s || s->generation != id->generation)
            return ckpt_fail(err, CKPT_STALE, "step %s was saved again or is gone", id->step);
    }
    if (ckptfs_view_of(r, id->step, &view, err) < 0)
        return -1;
    if ((id->kind == CKPTFS_DIR || id->kind == CKPTFS_FILE) &&
        ckpt_view_generation(view) != id->generation)
        return ckpt_fail(err, CKPT_STALE, "step %s was saved again", id->step);
    *ret = ckpt_steal(&view);
    return 0;
}

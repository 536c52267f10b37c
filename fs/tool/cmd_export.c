/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt export: one step, or a directory for each of several, and a command after each. */
#include <errno.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "common.h"
#include "tool.h"
#include "tool/record.h"

extern char **environ;

enum { WAKE = SIGUSR1 }; /* ends the thread that waits for signals */

/* --watch waits for these times. QUIET_MS: the files of a step whose end nothing marks have not
 * changed for so long when it is exported; with half of it, a writer that pauses (a slow network)
 * is taken for one that has ended; with twice, steps come later. A step that failed is tried again
 * after FIRST_PAUSE_MS, then after twice as long each time, up to LAST_PAUSE_MS. */
enum { QUIET_MS = 5000, FIRST_PAUSE_MS = 2000, LAST_PAUSE_MS = 60000 };

/* A step of the run, and what became of it. */
struct followed {
    char *step;
    uint64_t generation; /* the save that was tried last */
    bool done, failed;   /* that save is exported; some save failed, and none was exported since */
    uint32_t pause_ms;
    uint64_t next_ms; /* failed: it is tried again after this time */
    char *said;       /* the last error; or NULL */
    bool told_rest;   /* it is said that the step is being written */
};

struct series {
    struct ckpt_export export;
    struct ckpt_run *run;
    CKPT_VEC(struct followed) followed;
    size_t at;     /* in `followed`: after the step that was visited last */
    bool is_later; /* all steps have been visited once */
    struct ckpt_record record;
    sigset_t signals; /* that end the program, and WAKE */
    pthread_t waiter; /* for them */
    atomic_bool done;
    atomic_size_t nfailed; /* steps that are not exported, which is said already */
    atomic_bool failed;    /* some command, which is said already */
};

static bool is_bad(struct series *s) { return atomic_load(&s->failed) || atomic_load(&s->nfailed); }

static void say(const struct series *s, const char *step, const char *what)
{
    ckpt_cleanup(ckpt_freep) char *text =
        ckpt_asprintf("%s%s%s%s", step ? "step '" : "", step ? step : "", step ? "': " : "", what);

    ckpt_tool_print((void *)s->export.tool, CKPT_ERROR, text ? text : what);
}

/* ---- signals ---- */

static void *await_signal(void *arg)
{
    struct series *s = arg;
    int sig = 0;

    while (sigwait(&s->signals, &sig) != 0 || (sig == WAKE && !atomic_load(&s->done)))
        continue;
    if (sig == WAKE)
        return NULL;
    if (atomic_load(&s->export.writing))
        (void)fprintf(stderr, "%sckpt: interrupted: run the same command again to resume\n",
                      isatty(STDERR_FILENO) ? "\n" : "");
    if (s->export.tool->watch)
        _exit(is_bad(s) ? 1 : 0);
    (void)signal(sig, SIG_DFL);
    (void)pthread_sigmask(SIG_UNBLOCK, &s->signals, NULL);
    (void)raise(sig);
    return NULL;
}

/* Let a thread wait for SIGINT, unless this program was started to ignore it, and for SIGTERM,
 * which always ends it. */
static int take_signals(struct series *s, struct ckpt_err *err)
{
    static const int sig[] = {SIGINT, SIGTERM};
    struct sigaction was;

    (void)sigemptyset(&s->signals);
    (void)sigaddset(&s->signals, WAKE);
    for (size_t i = 0; i < sizeof sig / sizeof *sig; i++)
        if (sigaction(sig[i], NULL, &was) == 0 && (was.sa_handler != SIG_IGN || sig[i] == SIGTERM))
            (void)sigaddset(&s->signals, sig[i]);
    (void)pthread_sigmask(SIG_BLOCK, &s->signals, NULL);
    (void)signal(SIGTERM, SIG_DFL);
    const int rc = pthread_create(&s->waiter, NULL, await_signal, s);
    return rc ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

/* ---- the command after an export ---- */

/* A copy of the argument in which each {} is the directory. */
static char *with_directory(const char *arg, const char *dir)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    for (const char *p; (p = strstr(arg, "{}")); arg = p + 2)
        ckpt_str_printf(&text, "%.*s%s", (int)(p - arg), arg, dir);
    ckpt_str_printf(&text, "%s", arg);
    return strdup(ckpt_str_get(&text));
}

static int spawn(const struct series *s, char **argv, pid_t *ret)
{
    posix_spawnattr_t attr;
    sigset_t defaults = s->signals;

    (void)sigaddset(&defaults, SIGXFSZ); /* which ckpt_tool_limits ignores */
    int rc = posix_spawnattr_init(&attr);
    if (rc)
        return rc;
    (void)posix_spawnattr_setsigdefault(&attr, &defaults);
    (void)posix_spawnattr_setsigmask(&attr, &(sigset_t){0});
    (void)posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    rc = posix_spawnp(ret, argv[0], NULL, &attr, argv, environ);
    (void)posix_spawnattr_destroy(&attr);
    return rc;
}

/* Run the command of --then, and say how it failed. */
static void run_command(struct series *s, char **argv, const char *step)
{
    char what[300];
    pid_t pid;
    int status = 0, rc = spawn(s, argv, &pid);

    while (rc == 0 && waitpid(pid, &status, 0) < 0)
        rc = errno == EINTR ? 0 : errno;
    if (rc)
        (void)snprintf(what, sizeof what, "%s: %s", argv[0], strerror(rc));
    else if (WIFSIGNALED(status))
        (void)snprintf(what, sizeof what, "%s: ended by signal %d", argv[0], WTERMSIG(status));
    else
        (void)snprintf(what, sizeof what, "%s: exit status %d", argv[0], WEXITSTATUS(status));
    if (rc || status) {
        say(s, step, what);
        atomic_store(&s->failed, true);
    }
}

static int then(struct series *s, const char *step, const char *dest, struct ckpt_err *err)
{
    char **given = s->export.tool->line.rest;
    size_t n = 0;

    if (!given || !s->export.wrote)
        return 0;
    while (given[n])
        n++;
    ckpt_cleanup(ckpt_freep) char **argv = calloc(n + 1, sizeof *argv);
    if (!argv)
        return ckpt_nomem(err);
    bool good = fflush(stdout) == 0;
    for (size_t i = 0; i < n; i++)
        good = (argv[i] = with_directory(given[i], dest)) && good;
    if (good)
        run_command(s, argv, step);
    for (size_t i = 0; i < n; i++)
        free(argv[i]);
    return good ? 0 : ckpt_nomem(err);
}

/* ---- steps ---- */

/* Is the step one of --steps? Of A..B, its name must end with a number. */
static bool is_wanted(const char *steps, const char *name)
{
    const char *number = name + strlen(name), *to = strstr(steps, "..");

    if (!to)
        return true;
    while (number > name && number[-1] >= '0' && number[-1] <= '9')
        number--;
    const unsigned long long n = strtoull(number, NULL, 10);
    return *number && (to == steps || n >= strtoull(steps, NULL, 10)) &&
           (!to[2] || n <= strtoull(to + 2, NULL, 10));
}

static int check_options(const struct ckpt_tool *t, struct ckpt_err *err)
{
    const size_t from = t->steps ? strspn(t->steps, "0123456789") : 0;

    if (strstr(t->operand[0], "://"))
        return ckpt_fail(err, CKPT_USAGE, "'%s': an export is to a folder; copy that to the bucket",
                         t->operand[0]);
    if (!t->steps)
        return t->watch ? ckpt_fail(err, CKPT_USAGE, "--watch needs --steps=all|A..B|new") : 0;
    if (t->step)
        return ckpt_fail(err, CKPT_USAGE, "--step and --steps: leave one out");
    if (strcmp(t->steps, "all") != 0 && strcmp(t->steps, "new") != 0 &&
        (strncmp(t->steps + from, "..", 2) != 0 ||
         t->steps[from + 2 + strspn(t->steps + from + 2, "0123456789")]))
        return ckpt_fail(err, CKPT_USAGE,
                         "option steps: '%s' is not all, new, or numbers of steps: A..B, A.. or "
                         "..B",
                         t->steps);
    return 0;
}

/* Find the record of what became of a step, or add one. NULL: no memory. */
static struct followed *follow(struct series *s, const char *step)
{
    struct followed *f;

    if (s->at < s->followed.len && strcmp(s->followed.ptr[s->at].step, step) == 0)
        return &s->followed.ptr[s->at++];
    for (s->at = 0; s->at < s->followed.len; s->at++)
        if (strcmp(s->followed.ptr[s->at].step, step) == 0)
            return &s->followed.ptr[s->at++];
    if (ckpt_vec_add(&s->followed, &f) < 0)
        return NULL;
    if (!(f->step = strdup(step))) {
        s->followed.len--;
        return NULL;
    }
    s->at++;
    return f;
}

/* Open the step. *ret_rest: it may be exported now, when it has just appeared; else, its writer may
 * still be filling files that have their final size already. */
static int open_view(struct series *s, struct followed *f, struct ckpt_view **ret, bool *ret_rest,
                     struct ckpt_err *err)
{
    const bool watches = s->export.tool->watch;
    struct ckpt_err why = {0};

    *ret_rest = !watches;
    if (ckpt_run_view(s->run, f->step, ret, &why) == 0 &&
        (!watches || ckpt_view_at_rest(*ret, QUIET_MS, ret_rest, &why) == 0))
        return 0;
    if (!watches || why.code != CKPT_STALE)
        return ckpt_err_move(err, &why);
    ckpt_cleanup(ckpt_freep) char *text =
        ckpt_asprintf("step '%s' is being written: it is exported when its files have not changed "
                      "for %d s",
                      f->step, QUIET_MS / 1000);
    if (text && !f->told_rest)
        ckpt_tool_print((void *)s->export.tool, CKPT_INFO, text);
    f->told_rest = true;
    return 0;
}

/* Export a step. *ret_done: that, or its directory is complete; false: later. */
static int export_step(struct series *s, const struct ckpt_step *step, struct followed *f,
                       bool *ret_done, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *dest =
        ckpt_asprintf("%s/%s", s->export.tool->operand[0], step->name);
    uint64_t generation;

    if (!dest)
        return ckpt_nomem(err);
    if (open_view(s, f, &view, ret_done, err) < 0)
        return -1;
    if (!*ret_done)
        return 0;
    const bool again =
        ckpt_record_find(&s->record, step->name, &generation) && generation != step->generation;
    s->export.step = step->name;
    s->export.only_new = !again && (s->is_later || strcmp(s->export.tool->steps, "new") == 0);
    if (ckpt_export(&s->export, view, dest, err) < 0) {
        if (!again || !s->export.other)
            return -1;
        *err = (struct ckpt_err){0};
        return ckpt_fail(err, CKPT_CONFLICT,
                         "it was saved again since it was exported, and '%s' holds the save of "
                         "before: remove that directory, and the step is exported again",
                         dest);
    }
    const int rc = s->export.wrote || s->export.compared
                       ? ckpt_record_add(&s->record, step->name, step->generation, err)
                       : 0;
    return then(s, step->name, dest, err) < 0 ? -1 : rc;
}

/* Say why a step failed, once, and when it is tried again. */
static void note_failure(struct series *s, struct followed *f, const char *why)
{
    if (!f->failed)
        atomic_fetch_add(&s->nfailed, 1);
    f->failed = true;
    f->pause_ms = f->pause_ms ? f->pause_ms * 2 : FIRST_PAUSE_MS;
    if (f->pause_ms > LAST_PAUSE_MS)
        f->pause_ms = LAST_PAUSE_MS;
    f->next_ms = ckpt_now_ms() + f->pause_ms;
    if (f->said && strcmp(f->said, why) == 0)
        return;
    free(f->said);
    f->said = strdup(why);
    say(s, f->step, why);
}

/* Export a step, unless this save of it is done, or was tried a moment ago. */
static int visit(struct series *s, const struct ckpt_step *step, struct ckpt_err *err)
{
    struct followed *f = follow(s, step->name);
    struct ckpt_err why = {0};
    bool done = false;

    if (!f)
        return ckpt_nomem(err);
    if (f->generation != step->generation)
        f->done = false;
    if (f->done || (f->failed && ckpt_now_ms() < f->next_ms))
        return 0;
    f->generation = step->generation;
    if (export_step(s, step, f, &done, &why) < 0) {
        note_failure(s, f, why.text);
        return 0;
    }
    f->done = done;
    if (done && f->failed) {
        atomic_fetch_sub(&s->nfailed, 1);
        f->failed = false;
        f->pause_ms = 0;
        free(ckpt_steal(&f->said));
    }
    return 0;
}

/* Export the steps that are not exported. */
static int export_steps(struct series *s, struct ckpt_err *err)
{
    const struct ckpt_tool *t = s->export.tool;
    struct ckpt_step *step = NULL;
    size_t n = 0, wanted = 0;
    int rc = 0;

    if (ckpt_run_steps(s->run, &step, &n, err) < 0)
        return -1;
    s->at = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        if (!is_wanted(t->steps, step[i].name))
            continue;
        wanted++;
        rc = visit(s, &step[i], err);
        if (fflush(stdout) != 0)
            break; /* ckpt_tool_finish says so */
    }
    s->is_later = true;
    ckpt_steps_free(step, n);
    if (rc < 0 || wanted || t->watch)
        return rc;
    return ckpt_fail(err, CKPT_MISSING, "'%s': no step is one of --steps=%s", t->run, t->steps);
}

static int open_folder(struct series *s, struct ckpt_err *err)
{
    const struct ckpt_tool *t = s->export.tool;
    size_t made;

    if (ckpt_run_open(t->run, t->opt, &s->run, err) < 0)
        return -1;
    if (!ckpt_run_is_folder(s->run))
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s' is one checkpoint, not a folder of steps: leave --steps out",
                         t->run);
    if (t->watch)
        ckpt_run_watch(s->run);
    if (ckptfs_make_folder(t->operand[0], &made, err) < 0 ||
        ckpt_record_read(&s->record, t->operand[0], err) < 0)
        return -1;
    return export_steps(s, err);
}

static void begin_watch(const struct series *s)
{
    const struct ckpt_tool *t = s->export.tool;
    ckpt_cleanup(ckpt_freep) char *text = ckpt_asprintf(
        "watching '%s' until %s", t->run,
        sigismember(&s->signals, SIGINT)
            ? "SIGINT or SIGTERM"
            : "SIGTERM (it was started with SIGINT ignored, as shells start jobs behind '&')");

    if (text)
        ckpt_tool_print((void *)t, CKPT_INFO, text);
}

/* Go on for ever: a signal ends the program. */
static int watch(struct series *s, struct ckpt_err *err)
{
    char said[sizeof err->text] = "";

    begin_watch(s);
    for (;;) {
        const uint64_t begin = ckpt_now_ms();
        struct ckpt_err why = {0};
        const bool opening = !s->run;
        int rc = s->run ? ckpt_run_scan(s->run, NULL, &why) : open_folder(s, &why);
        const uint64_t ms =
            ckptfs_scan_pause(s->export.tool->run, opening ? 0 : ckpt_now_ms() - begin);
        if (rc == 0 && !opening)
            rc = export_steps(s, &why);
        if (ferror(stdout) || (rc < 0 && opening && (s->run || why.code != CKPT_MISSING)))
            return ckpt_err_move(err, &why);
        if (rc < 0 && strcmp(said, why.text) != 0)
            ckpt_tool_print((void *)s->export.tool, CKPT_WARNING, why.text);
        memcpy(said, why.text, sizeof said);
        ckpt_pause_ms(ms);
    }
}

static int export_one(struct series *s, struct ckpt_err *err)
{
    const struct ckpt_tool *t = s->export.tool;
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;

    if (ckpt_tool_open(t, &view, err) < 0 || ckpt_export(&s->export, view, t->operand[0], err) < 0)
        return -1;
    return then(s, NULL, t->operand[0], err);
}

/* Offer the folder of DEST, as far as it is there, for the temporary file of what has to be
 * decompressed. */
static int offer_cache_dir(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(t->operand[0]);
    char *folder = copy;
    struct stat st;

    if (!copy)
        return ckpt_nomem(err);
    do
        folder = dirname(folder);
    while (stat(folder, &st) < 0 && strcmp(folder, ".") != 0 && strcmp(folder, "/") != 0);
    return ckpt_options_offer_cache_dir(t->opt, folder, err);
}

int ckpt_cmd_export(const struct ckpt_tool *t, struct ckpt_err *err)
{
    struct series s = {.export.tool = t};

    if (check_options(t, err) < 0 || offer_cache_dir(t, err) < 0 || take_signals(&s, err) < 0)
        return -1;
    const int rc = !t->steps  ? export_one(&s, err)
                   : t->watch ? watch(&s, err)
                              : open_folder(&s, err);
    atomic_store(&s.done, true);
    (void)pthread_kill(s.waiter, WAKE);
    (void)pthread_join(s.waiter, NULL);
    for (size_t i = 0; i < s.followed.len; i++) {
        free(s.followed.ptr[i].step);
        free(s.followed.ptr[i].said);
    }
    ckpt_vec_release(&s.followed);
    ckpt_record_release(&s.record);
    ckpt_run_close(s.run);
    return rc < 0 ? -1 : is_bad(&s) ? 1 : CKPT_TOOL_GOOD;
}

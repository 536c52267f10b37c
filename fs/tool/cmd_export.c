/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt export: one step, or a directory for each of several, and a command after each. */
#include <errno.h>
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
#include "common.h"
#include "tool.h"

extern char **environ;

enum { WAKE = SIGUSR1 }; /* ends the thread that waits for signals */

struct series {
    struct ckpt_export export;
    struct ckpt_run *run;
    struct ckpt_step *step; /* the steps when they were last listed */
    size_t n;
    sigset_t signals; /* that end the program, and WAKE */
    pthread_t waiter; /* for them */
    atomic_bool done;
    atomic_bool failed; /* some step or command, which is said already */
};

static void failed(struct series *s, const char *step, const char *what)
{
    ckpt_cleanup(ckpt_freep) char *text =
        ckpt_asprintf("%s%s%s%s", step ? "step '" : "", step ? step : "", step ? "': " : "", what);

    ckpt_tool_print((void *)s->export.tool, CKPT_ERROR, text ? text : what);
    atomic_store(&s->failed, true);
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
        _exit(atomic_load(&s->failed) ? 1 : 0);
    (void)signal(sig, SIG_DFL);
    (void)pthread_sigmask(SIG_UNBLOCK, &s->signals, NULL);
    (void)raise(sig);
    return NULL;
}

/* Let a thread wait for SIGINT and SIGTERM, unless this program was started to ignore them. */
static int take_signals(struct series *s, struct ckpt_err *err)
{
    static const int sig[] = {SIGINT, SIGTERM};
    struct sigaction was;

    (void)sigemptyset(&s->signals);
    (void)sigaddset(&s->signals, WAKE);
    for (size_t i = 0; i < sizeof sig / sizeof *sig; i++)
        if (sigaction(sig[i], NULL, &was) == 0 && was.sa_handler != SIG_IGN)
            (void)sigaddset(&s->signals, sig[i]);
    (void)pthread_sigmask(SIG_BLOCK, &s->signals, NULL);
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
    if (rc || status)
        failed(s, step, what);
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

/* Was the same save of the step listed before? */
static bool is_known(const struct ckpt_step *known, size_t n, const struct ckpt_step *step)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(known[i].name, step->name) == 0)
            return known[i].generation == step->generation;
    return false;
}

static int export_step(struct series *s, const char *step, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *dest = ckpt_asprintf("%s/%s", s->export.tool->operand[0], step);

    s->export.step = step;
    if (!dest)
        return ckpt_nomem(err);
    if (ckpt_run_view(s->run, step, &view, err) < 0 || ckpt_export(&s->export, view, dest, err) < 0)
        return -1;
    return then(s, step, dest, err);
}

/* Export the steps that were not there when this was called before. */
static int export_steps(struct series *s, struct ckpt_err *err)
{
    const struct ckpt_tool *t = s->export.tool;
    struct ckpt_step *known = s->step;
    const size_t nknown = s->n;
    size_t wanted = 0;

    if (ckpt_run_steps(s->run, &s->step, &s->n, err) < 0) {
        s->step = known;
        return -1;
    }
    s->export.only_new = known || strcmp(t->steps, "new") == 0;
    for (size_t i = 0; i < s->n; i++) {
        struct ckpt_err why = {0};
        if (!is_wanted(t->steps, s->step[i].name))
            continue;
        wanted++;
        if (!is_known(known, nknown, &s->step[i]) && export_step(s, s->step[i].name, &why) < 0)
            failed(s, s->step[i].name, why.text);
        if (fflush(stdout) != 0)
            break; /* ckpt_tool_finish says so */
    }
    ckpt_steps_free(known, nknown);
    return wanted || t->watch ? 0
                              : ckpt_fail(err, CKPT_MISSING, "'%s': no step is one of --steps=%s",
                                          t->run, t->steps);
}

static int open_folder(struct series *s, struct ckpt_err *err)
{
    const struct ckpt_tool *t = s->export.tool;

    if (ckpt_run_open(t->run, t->opt, &s->run, err) < 0)
        return -1;
    if (!ckpt_run_is_folder(s->run))
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s' is one checkpoint, not a folder of steps: leave --steps out",
                         t->run);
    if (mkdir(t->operand[0], 0777) < 0 && errno != EEXIST)
        return ckpt_fail_errno(err, errno, "%s", t->operand[0]);
    return export_steps(s, err);
}

/* Go on for ever: a signal ends the program. */
static int watch(struct series *s, struct ckpt_err *err)
{
    char said[sizeof err->text] = "";

    for (;;) {
        const uint64_t begin = ckpt_now_ms();
        struct ckpt_err why = {0};
        bool changed = false, opening = !s->run;
        int rc = s->run ? ckpt_run_scan(s->run, &changed, &why) : open_folder(s, &why);
        const uint64_t ms =
            ckptfs_scan_pause(s->export.tool->run, opening ? 0 : ckpt_now_ms() - begin);
        if (rc == 0 && changed)
            rc = export_steps(s, &why);
        if (ferror(stdout) || (rc < 0 && opening && (s->run || why.code != CKPT_MISSING)))
            return ckpt_err_move(err, &why);
        if (rc < 0 && strcmp(said, why.text) != 0)
            ckpt_tool_print((void *)s->export.tool, CKPT_WARNING, why.text);
        memcpy(said, why.text, sizeof said);
        (void)nanosleep(&(struct timespec){(time_t)(ms / 1000), (long)(ms % 1000) * 1000000}, NULL);
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

int ckpt_cmd_export(const struct ckpt_tool *t, struct ckpt_err *err)
{
    struct series s = {.export.tool = t};

    if (check_options(t, err) < 0 || take_signals(&s, err) < 0)
        return -1;
    const int rc = !t->steps  ? export_one(&s, err)
                   : t->watch ? watch(&s, err)
                              : open_folder(&s, err);
    atomic_store(&s.done, true);
    (void)pthread_kill(s.waiter, WAKE);
    (void)pthread_join(s.waiter, NULL);
    ckpt_steps_free(s.step, s.n);
    ckpt_run_close(s.run);
    return rc < 0 ? -1 : atomic_load(&s.failed) ? 1 : CKPT_TOOL_GOOD;
}

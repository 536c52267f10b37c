/* SPDX-License-Identifier: Apache-2.0 */
/* All commands of ckpt and ckpt-load begin here: these functions parse the command line, open the
 * run and the view that it selects, and print what went wrong. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "common.h"
#include "tool.h"

enum { MOST_TRIES = 8 }; /* attempts to open older steps, to suggest one that can be read */

int ckpt_tool_init(struct ckpt_tool *t, const char *program, char **argv, uint32_t *ret_command,
                   struct ckpt_err *err)
{
    *t = (struct ckpt_tool){.load.size = sizeof t->load, .program = program};
    if (ckpt_options_new(&t->opt, err) < 0)
        return -1;
    t->line = (struct ckptfs_cmdline){.into = t, .opt = t->opt, .of = CKPTFS_TOOL};
    if (ckptfs_cmdline_parse(&t->line, argv, err) < 0)
        return -1;
    if (t->line.version)
        (void)printf("ckpt %s\n", ckpt_version());
    *ret_command = t->line.command ? t->line.command->bit : 0;
    if (*ret_command) {
        t->run = t->line.operand[1];
        t->operand = t->line.operand + 2;
    }
    return 0;
}

void ckpt_tool_release(struct ckpt_tool *t)
{
    ckptfs_cmdline_release(&t->line);
    ckpt_options_free(t->opt);
    free(t->step);
    free(t->steps);
    free(t->other_step);
    free(t->base_version);
    free(t->delta_from);
    free(t->delta_format);
    ckpt_options_free(t->other);
    free(t->svg);
    free(t->part);
    free(t->layout);
    free(t->transport);
}

void ckpt_tool_print(void *tool, enum ckpt_log_severity severity, const char *text)
{
    static const char *const word[] = {
        [CKPT_ERROR] = "", [CKPT_WARNING] = "warning: ", [CKPT_INFO] = "note: "};
    const struct ckpt_tool *t = tool;

    if (severity > CKPT_INFO)
        return;
    ckpt_cleanup(ckpt_freep) char *line =
        t->log_json ? ckptfs_log_json(t->program, severity, text) : NULL;
    if (line)
        (void)fprintf(stderr, "%s\n", line);
    else
        (void)fprintf(stderr, "%s: %s%s\n", t->program, word[severity], text);
}

void ckpt_tool_log(struct ckpt_tool *t) { ckpt_options_set_log(t->opt, ckpt_tool_print, t); }

int ckpt_tool_finish(const struct ckpt_tool *t, int rc, struct ckpt_err *err)
{
    if (rc >= 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = ckpt_fail(err, CKPT_IO, "the output could not be written");
    if (rc >= 0)
        return rc;
    ckpt_tool_print((void *)t, CKPT_ERROR, err->text);
    return err->code == CKPT_USAGE ? 2 : 1;
}

void ckpt_tool_limits(void)
{
    const struct sigaction ignore = {.sa_handler = SIG_IGN};

    (void)sigaction(SIGXFSZ, &ignore, NULL);
    ckptfs_allow_many_files();
}

/* The newest step before the latest one that can be opened, among those that are tried; n: none. */
static size_t newest_readable(struct ckpt_run *run, const struct ckpt_step *steps, size_t n)
{
    for (size_t i = n, tries = 0; i-- > 0 && tries < MOST_TRIES;) {
        ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
        struct ckpt_err ignored = {0};
        if (!steps[i].is_latest && ckpt_run_view(run, steps[i].name, &view, &ignored) == 0)
            return i;
        tries += !steps[i].is_latest;
    }
    return n;
}

/* Fail because the latest of several steps could not be opened, and suggest what to do. */
static int fail_latest(struct ckpt_run *run, struct ckpt_err *err)
{
    const struct ckpt_err why = *err;
    const char *latest = NULL;
    struct ckpt_step *steps = NULL;
    size_t n = 0;

    if (ckpt_run_steps(run, &steps, &n, NULL) < 0)
        return -1;
    for (size_t i = 0; i < n; i++)
        if (steps[i].is_latest)
            latest = steps[i].name;
    if (latest && n > 1) {
        const size_t other = newest_readable(run, steps, n);
        memset(err, 0, sizeof *err);
        if (other < n)
            (void)ckpt_fail(err, why.code,
                            "%.800s (step '%.40s' is the latest; the newest that can be read is "
                            "'%.40s': --step %.40s)",
                            why.text, latest, steps[other].name, steps[other].name);
        else
            (void)ckpt_fail(err, why.code,
                            "%.800s (step '%.40s' is the latest; --step takes another)", why.text,
                            latest);
    }
    ckpt_steps_free(steps, n);
    return -1;
}

int ckpt_tool_open_run(const char *path, const struct ckpt_options *opt, const char *want,
                       struct ckpt_run **ret_run, struct ckpt_view **ret_view, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_run_closep) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckpt_freep) char *step = NULL;

    if (ckpt_run_open(path, opt, &run, err) < 0 ||
        (want && ckpt_run_find_step(run, want, &step, err) < 0))
        return -1;
    if (ckpt_run_view(run, step, ret_view, err) < 0)
        return step ? -1 : fail_latest(run, err);
    if (ret_run)
        *ret_run = ckpt_steal(&run);
    return 0;
}

int ckpt_tool_open(const struct ckpt_tool *t, struct ckpt_view **ret_view, struct ckpt_err *err)
{
    return ckpt_tool_open_run(t->run, t->opt, t->step, NULL, ret_view, err);
}

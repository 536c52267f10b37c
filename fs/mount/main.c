/* SPDX-License-Identifier: Apache-2.0 */
/* ckptfs: mount a training run. */
#include <syslog.h>
#include <unistd.h>

#include <fuse_lowlevel.h>

#include "base/err.h"
#include "common.h"
#include "mount/config.h"
#include "mount/daemon.h"
#include "mount/log.h"
#include "mount/mount.h"

/* The only global variable of the program, because libfuse's log callback has no context argument.
 */
static struct ckptfs_log program_log = {.least = CKPT_WARNING, .relay = -1};

static void libfuse_line(enum fuse_log_level level, const char *fmt, va_list ap)
{
    ckptfs_vlogf(&program_log,
                 level <= FUSE_LOG_ERR       ? CKPT_ERROR
                 : level <= FUSE_LOG_WARNING ? CKPT_WARNING
                                             : CKPT_INFO,
                 fmt, ap);
}

/* Log what the library notes of a checkpoint for everybody, also in the foreground without -d. */
static void library_line(void *ctx, enum ckpt_log_severity severity, const char *text)
{
    struct ckptfs_log log = *(const struct ckptfs_log *)ctx;

    log.least = CKPT_INFO;
    ckptfs_log_line(&log, severity, text);
}

static int run(struct ckptfs_config *c, struct ckpt_err *err)
{
    int ready = -1;

    openlog("ckptfs", LOG_PID, LOG_DAEMON);
    if (c->debug || !c->foreground)
        program_log.least = CKPT_INFO;
    ckpt_options_set_log(c->opt, library_line, &program_log);
    fuse_set_log_func(libfuse_line);
    ckptfs_allow_many_files();
    if (ckptfs_paths_resolve(c, &program_log, err) < 0)
        return -1;
    if (!c->foreground && ckptfs_daemon_fork(&ready, err) < 0)
        return -1;
    if (chdir("/") < 0)
        return ckpt_fail(err, CKPT_IO, "cannot change to the root directory");
    return ckptfs_session(c, &program_log, ready, err);
}

int main(int argc, char **argv)
{
    (void)argc;
    struct ckptfs_config config;
    struct ckpt_err err = {0};
    int status = 0;

    const int parsed = ckptfs_config_parse(argv, &config, &err);
    program_log.json = config.log_json;
    if (parsed < 0 || (config.run && run(&config, &err) < 0)) {
        ckptfs_logf(&program_log, CKPT_ERROR, "%s", err.text);
        status = err.code == CKPT_USAGE ? 2 : 1;
    }
    ckptfs_config_release(&config);
    return status;
}

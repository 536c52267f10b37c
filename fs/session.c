/* SPDX-License-Identifier: Apache-2.0 */
/* Open, mount, announce, serve, unmount. */
#include "session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <fuse_lowlevel.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "daemon.h"
#include "mount.h"
#include "mounts.h"
#include "ops.h"
#include "privilege.h"
#include "readahead.h"
#include "signals.h"
#include "tree.h"

/* A value inside -o: FUSE splits at commas and undoes backslashes. The caller frees it. */
static char *escape(const char *value)
{
    char *text = malloc(2 * strlen(value) + 1), *out = text;

    for (; text && *value; value++) {
        if (*value == ',' || *value == '\\')
            *out++ = '\\';
        *out++ = *value;
    }
    if (text)
        *out = '\0';
    return text;
}

static struct fuse_session *session_new(struct ckptfs *fs)
{
    const struct ckptfs_config *c = fs->config;
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    ckpt_cleanup(ckpt_freep) char *name = escape(c->run), *words = NULL;
    struct fuse_session *se = NULL;

    words = ckpt_asprintf(
        "ro,nosuid,nodev,default_permissions,subtype=ckptfs,max_read=%d,fsname=%s%s%s",
        CKPTFS_MAX_READ, name ? name : "", c->allow_other ? ",allow_other" : "",
        c->fuse_words ? c->fuse_words : "");
    if (name && words && fuse_opt_add_arg(&args, "ckptfs") == 0 &&
        fuse_opt_add_arg(&args, "-o") == 0 && fuse_opt_add_arg(&args, words) == 0)
        se = fuse_session_new(&args, &ckptfs_ops, sizeof ckptfs_ops, fs);
    fuse_opt_free_args(&args);
    return se;
}

/* Answer INIT, which the kernel sent when it mounted, before anybody is told of the mount: only
 * then is the read-ahead ours to set. */
static int answer_init(struct fuse_session *se, struct ckpt_err *err)
{
    struct fuse_buf buf = {0};
    int n;

    do
        n = fuse_session_receive_buf(se, &buf);
    while (n == -EINTR);
    if (n > 0)
        fuse_session_process_buf(se, &buf);
    free(buf.mem);
    if (n <= 0 || fuse_session_exited(se))
        return ckpt_fail(err, CKPT_IO, "the kernel's FUSE does not answer as expected");
    return 0;
}

static void describe(const struct ckptfs *fs)
{
    const struct ckptfs_negotiated *n = &fs->negotiated;
    const struct ckptfs_config *c = fs->config;

    ckptfs_logf(fs->log, CKPT_INFO, "%s on %s: ckptfs %s, libfuse %s, protocol %u.%u", c->run,
                c->mountpoint, ckpt_version(), fuse_pkgversion(), n->proto_major, n->proto_minor);
    ckptfs_logf(fs->log, CKPT_INFO, "requests up to %u KiB, %u threads, read-ahead %u KiB, io=%s",
                n->max_read / 1024, c->threads, n->readahead_kib,
                c->direct ? "direct" : "buffered");
    if (c->readahead_kib > n->readahead_kib && *n->dev)
        ckptfs_logf(fs->log, CKPT_INFO,
                    "to make sequential reads a third faster: "
                    "echo %u | sudo tee /sys/class/bdi/%s/read_ahead_kb",
                    c->readahead_kib, n->dev);
    if (c->direct && !n->direct_mmap)
        ckptfs_logf(fs->log, CKPT_WARNING,
                    "io=direct holds only for files opened with O_DIRECT: to map files as well it "
                    "needs libfuse 3.16 and Linux 6.6 (here libfuse %s, protocol %u.%u)",
                    fuse_pkgversion(), n->proto_major, n->proto_minor);
    if (c->null_reads)
        ckptfs_logf(fs->log, CKPT_WARNING, "-o null: every file reads as one repeated byte");
}

static int loop(struct ckptfs *fs, struct fuse_session *se)
{
#if FUSE_USE_VERSION >= FUSE_MAKE_VERSION(3, 12)
    struct fuse_loop_config *config = fuse_loop_cfg_create();

    if (!config)
        return -ENOMEM;
    fuse_loop_cfg_set_max_threads(config, fs->config->threads);
    int rc = fuse_session_loop_mt(se, config);
    fuse_loop_cfg_destroy(config);
    return rc;
#else
    struct fuse_loop_config config = {.max_idle_threads = fs->config->threads};
    return fuse_session_loop_mt(se, &config);
#endif
}

/* The mount is up. Serve it until it ends. */
static int serve(struct ckptfs *fs, struct fuse_session *se, struct ckptfs_log *log, int ready,
                 struct ckpt_err *err)
{
    struct ckptfs_signals signals;

    if (ckptfs_refresh_start(&fs->refresh, err) < 0)
        return -1;
    if (ckptfs_signals_start(&signals, fs, se, err) < 0) {
        ckptfs_refresh_stop(&fs->refresh);
        return -1;
    }
    log->to_syslog = ready >= 0;
    ckptfs_daemon_ready(ready);
    describe(fs);
    int rc = loop(fs, se);
    ckptfs_dispatch_stop(&fs->dispatch);
    ckptfs_privilege_raise();
    fuse_session_unmount(se);
    ckptfs_refresh_stop(&fs->refresh);
    bool asked = atomic_load(&signals.quitting);
    ckptfs_signals_stop(&signals);
    if (rc < 0 && !asked)
        return ckpt_fail_errno(err, -rc, "serving %s", fs->config->mountpoint);
    return 0;
}

static int mount_and_serve(struct ckptfs *fs, struct ckptfs_config *config, struct ckptfs_log *log,
                           int ready, struct ckpt_err *err)
{
    struct fuse_session *se = session_new(fs);
    int rc = -1;

    if (!se)
        return ckpt_fail(err, CKPT_USAGE, "FUSE did not take the options");
    ckptfs_signals_block();
    ckptfs_privilege_raise();
    int mounted = fuse_session_mount(se, fs->config->mountpoint);
    ckptfs_privilege_lower();
    ckptfs_mountpoint_unlock(config);
    if (mounted < 0) {
        (void)ckpt_fail(err, CKPT_IO, "mounting on %s failed", fs->config->mountpoint);
    } else if (answer_init(se, err) == 0) {
        ckptfs_readahead_set(fs);
        rc = serve(fs, se, log, ready, err);
    }
    if (rc < 0 && mounted == 0) {
        ckptfs_privilege_raise();
        fuse_session_unmount(se);
    }
    fuse_session_destroy(se);
    return rc;
}

int ckptfs_session(struct ckptfs_config *config, struct ckptfs_log *log, int ready,
                   struct ckpt_err *err)
{
    struct ckptfs fs = {.config = config,
                        .log = log,
                        .buffers = {.constant = config->null_reads},
                        .started = time(NULL)};
    bool dropped;
    int rc;

    if (ckptfs_privilege_drop(&dropped, err) < 0)
        return -1;
    if (ckptfs_nodes_init(&fs.nodes) < 0 || ckptfs_dispatch_init(&fs.dispatch, config->threads) < 0)
        return ckpt_nomem(err);
    rc = ckptfs_refresh_open(&fs.refresh, config, log, err);
    if (rc == 0)
        rc = mount_and_serve(&fs, config, log, ready, err);
    ckptfs_tree_close(&fs);
    ckptfs_refresh_release(&fs.refresh);
    ckptfs_nodes_release(&fs.nodes);
    ckptfs_buffers_release(&fs.buffers);
    ckptfs_dispatch_release(&fs.dispatch);
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Open, mount, announce, serve, unmount. */
#include "mount/mount.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#include <fuse_lowlevel.h>

#include "base/err.h"
#include "mount/daemon.h"
#include "mount/mounter.h"
#include "mount/reply.h"
#include "mount/sandbox.h"
#include "mount/signals.h"
#include "mount/tree.h"

/* A mount's life. */
struct session {
    struct ckptfs fs;
    struct ckptfs_config *config;
    struct ckptfs_log *log;
    struct ckptfs_mounter mounter;
    struct ckptfs_announcement news;
    struct fuse_session *se;
};

static int session_new(struct session *s, struct ckpt_err *err)
{
    struct fuse_args args;

    if (ckptfs_session_args(s->config, &args) < 0)
        return ckpt_nomem(err);
    s->se = fuse_session_new(&args, &ckptfs_ops, sizeof ckptfs_ops, &s->fs);
    fuse_opt_free_args(&args);
    return s->se ? 0 : ckpt_fail(err, CKPT_USAGE, "FUSE did not accept the options");
}

/* Answer INIT, which the kernel sends when it mounts, before the mount is announced: the read-ahead
 * can be set only after it. */
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
    if (n == 0 || n == -ECONNABORTED)
        return ckpt_fail(err, CKPT_IO, "it was unmounted before it served anything");
    if (n < 0 || fuse_session_exited(se))
        return ckpt_fail(err, CKPT_IO, "the kernel's FUSE does not answer as expected");
    return 0;
}

static void describe(const struct ckptfs *fs)
{
    const struct ckptfs_negotiated *n = &fs->negotiated;
    const struct ckptfs_config *c = fs->config;
    char sandbox[64];

    ckptfs_logf(fs->log, CKPT_INFO, "%s on %s: ckptfs %s, libfuse %s, protocol %u.%u", c->run,
                c->mountpoint, ckpt_version(), fuse_pkgversion(), n->proto_major, n->proto_minor);
    ckptfs_logf(fs->log, CKPT_INFO, "sandbox: %s",
                ckptfs_sandbox_text(&fs->sandbox, sandbox, sizeof sandbox));
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

/* Requests are served until the mount ends, which reading the connection tells by ENODEV: libfuse
 * returns 0. If it ends while a request is being handed over, or by an abort, the kernel says
 * ECONNABORTED instead. */
static int loop(struct ckptfs *fs, struct fuse_session *se)
{
#if FUSE_USE_VERSION >= FUSE_MAKE_VERSION(3, 12)
    struct fuse_loop_config *config = fuse_loop_cfg_create();

    if (!config)
        return -ENOMEM;
    /* requests that wait for storage do so on threads of their own */
    fuse_loop_cfg_set_max_threads(config, CKPTFS_MOST_JOBS + fs->config->threads);
    fuse_loop_cfg_set_idle_threads(config, fs->config->threads);
    int rc = fuse_session_loop_mt(se, config);
    fuse_loop_cfg_destroy(config);
#else
    struct fuse_loop_config config = {.max_idle_threads = fs->config->threads};
    int rc = fuse_session_loop_mt(se, &config);
#endif
    return rc == -ECONNABORTED ? 0 : rc;
}

/* Is the session still mounted? If it was unmounted or its connection aborted from outside, another
 * mount may be at the path by now. */
static bool is_mounted(const struct fuse_session *se)
{
    struct pollfd connection = {.fd = fuse_session_fd((struct fuse_session *)se)};

    return poll(&connection, 1, 0) <= 0 || !(connection.revents & POLLERR);
}

static void unmount(struct session *s)
{
    struct ckpt_err err = {0};

    if (is_mounted(s->se) && ckptfs_mounter_unmount(&s->mounter, &err) < 0)
        ckptfs_logf(s->log, CKPT_WARNING, "%s; fusermount3 -u %s does it", err.text,
                    s->config->mountpoint);
}

/* Serve the finished mount until it ends. */
static int serve(struct session *s, struct ckpt_err *err)
{
    struct ckptfs *fs = &s->fs;
    struct ckptfs_signals signals;

    /* libfuse's threads say by perror(3) why they end, and are cancelled meanwhile. While nothing
     * was written to stderr, perror opens it once more, and a cancelled thread would leak that. */
    (void)fwide(stderr, -1);
    if (ckptfs_refresh_start(&fs->refresh, err) < 0)
        return -1;
    if (ckptfs_signals_start(&signals, fs, s->se, &s->mounter, err) < 0) {
        ckptfs_refresh_stop(&fs->refresh);
        return -1;
    }
    if (s->news.ready >= 0) {
        ckptfs_mounter_detach(&s->mounter);
        s->log->relay = s->mounter.fd;
    }
    ckptfs_announce(&s->news);
    describe(fs);
    int rc = loop(fs, s->se);
    unmount(s);
    ckptfs_refresh_stop(&fs->refresh);
    bool asked = atomic_load(&signals.quitting);
    ckptfs_signals_stop(&signals);
    if (rc < 0 && !asked)
        return ckpt_fail_errno(err, -rc, "serving %s", s->config->mountpoint);
    return 0;
}

/* Is fusermount3 missing, without which only root can mount? libfuse looks for it where it was
 * installed, and in PATH. */
static bool lacks_fusermount(void)
{
    static const char *const paths[] = {"/usr/bin/fusermount3", "/bin/fusermount3",
                                        "/usr/local/bin/fusermount3"};

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (access(paths[i], X_OK) == 0)
            return false;
    return geteuid() != 0;
}

/* Put the session on the connection that the mounter has opened. */
static int mount_session(struct session *s, struct ckpt_err *err)
{
    char path[32];
    int fd = -1;

    ckptfs_signals_block();
    int rc = ckptfs_mounter_mount(&s->mounter, &fd, err);
    ckptfs_mountpoint_unlock(s->config);
    if (rc < 0)
        return ckpt_fail(
            err, CKPT_IO, "mounting on %s failed%s%s", s->config->mountpoint,
            lacks_fusermount() ? ": fusermount3 is not installed (Debian's package fuse3)" : "",
            access("/dev/fuse", R_OK | W_OK) < 0
                ? ": /dev/fuse cannot be opened; without FUSE, `ckpt export` writes the model "
                  "directory, and Python (import ckptfs) reads the run"
                : "");
    (void)snprintf(path, sizeof path, "/dev/fd/%d", fd);
    if (fuse_session_mount(s->se, path) == 0)
        return 0;
    (void)close(fd);
    (void)ckptfs_mounter_unmount(&s->mounter, NULL);
    return ckpt_fail(err, CKPT_IO, "libfuse did not accept the connection");
}

static int mount_and_serve(struct session *s, struct ckpt_err *err)
{
    if (session_new(s, err) < 0 || mount_session(s, err) < 0)
        return -1;
    int rc = answer_init(s->se, err);
    if (rc == 0) {
        ckptfs_mounter_readahead(&s->mounter, &s->fs.negotiated);
        rc = serve(s, err);
    }
    if (rc < 0)
        unmount(s);
    return rc;
}

static int open_and_serve(struct session *s, struct ckpt_err *err)
{
    struct ckptfs *fs = &s->fs;

    if (ckptfs_nodes_init(&fs->nodes) < 0)
        return ckpt_nomem(err);
    ckptfs_admission_init(&fs->admission);
    int rc = ckptfs_refresh_open(&fs->refresh, s->config, s->log, &fs->sandbox, err);
    if (rc == 0)
        rc = mount_and_serve(s, err);
    if (s->se)
        fuse_session_destroy(s->se);
    ckptfs_tree_close(fs);
    ckptfs_refresh_release(&fs->refresh);
    ckptfs_nodes_release(&fs->nodes);
    ckptfs_buffers_release(&fs->buffers);
    ckptfs_admission_release(&fs->admission);
    return rc;
}

int ckptfs_session(struct ckptfs_config *config, struct ckptfs_log *log, int ready,
                   struct ckpt_err *err)
{
    struct session s = {.fs = {.config = config,
                               .log = log,
                               .buffers = {.constant = config->null_reads},
                               .started = time(NULL)},
                        .config = config,
                        .log = log};
    int rc = -1;

    if (ckptfs_mounter_start(&s.mounter, config, log, err) < 0)
        return -1;
    ckptfs_announcement_open(&s.news, ready);
    if (ckpt_options_connect(config->opt, config->run, err) < 0) {
        ckptfs_mounter_stop(&s.mounter);
        return -1;
    }
    /* a checkpoint's files are read without privileges, in the sandbox */
    if (ckptfs_privilege_drop(err) == 0 &&
        (!config->sandbox || ckptfs_sandbox_enter(config, &s.fs.sandbox, err) == 0))
        rc = open_and_serve(&s, err);
    if (rc < 0 && log->relay >= 0)
        ckptfs_logf(log, CKPT_ERROR, "%s", err->text);
    log->relay = -1;
    ckptfs_mounter_stop(&s.mounter);
    return rc;
}

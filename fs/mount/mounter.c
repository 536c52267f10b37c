/* SPDX-License-Identifier: Apache-2.0 */
/* The mounter process: it receives requests over a socket pair, and libfuse does the mounting. */
#include "mount/mounter.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <syslog.h>
#include <unistd.h>

#include <fuse_lowlevel.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "mount/daemon.h"

enum { MOUNT = 'm', READAHEAD = 'r', DETACH = 'd', UNMOUNT = 'u' };
enum { ANSWER_MS = 30000 };

struct answer {
    int errnum; /* 0: success */
    struct ckptfs_negotiated negotiated;
};

/* ---- both sides ---- */

int ckptfs_session_args(const struct ckptfs_config *c, struct fuse_args *ret)
{
    ckpt_cleanup(ckpt_freep) char *name = ckptfs_fuse_escape(c->run), *words = NULL;

    *ret = (struct fuse_args)FUSE_ARGS_INIT(0, NULL);
    words = ckpt_asprintf(
        "ro,nosuid,nodev,default_permissions,subtype=ckptfs,max_read=%d,fsname=%s%s%s",
        CKPTFS_MAX_READ, name ? name : "", c->allow_other ? ",allow_other" : "",
        c->fuse_words ? c->fuse_words : "");
    if (name && words && fuse_opt_add_arg(ret, "ckptfs") == 0 && fuse_opt_add_arg(ret, "-o") == 0 &&
        fuse_opt_add_arg(ret, words) == 0)
        return 0;
    fuse_opt_free_args(ret);
    return -1;
}

/* ---- the process ---- */

struct mounting {
    const struct ckptfs_config *config;
    struct ckptfs_log *log;
    struct fuse_session *se; /* the session of the mount; NULL: not mounted */
};

/* Send an answer, with the descriptor unless it is -1. */
static void reply(int to, const struct answer *a, int fd)
{
    struct iovec data = {.iov_base = (void *)a, .iov_len = sizeof *a};
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr msg = {.msg_iov = &data, .msg_iovlen = 1};

    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    (void)sendmsg(to, &msg, MSG_NOSIGNAL);
}

/* Replace the descriptor of the connection in the session by one that is closed. Otherwise this
 * process would keep the mount alive after the daemon's end, and nobody would answer its requests.
 */
static void forget_connection(struct fuse_session *se)
{
    ckpt_cleanup(ckpt_closep) int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    if (null < 0 || dup3(null, fuse_session_fd(se), O_CLOEXEC) < 0)
        (void)close(fuse_session_fd(se));
}

static void do_mount(struct mounting *m, int to)
{
    static const struct fuse_lowlevel_ops none;
    struct answer a = {.errnum = ENOMEM};
    struct fuse_args args;

    if (ckptfs_session_args(m->config, &args) == 0) {
        m->se = fuse_session_new(&args, &none, sizeof none, NULL);
        fuse_opt_free_args(&args);
        a.errnum = EINVAL;
    }
    if (m->se && fuse_session_mount(m->se, m->config->mountpoint) < 0) {
        fuse_session_destroy(m->se);
        m->se = NULL;
        a.errnum = EIO;
    }
    if (!m->se) {
        reply(to, &a, -1);
        return;
    }
    a.errnum = 0;
    reply(to, &a, fuse_session_fd(m->se));
    forget_connection(m->se);
}

static unsigned read_back(const char *path)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    char text[32] = "";

    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        return 0;
    return (unsigned)strtoul(text, NULL, 10);
}

static bool write_text(const char *path, const char *text)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
}

/* Raise the mount's read-ahead to the configured value: the kernel starts every FUSE mount with 128
 * KiB, whatever the daemon asks for, which makes buffered readers a third slower; only root may
 * raise it. Fills n->dev, readahead_kib (the value read back) and readahead_refused. A failure is
 * not an error, since only speed depends on it. */
static void set_readahead(const struct ckptfs_config *config, struct ckptfs_negotiated *n)
{
    const unsigned want = config->readahead_kib;
    char path[80], text[16];
    struct statx st;

    /* only the device, which the kernel knows without asking the daemon */
    if (statx(AT_FDCWD, config->mountpoint, AT_STATX_DONT_SYNC, 0, &st) < 0)
        return;
    (void)snprintf(n->dev, sizeof n->dev, "%u:%u", st.stx_dev_major, st.stx_dev_minor);
    (void)snprintf(path, sizeof path, "/sys/class/bdi/%s/read_ahead_kb", n->dev);
    (void)snprintf(text, sizeof text, "%u", want);
    if (want)
        n->readahead_refused = !write_text(path, text);
    n->readahead_kib = read_back(path);
}

/* Handle one request. False: the process should end. */
static bool serve(struct mounting *m, int fd, char request)
{
    struct answer a = {0};

    switch (request) {
    case MOUNT:
        do_mount(m, fd);
        return true;
    case READAHEAD:
        set_readahead(m->config, &a.negotiated);
        break;
    case DETACH:
        ckptfs_daemon_detach();
        m->log->to_syslog = true;
        break;
    case UNMOUNT:
        if (m->se)
            fuse_session_unmount(m->se);
        break;
    default:
        return false;
    }
    reply(fd, &a, -1);
    return true;
}

/* Close all inherited descriptors, such as the lock on the mountpoint and the pipe on which the
 * parent waits. */
static void close_all_but(int fd)
{
    if (dup2(fd, STDERR_FILENO + 1) < 0)
        _exit(EXIT_FAILURE);
#ifdef SYS_close_range
    if (syscall(SYS_close_range, STDERR_FILENO + 2, ~0U, 0) == 0)
        return;
#endif
    for (int i = STDERR_FILENO + 2, end = (int)sysconf(_SC_OPEN_MAX); i < end; i++)
        (void)close(i);
}

/* Ignore signals. A SIGINT or SIGTERM to the process group ends the daemon, and this process ends
 * after it. */
static void ignore_signals(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE};
    const struct sigaction ignore = {.sa_handler = SIG_IGN};

    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        (void)sigaction(signals[i], &ignore, NULL);
}

/* Give this process another name in lists of processes than the daemon, from which it was forked:
 * users find the daemon by its arguments and send it signals. The arguments lie one behind the
 * other. */
static void rename_process(char **argv)
{
    static const char name[] = "ckptfs-mounter";
    char *const begin = argv[0], *end = begin;

    (void)prctl(PR_SET_NAME, name, 0, 0, 0);
    for (; *argv; argv++)
        end = *argv + strlen(*argv);
    if (end < begin + sizeof name)
        return;
    memset(begin, 0, (size_t)(end - begin));
    memcpy(begin, name, sizeof name);
}

_Noreturn static void run(struct mounting *m, int fd)
{
    const int own = STDERR_FILENO + 1;
    char request[2 * CKPT_ERR_TEXT];
    ssize_t n;

    closelog(); /* before another file gets syslog's descriptor */
    close_all_but(fd);
    openlog("ckptfs", LOG_PID, LOG_DAEMON);
    rename_process(m->config->argv);
    ignore_signals();
    while ((n = recv(own, request, sizeof request, 0)) != 0) {
        if (n < 0 && errno != EINTR)
            break;
        if (n > 0 && *request == CKPTFS_RELAYED)
            ckptfs_log_relayed(request, (size_t)n);
        else if (n > 0 && !serve(m, own, *request))
            break;
    }
    _exit(EXIT_SUCCESS);
}

/* ---- the daemon's side ---- */

int ckptfs_mounter_start(struct ckptfs_mounter *m, const struct ckptfs_config *config,
                         struct ckptfs_log *log, struct ckpt_err *err)
{
    struct mounting mounting = {.config = config, .log = log};
    int fd[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fd) < 0)
        return ckpt_fail_errno(err, errno, "making a pair of sockets");
    *m = (struct ckptfs_mounter){.fd = fd[0], .pid = fork()};
    (void)pthread_mutex_init(&m->lock, NULL);
    if (m->pid == 0)
        run(&mounting, fd[1]);
    (void)close(fd[1]);
    if (m->pid > 0)
        return 0;
    (void)ckpt_fail_errno(err, errno, "starting the process that mounts");
    ckptfs_mounter_stop(m);
    return -1;
}

static int take_fd(struct msghdr *msg)
{
    struct cmsghdr *c = CMSG_FIRSTHDR(msg);
    int fd = -1;

    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof fd))
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

/* Send a request and receive the answer. Returns an errno; ESRCH: the mounter has died. *ret_fd
 * (may be NULL) is -1 if the answer has no descriptor. */
static int ask(struct ckptfs_mounter *m, char request, struct answer *ret, int *ret_fd)
{
    struct iovec data = {.iov_base = ret, .iov_len = sizeof *ret};
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr msg = {.msg_iov = &data,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    struct pollfd wait = {.fd = m->fd, .events = POLLIN};
    ssize_t n = -1;
    int ready;

    if (send(m->fd, &request, 1, MSG_NOSIGNAL) != 1)
        return ESRCH;
    while ((ready = poll(&wait, 1, ANSWER_MS)) < 0 && errno == EINTR)
        continue;
    if (ready == 0)
        return ETIMEDOUT;
    while (ready > 0 && (n = recvmsg(m->fd, &msg, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        continue;
    if (n != (ssize_t)sizeof *ret)
        return ESRCH;
    if (ret_fd)
        *ret_fd = take_fd(&msg);
    return ret->errnum;
}

static int ask_alone(struct ckptfs_mounter *m, char request, struct answer *ret, int *ret_fd)
{
    (void)pthread_mutex_lock(&m->lock);
    const int errnum = ask(m, request, ret, ret_fd);
    (void)pthread_mutex_unlock(&m->lock);
    return errnum;
}

int ckptfs_mounter_mount(struct ckptfs_mounter *m, int *ret_fd, struct ckpt_err *err)
{
    struct answer a = {0};
    const int errnum = ask_alone(m, MOUNT, &a, ret_fd);

    if (errnum == EINVAL)
        return ckpt_fail(err, CKPT_USAGE, "FUSE did not accept the options");
    return errnum || *ret_fd < 0 ? -1 : 0;
}

void ckptfs_mounter_readahead(struct ckptfs_mounter *m, struct ckptfs_negotiated *n)
{
    struct answer a = {0};

    if (ask_alone(m, READAHEAD, &a, NULL) != 0)
        return;
    n->readahead_kib = a.negotiated.readahead_kib;
    n->readahead_refused = a.negotiated.readahead_refused;
    memcpy(n->dev, a.negotiated.dev, sizeof n->dev);
    n->dev[sizeof n->dev - 1] = '\0';
}

void ckptfs_mounter_detach(struct ckptfs_mounter *m)
{
    struct answer a;
    (void)ask_alone(m, DETACH, &a, NULL);
}

int ckptfs_mounter_unmount(struct ckptfs_mounter *m, struct ckpt_err *err)
{
    struct answer a = {0};
    const int errnum = ask_alone(m, UNMOUNT, &a, NULL);

    return errnum ? ckpt_fail_errno(err, errnum, "asking the process that unmounts") : 0;
}

void ckptfs_mounter_stop(struct ckptfs_mounter *m)
{
    int status;

    ckpt_closep(&m->fd);
    while (m->pid > 0 && waitpid(m->pid, &status, 0) < 0 && errno == EINTR)
        continue;
    (void)pthread_mutex_destroy(&m->lock);
}

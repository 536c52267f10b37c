/* SPDX-License-Identifier: Apache-2.0 */
/* fork, a pipe to the parent, and systemd's notification datagram. */
#include "mount/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"

_Noreturn static void wait_for(pid_t child, int ready)
{
    char byte;
    int status;
    ssize_t n;

    while ((n = read(ready, &byte, 1)) < 0 && errno == EINTR)
        continue;
    if (n == 1)
        _exit(EXIT_SUCCESS);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE);
}

int ckptfs_daemon_fork(int *ret_ready, struct ckpt_err *err)
{
    int fd[2];
    pid_t pid;

    if (pipe2(fd, O_CLOEXEC) < 0)
        return ckpt_fail_errno(err, errno, "making a pipe");
    if ((pid = fork()) < 0)
        return ckpt_fail_errno(err, errno, "going into the background");
    if (pid > 0) {
        (void)close(fd[1]);
        wait_for(pid, fd[0]);
    }
    (void)close(fd[0]);
    *ret_ready = fd[1];
    return 0;
}

/* Tell the service manager that the mount is ready, as sd_notify(3) does, without the library: send
 * one datagram to the socket that the environment names. */
static void notify_manager(int fd)
{
    const char *path = getenv("NOTIFY_SOCKET"), text[] = "READY=1";
    struct sockaddr_un to = {.sun_family = AF_UNIX};

    if (!path || (*path != '/' && *path != '@') || strlen(path) >= sizeof to.sun_path)
        return;
    memcpy(to.sun_path, path, strlen(path));
    if (*path == '@')
        to.sun_path[0] = '\0';
    (void)sendto(fd, text, sizeof text - 1, MSG_NOSIGNAL, (struct sockaddr *)&to,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path)));
}

static void detach(int null)
{
    (void)setsid();
    for (int fd = 0; null >= 0 && fd <= 2; fd++)
        (void)dup2(null, fd);
}

void ckptfs_daemon_detach(void)
{
    ckpt_cleanup(ckpt_closep) int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    detach(null);
}

void ckptfs_announcement_open(struct ckptfs_announcement *a, int ready)
{
    *a = (struct ckptfs_announcement){.ready = ready, .null = -1, .notify = -1};
    if (ready >= 0)
        a->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (getenv("NOTIFY_SOCKET"))
        a->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

void ckptfs_announce(struct ckptfs_announcement *a)
{
    if (a->notify >= 0)
        notify_manager(a->notify);
    ckpt_closep(&a->notify);
    if (a->ready < 0)
        return;
    detach(a->null);
    ckpt_closep(&a->null);
    (void)!write(a->ready, "", 1);
    ckpt_closep(&a->ready);
}

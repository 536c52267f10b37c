/* SPDX-License-Identifier: Apache-2.0 */
/* fork, a pipe, and systemd's readiness datagram. */
#include "daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"

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

/* sd_notify(3) without the library: one datagram to the socket that the environment names. */
static void notify_manager(void)
{
    const char *path = getenv("NOTIFY_SOCKET"), text[] = "READY=1";
    struct sockaddr_un to = {.sun_family = AF_UNIX};

    if (!path || (*path != '/' && *path != '@') || strlen(path) >= sizeof to.sun_path)
        return;
    memcpy(to.sun_path, path, strlen(path));
    if (*path == '@')
        to.sun_path[0] = '\0';
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    (void)sendto(fd, text, sizeof text - 1, MSG_NOSIGNAL, (struct sockaddr *)&to,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path)));
    (void)close(fd);
}

void ckptfs_daemon_ready(int ready)
{
    notify_manager();
    if (ready < 0)
        return;
    (void)setsid();
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        for (int fd = 0; fd <= 2; fd++)
            (void)dup2(null, fd);
        if (null > 2)
            (void)close(null);
    }
    (void)!write(ready, "", 1);
    (void)close(ready);
}

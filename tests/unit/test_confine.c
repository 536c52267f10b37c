/* SPDX-License-Identifier: Apache-2.0 */
/* What a process that confines itself can no longer do. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#include "base/confine.h"

/* The errno of connecting to a local port; nobody listens there. */
static int try_port(unsigned port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);

    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    errno = 0;
    (void)!connect(fd, (struct sockaddr *)&to, sizeof to);
    const int result = errno;
    (void)close(fd);
    return result;
}

/* In a child: what a helper that connects may do. Its exit status is the line that failed. */
static void confined(void)
{
#define MUST(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond))                                                                               \
            _exit(__LINE__ & 127);                                                                 \
    } while (0)
    const unsigned version = ckpt_landlock_version();
    int rules = -1;

    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (version > 0) {
        MUST(ckpt_landlock_begin(version, &rules, NULL) == 0);
        MUST(ckpt_landlock_allow(rules, "/etc/hosts") == 0);
        MUST(ckpt_landlock_allow(rules, "/nonexistent") == 0);
        if (version >= 4)
            MUST(ckpt_landlock_port(rules, 9) == 0);
        MUST(ckpt_landlock_enter(rules, NULL) == 0);
        MUST(open("/etc/passwd", O_RDONLY) < 0 && errno == EACCES);
        MUST(open("/etc/hosts", O_RDONLY) >= 0);
        MUST(open("/tmp/ckptfs-confined", O_CREAT | O_WRONLY, 0600) < 0 && errno == EACCES);
    }
    MUST(try_port(9) == ECONNREFUSED);
    if (version >= 4)
        MUST(try_port(10) == EACCES);
    if (ckpt_seccomp_enter(true)) {
        MUST(try_port(9) == ECONNREFUSED);
        MUST(listen(socket(AF_INET, SOCK_STREAM, 0), 1) < 0 && errno == EPERM);
        MUST(execl("/bin/true", "true", (char *)NULL) < 0 && errno == EPERM);
        MUST(ckpt_seccomp_enter(false));
        MUST(socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM);
    }
    _exit(0);
}

TEST(confine, files_ports_and_calls)
{
    int status;
    const pid_t pid = fork();

    if (pid == 0)
        confined();
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

TESTS(T(confine, files_ports_and_calls))

/* SPDX-License-Identifier: Apache-2.0 */
/* What somebody does first who runs code of his own in the daemon: enter the sandbox as the daemon
 * does, for the run argv[1], and try. A line per attempt: what, and "refused" or "done". */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ckptfs/ckptfs.h>

#include "mount/sandbox.h"

static int read_secret(const char *path)
{
    char byte;
    const int fd = open(path, O_RDONLY);
    return fd < 0 || read(fd, &byte, 1) < 0 ? -1 : 0;
}

static int write_file(const char *path) { return open(path, O_WRONLY | O_CREAT, 0600); }

static int run_program(void) { return execl("/bin/true", "true", (char *)NULL); }

static int make_process(void)
{
    const pid_t pid = fork();

    if (pid == 0)
        _exit(0);
    return pid < 0 ? -1 : waitpid(pid, NULL, 0) < 0 ? -1 : 0;
}

static int connect_to(int family)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/docker.sock"};
    const int fd = socket(family, SOCK_STREAM, 0);

    if (fd < 0)
        return -1;
    return connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno == EPERM ? -1 : 0;
}

static int open_by_handle(void)
{
    struct file_handle handle = {.handle_bytes = 0};
    return open_by_handle_at(AT_FDCWD, &handle, O_RDONLY) < 0 && errno == EPERM ? -1 : 0;
}

static void *nothing(void *arg) { return arg; }

static int start_thread(void)
{
    pthread_t thread;
    return pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0
               ? 0
               : -1;
}

static void report(const char *what, int result)
{
    (void)printf("%s: %s\n", what, result < 0 ? "refused" : "done");
    (void)fflush(stdout);
}

int main(int argc, char **argv)
{
    struct ckptfs_config config = {.run = argv[1], .sandbox = true};
    struct ckptfs_sandbox sandbox;
    struct ckpt_err err = {0};
    char text[64];

    if (argc != 4 || ckpt_options_new(&config.opt, &err) < 0 || ckptfs_privilege_drop(&err) < 0 ||
        ckptfs_sandbox_enter(&config, &sandbox, &err) < 0) {
        (void)fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    (void)printf("%s\n", ckptfs_sandbox_text(&sandbox, text, sizeof text));
    report("read the run", read_secret(argv[2]));
    report("start a thread", start_thread());
    report("read another file", read_secret(argv[3]));
    report("read /etc/passwd", read_secret("/etc/passwd"));
    report("read its own memory", read_secret("/proc/self/mem"));
    report("write into the run", write_file(argv[2]));
    report("write elsewhere", write_file("/tmp/ckptfs-sandbox-probe"));
    report("delete", unlink(argv[2]));
    report("change modes", chmod(argv[2], 0777));
    report("make a process", make_process());
    report("connect to a daemon", connect_to(AF_UNIX));
    report("connect to the network", connect_to(AF_INET));
    report("mount", mount("none", "/mnt", "tmpfs", 0, NULL));
    report("unmount", umount2("/proc", MNT_DETACH));
    report("trace", (int)ptrace(PTRACE_ATTACH, getppid(), NULL, NULL));
    report("kill", kill(getppid(), SIGCONT));
    report("open by handle", open_by_handle());
    report("become another user", setresuid(1, 1, 1));
    report("load code into the kernel", (int)syscall(SYS_bpf, 0, NULL, 0));
    ckpt_options_free(config.opt); /* running a program ends this one, if it succeeds */
    report("run a program", run_program());
    return 0;
}

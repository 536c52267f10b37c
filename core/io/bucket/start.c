/* SPDX-License-Identifier: Apache-2.0 */
/* Starting ckptfs-http: beside the program or library that runs, or where it was to be installed.
 */
#include "io/bucket/start.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"

extern char **environ;

/* The path of the helper, malloc'ed; NULL: there is none, or no memory. */
static char *find_helper(void)
{
    static const char *const beside[] = {"", "../libexec/ckptfs/", "../../libexec/ckptfs/"};
    const char *say = getenv("CKPTFS_HTTP"), *last = CKPT_LIBEXECDIR "/ckptfs-http";
    char program[4096] = "";
    Dl_info here = {0};

    if (say && *say)
        return strdup(say);
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        program[0] = '\0';
    (void)dladdr((void *)(uintptr_t)&ckpt_helper_start, &here);
    const char *const from[] = {here.dli_fname ? here.dli_fname : "", program};
    for (size_t i = 0; i < 2 * sizeof beside / sizeof *beside; i++) {
        const char *file = from[i / 3], *slash = strrchr(file, '/');
        char *path =
            slash ? ckpt_asprintf("%.*s%sckptfs-http", (int)(slash - file + 1), file, beside[i % 3])
                  : NULL;
        if (path && access(path, X_OK) == 0)
            return path;
        free(path);
    }
    return access(last, X_OK) == 0 ? strdup(last) : NULL;
}

/* Run it in a session of its own, so that the terminal's signals do not end it before us. */
static int spawn(const char *path, int theirs, int memory, pid_t *ret, struct ckpt_err *err)
{
    char *const argv[] = {(char *)"ckptfs-http", NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none;
    int rc;

    (void)sigemptyset(&none);
    (void)posix_spawn_file_actions_init(&files);
    (void)posix_spawnattr_init(&attr);
    (void)posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
    (void)posix_spawnattr_setsigmask(&attr, &none);
    (void)posix_spawn_file_actions_adddup2(&files, theirs, CKPT_WIRE_SOCKET);
    (void)posix_spawn_file_actions_adddup2(&files, memory, CKPT_WIRE_MEMORY);
    for (int fd = 0; fd <= 2; fd++)
        (void)posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_RDWR, 0);
    rc = posix_spawn(ret, path, &files, &attr, argv, environ);
    (void)posix_spawn_file_actions_destroy(&files);
    (void)posix_spawnattr_destroy(&attr);
    return rc ? ckpt_fail_errno(err, rc, "running '%s', which reads from buckets", path) : 0;
}

/* A descriptor above those that the helper gets. */
static int raise_fd(int fd)
{
    const int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 16);

    ckpt_closep(&fd);
    return high;
}

int ckpt_helper_start(struct ckpt_helper *h, uint64_t memory, const struct ckpt_wire_setup *setup,
                      char **ret_map, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = find_helper();
    ckpt_cleanup(ckpt_closep) int theirs = -1;
    ckpt_cleanup(ckpt_closep) int mem =
        raise_fd(memfd_create("ckptfs-blocks", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    int pair[2];

    if (!path)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "this ckptfs can't read from buckets: its program ckptfs-http is not "
                         "installed (it is built where libcurl and expat are)");
    if (mem < 0 || ftruncate(mem, (off_t)memory) < 0 ||
        fcntl(mem, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return ckpt_fail_errno(err, errno, "preparing to read from buckets");
    h->socket = raise_fd(pair[0]);
    theirs = raise_fd(pair[1]);
    void *map = mmap(NULL, memory, PROT_READ | PROT_WRITE, MAP_SHARED, mem, 0);
    if (map == MAP_FAILED || h->socket < 0 || theirs < 0)
        return ckpt_fail_errno(err, errno, "preparing to read from buckets");
    *ret_map = map;
    (void)madvise(map, memory, MADV_DONTDUMP);
    if (spawn(path, theirs, mem, &h->pid, err) < 0)
        return -1;
    if (send(h->socket, setup, sizeof *setup, MSG_NOSIGNAL) < 0)
        return ckpt_fail_errno(err, errno, "'%s', which reads from buckets, does not answer", path);
    return 0;
}

void ckpt_helper_release(struct ckpt_helper *h, bool is_child)
{
    const struct timespec tick = {0, 2000000};
    pid_t ended = 0;

    ckpt_closep(&h->socket);
    /* it may be waiting for a program that finds credentials */
    for (int i = 0; is_child && h->pid && ended == 0 && i < 250; i++)
        if ((ended = waitpid(h->pid, NULL, WNOHANG)) == 0)
            (void)nanosleep(&tick, NULL);
    if (is_child && h->pid && ended == 0 && kill(h->pid, SIGKILL) == 0)
        (void)waitpid(h->pid, NULL, 0);
    h->pid = 0;
}

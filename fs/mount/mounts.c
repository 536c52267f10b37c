/* SPDX-License-Identifier: Apache-2.0 */
/* Mountpoints and stale mounts. */
#include "mount/config.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <mntent.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "mount/log.h"

enum { MOST_STACKED = 16 };

extern char **environ;

/* Find the topmost mount of ckptfs at exactly this path, without accessing the file system that is
 * mounted there. *ret_user is its owner. */
static bool is_ours(const char *path, uid_t *ret_user)
{
    FILE *in = setmntent("/proc/self/mounts", "re");
    bool ours = false;
    struct mntent mount;
    char line[4 * PATH_MAX];

    /* later lines are mounted on top of earlier ones */
    while (in && getmntent_r(in, &mount, line, sizeof line)) {
        if (strcmp(mount.mnt_dir, path) != 0)
            continue;
        const char *user = hasmntopt(&mount, "user_id");
        ours = strcmp(mount.mnt_type, "fuse.ckptfs") == 0;
        *ret_user = user ? (uid_t)strtoul(user + strlen("user_id="), NULL, 10) : 0;
    }
    if (in)
        (void)endmntent(in);
    return ours;
}

/* Send the daemon behind a mount a request. Returns an errno, 0 if the daemon answers. stat(2)
 * would not do: the kernel's cache answers it for a second after the daemon's end. */
static int ask_daemon(const char *path)
{
    struct statx st;

    return statx(AT_FDCWD, path, AT_STATX_FORCE_SYNC, STATX_MODE, &st) == 0 ? 0 : errno;
}

/* Ask the daemon as ask_daemon does, with the user id of the mount's owner: without allow_other the
 * kernel refuses even root before it checks whether the daemon lives. */
static int ask_daemon_as(const char *path, uid_t user)
{
    int status = 0;
    pid_t pid = fork();

    if (pid == 0)
        _exit(setresuid(user, user, user) == 0 ? ask_daemon(path) & 0xff : EACCES);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : EACCES;
}

static bool is_dead(const char *path, uid_t user)
{
    int error = ask_daemon(path);

    if (error == EACCES && geteuid() == 0 && user != 0)
        error = ask_daemon_as(path, user);
    return error == ENOTCONN;
}

/* Detach the mount with umount2, or with fusermount3 if that is not permitted. */
static int unmount(const char *path, struct ckpt_err *err)
{
    const char *const argv[] = {"fusermount3", "-u", "-z", "-q", "--", path, NULL};
    pid_t pid;
    int status = 0, rc;

    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) == 0)
        return 0;
    if (errno != EPERM)
        return ckpt_fail_errno(err, errno, "unmounting %s", path);
    if ((rc = posix_spawnp(&pid, argv[0], NULL, NULL, (char *const *)argv, environ)) != 0)
        return ckpt_fail_errno(err, rc, "running fusermount3");
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    return ckpt_fail(err, CKPT_IO, "fusermount3 could not unmount %s", path);
}

/* The absolute path of a directory on which a dead mount may lie. A descriptor that only marks the
 * place (O_PATH) can be had of it, where realpath(3) fails. */
static char *resolve_mountpoint(const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int place = open(path, O_PATH | O_CLOEXEC);
    char link[64], full[PATH_MAX];
    ssize_t n = -1;

    if (place >= 0) {
        (void)snprintf(link, sizeof link, "/proc/self/fd/%d", place);
        n = readlink(link, full, sizeof full);
    }
    if (n >= 0)
        return strndup(full, (size_t)n);
    (void)ckpt_fail_errno(err, errno, "mountpoint %s", path);
    return NULL;
}

static int fail_mounted(const char *path, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT, "%s is a ckptfs mount already; fusermount3 -u ends it",
                     path);
}

static int clear_stale(const char *path, const struct ckptfs_log *log, struct ckpt_err *err)
{
    struct stat st;
    uid_t user;

    for (int i = 0; i < MOST_STACKED; i++) {
        if (!is_ours(path, &user))
            break;
        if (!is_dead(path, user))
            return fail_mounted(path, err);
        ckptfs_logf(log, CKPT_INFO, "%s: replacing a mount whose daemon is gone", path);
        if (unmount(path, err) < 0)
            return -1;
    }
    if (stat(path, &st) < 0)
        return ckpt_fail_errno(err, errno, "mountpoint %s", path);
    if (!S_ISDIR(st.st_mode))
        return ckpt_fail(err, CKPT_USAGE, "mountpoint %s is not a directory", path);
    return 0;
}

/* Open the directory of this user's locks. Anybody may lock what he may open, so it is a directory
 * that nobody else may enter: below /run or $XDG_RUNTIME_DIR, else below /tmp. */
static int open_locks(void)
{
    const uid_t user = geteuid();
    const char *top = user == 0 ? "/run" : getenv("XDG_RUNTIME_DIR");
    ckpt_cleanup(ckpt_freep) char *path =
        top ? ckpt_asprintf("%s/ckptfs", top) : ckpt_asprintf("/tmp/ckptfs-%u", (unsigned)user);
    struct stat st;
    int dir;

    if (!path)
        return -1;
    (void)mkdir(path, 0700);
    dir = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir >= 0 && fstat(dir, &st) == 0 && st.st_uid == user && !(st.st_mode & 077))
        return dir;
    if (dir >= 0)
        (void)close(dir);
    return -1;
}

/* The lock of a mountpoint: a file of this user, named by the directory's identity, which stays.
 * -1: there is none, so that two ckptfs which are started at once can mount over each other. */
static int open_lock(const char *mountpoint)
{
    ckpt_cleanup(ckpt_closep) int dir = open_locks();
    struct stat st;

    if (dir < 0 || stat(mountpoint, &st) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) char *name =
        ckpt_asprintf("%jx-%jx", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    return name ? openat(dir, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
}

/* Lock the mountpoint. If several ckptfs are started at once, the first gets the lock, and the
 * others find the lock or the mount. */
static int lock_mountpoint(struct ckptfs_config *c, struct ckpt_err *err)
{
    uid_t user;

    c->lock = open_lock(c->mountpoint);
    if (c->lock >= 0 && flock(c->lock, LOCK_EX | LOCK_NB) < 0) {
        if (errno == EWOULDBLOCK)
            return ckpt_fail(err, CKPT_CONFLICT, "another ckptfs is being mounted on %s",
                             c->mountpoint);
        ckptfs_mountpoint_unlock(c);
    }
    return is_ours(c->mountpoint, &user) ? fail_mounted(c->mountpoint, err) : 0;
}

void ckptfs_mountpoint_unlock(struct ckptfs_config *c)
{
    if (c->lock < 0)
        return;
    (void)flock(c->lock, LOCK_UN); /* the waiting parent has the descriptor too */
    (void)close(c->lock);
    c->lock = -1;
}

/* Is `path` equal to `dir` or below it? Compares names, and also identities, because of bind
 * mounts. */
static bool lies_in(const char *path, const char *dir)
{
    ckpt_cleanup(ckpt_freep) char *up = strdup(path);
    struct stat want, st;

    if (!up || stat(dir, &want) < 0)
        return false;
    for (;;) {
        if (strcmp(up, dir) == 0 ||
            (stat(up, &st) == 0 && st.st_dev == want.st_dev && st.st_ino == want.st_ino))
            return true;
        char *slash = strrchr(up, '/');
        if (!slash || !slash[1])
            return false;
        slash[slash == up ? 1 : 0] = '\0';
    }
}

static int replace(char **text, char *with, struct ckpt_err *err)
{
    if (!with)
        return ckpt_nomem(err);
    free(*text);
    *text = with;
    return 0;
}

int ckptfs_paths_resolve(struct ckptfs_config *c, const struct ckptfs_log *log,
                         struct ckpt_err *err)
{
    const bool is_bucket = strncmp(c->run, "s3://", 5) == 0;
    char *full = is_bucket ? strdup(c->run) : realpath(c->run, NULL);

    /* With -o wait the run may not exist yet: then its name is made absolute without resolving
     * links. */
    if (!full && errno == ENOENT && c->wait) {
        ckpt_cleanup(ckpt_freep) char *cwd = getcwd(NULL, 0);
        full = ckpt_asprintf("%s%s%s", *c->run == '/' || !cwd ? "" : cwd, *c->run == '/' ? "" : "/",
                             c->run);
    }
    if (!full)
        return ckpt_fail_errno(err, errno, "%s%s", c->run, ckpt_path_advice(c->run));
    if (replace(&c->run, full, err) < 0)
        return -1;
    if (!(full = resolve_mountpoint(c->mountpoint, err)))
        return ckpt_nomem(err);
    if (replace(&c->mountpoint, full, err) < 0 || clear_stale(c->mountpoint, log, err) < 0 ||
        lock_mountpoint(c, err) < 0)
        return -1;
    if (lies_in(c->run, c->mountpoint))
        return ckpt_fail(err, CKPT_USAGE,
                         "the mount at %s would hide the run %s from ckptfs itself", c->mountpoint,
                         c->run);
    if (lies_in(c->mountpoint, c->run))
        return ckpt_fail(
            err, CKPT_USAGE,
            "the mountpoint %s lies inside the run %s: ckptfs would read its own mount",
            c->mountpoint, c->run);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The process that mounts: what it answers where nothing is mounted, what it keeps of its parent,
 * and how it ends. */
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "mount/daemon.h"
#include "mount/mounter.h"

/* ---- what belongs to the daemon ---- */

static bool refuse_dup;

int __real_dup2(int from, int to);
int __wrap_dup2(int from, int to);
int __wrap_dup2(int from, int to)
{
    if (!refuse_dup)
        return __real_dup2(from, to);
    errno = EBADF;
    return -1;
}

void ckptfs_daemon_detach(void) {}

void ckptfs_log_relayed(const char *msg, size_t len)
{
    (void)msg;
    (void)len;
}

char *ckptfs_fuse_escape(const char *value) { return strdup(value); }

/* ---- the process ---- */

static struct ckptfs_log log_;

static void start(struct ckptfs_mounter *m, struct ckptfs_config *c)
{
    static char name[] = "test_mounter", *argv[] = {name, NULL};
    struct ckpt_err err = {0};

    c->argv = argv;
    if (ckptfs_mounter_start(m, c, &log_, &err) < 0)
        fail_msg("%s", err.text);
}

/* Its status, when it has ended. */
static int status_of(struct ckptfs_mounter *m)
{
    int status;

    assert_int_equal(waitpid(m->pid, &status, 0), m->pid);
    m->pid = -1;
    ckptfs_mounter_stop(m);
    return status;
}

TEST(mounter, answers_where_nothing_is_mounted)
{
    static char here[] = ".";
    struct ckptfs_config config = {.mountpoint = here};
    struct ckptfs_negotiated n = {0};
    struct ckptfs_mounter m;
    struct ckpt_err err = {0};
    struct stat st;
    char dev[64];

    assert_int_equal(stat(here, &st), 0);
    (void)snprintf(dev, sizeof dev, "%u:%u", major(st.st_dev), minor(st.st_dev));
    start(&m, &config);
    ckptfs_mounter_readahead(&m, &n);
    CHECK_STR(n.dev, dev);
    CHECK(!n.readahead_refused); /* no value is asked for */
    CHECK_OK(ckptfs_mounter_unmount(&m, &err));
    ckptfs_mounter_readahead(&m, &n); /* and it lives on */
    CHECK_STR(n.dev, dev);
    ckptfs_mounter_stop(&m);
    CHECK_EQ(waitpid(m.pid, NULL, 0), -1); /* it was waited for */
}

TEST(mounter, keeps_no_descriptor_of_its_parent)
{
    static char here[] = ".";
    struct ckptfs_config config = {.mountpoint = here};
    struct ckptfs_negotiated n = {0};
    struct ckptfs_mounter m;
    int pipes[40][2];
    char byte;

    for (int i = 0; i < 40; i++)
        assert_int_equal(pipe(pipes[i]), 0);
    start(&m, &config);
    ckptfs_mounter_readahead(&m, &n); /* it has begun */
    for (int i = 0; i < 40; i++) {
        (void)close(pipes[i][1]);
        CHECK_EQ(read(pipes[i][0], &byte, 1), 0); /* nobody else could write to it */
        (void)close(pipes[i][0]);
    }
    ckptfs_mounter_stop(&m);
}

TEST(mounter, ends_well_with_the_daemon_and_badly_without_its_socket)
{
    static char here[] = ".";
    struct ckptfs_config config = {.mountpoint = here};
    struct ckptfs_mounter m;
    struct ckpt_err err = {0};

    start(&m, &config);
    (void)close(m.fd);
    m.fd = -1;
    CHECK_EQ(status_of(&m), 0);
    refuse_dup = true;
    start(&m, &config);
    refuse_dup = false;
    int status = 0;
    assert_int_equal(waitpid(m.pid, &status, 0), m.pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE);
    CHECK_FAILS(ckptfs_mounter_unmount(&m, &err), CKPT_IO, "asking the process that unmounts");
    m.pid = -1;
    ckptfs_mounter_stop(&m);
}

TESTS(T(mounter, answers_where_nothing_is_mounted), T(mounter, keeps_no_descriptor_of_its_parent),
      T(mounter, ends_well_with_the_daemon_and_badly_without_its_socket))

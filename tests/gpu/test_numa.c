/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes of devices, and of memory as the kernel tells them. */
#include "device/numa.h"

#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "test.h"

enum { LEN = 1 << 20, NODES = 1024 };

/* A directory like sysfs's, with one device. */
static const char *devices(const char *name, const char *node)
{
    static char top[] = "/tmp/test_numa_XXXXXX";
    static bool made;
    char path[256];

    if (!made)
        assert_non_null(mkdtemp(top));
    made = true;
    (void)snprintf(path, sizeof path, "%s/%s", top, name);
    assert_int_equal(mkdir(path, 0700), 0);
    (void)snprintf(path, sizeof path, "%s/%s/numa_node", top, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    (void)fputs(node, f);
    assert_int_equal(fclose(f), 0);
    return top;
}

static void clean(const char *top, const char *name)
{
    char path[256];

    (void)snprintf(path, sizeof path, "%s/%s/numa_node", top, name);
    (void)unlink(path);
    (void)snprintf(path, sizeof path, "%s/%s", top, name);
    (void)rmdir(path);
    (void)rmdir(top);
}

TEST(numa, a_device_has_the_node_that_sysfs_says)
{
    UNUSED_STATE;
    const char *top = devices("0000:3b:00.0", "1\n");
    assert_int_equal(ckpt_numa_node(top, "0000:3B:00.0"), 1);
    assert_int_equal(ckpt_numa_node(top, "00000000:3B:00.0"), 1);
    assert_int_equal(ckpt_numa_node(top, "0000:3C:00.0"), -1);
    (void)devices("0000:01:00.0", "-1\n");
    assert_int_equal(ckpt_numa_node(top, "0000:01:00.0"), -1);
    (void)devices("0000:02:00.0", "70000\n");
    assert_int_equal(ckpt_numa_node(top, "0000:02:00.0"), -1);
    clean(top, "0000:02:00.0");
    clean(top, "0000:01:00.0");
    clean(top, "0000:3b:00.0");
}

static int policy_of(void *mem)
{
    unsigned long mask[NODES / 64];
    int policy = -1;

    if (syscall(SYS_get_mempolicy, &policy, mask, (unsigned long)NODES, mem,
                (unsigned long)MPOL_F_ADDR) != 0)
        return -1;
    return mask[0] == 1 || policy == MPOL_DEFAULT ? policy : -1;
}

TEST(numa, memory_prefers_a_node)
{
    UNUSED_STATE;
    void *mem = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(mem, MAP_FAILED);
    ckpt_numa_prefer(mem, LEN, -1);
    ckpt_numa_prefer(mem, LEN, 100000);
    if (policy_of(mem) < 0) /* a sandbox that has no such calls */
        skip();
    assert_int_equal(policy_of(mem), MPOL_DEFAULT);
    ckpt_numa_prefer(mem, LEN, 0);
    assert_int_equal(policy_of(mem), MPOL_PREFERRED);
    assert_int_equal(policy_of((char *)mem + LEN - 1), MPOL_PREFERRED);
    assert_int_equal(munmap(mem, LEN), 0);
}

TESTS(T(numa, a_device_has_the_node_that_sysfs_says), T(numa, memory_prefers_a_node))

/* SPDX-License-Identifier: Apache-2.0 */
/* Dropping capabilities by system call, which needs no library for four numbers. */
#include "mount/sandbox.h"

#include <errno.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/err.h"

struct caps {
    uint64_t effective, permitted;
};

#define CAP_BIT(cap) (UINT64_C(1) << (cap))

static int caps_get(struct caps *ret)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {0};

    if (syscall(SYS_capget, &head, data) < 0)
        return -1;
    ret->effective = (uint64_t)data[1].effective << 32 | data[0].effective;
    ret->permitted = (uint64_t)data[1].permitted << 32 | data[0].permitted;
    return 0;
}

static int caps_set(const struct caps *c)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {
        {.effective = (uint32_t)c->effective, .permitted = (uint32_t)c->permitted},
        {.effective = (uint32_t)(c->effective >> 32), .permitted = (uint32_t)(c->permitted >> 32)},
    };

    return syscall(SYS_capset, &head, data) < 0 ? -1 : 0;
}

int ckptfs_privilege_drop(struct ckpt_err *err)
{
    const uint64_t search = CAP_BIT(CAP_DAC_READ_SEARCH);
    struct caps c;

    if (caps_get(&c) < 0)
        return ckpt_fail_errno(err, errno, "reading the capabilities");
    c.effective &= search;
    c.permitted &= search;
    if (caps_set(&c) < 0)
        return ckpt_fail_errno(err, errno, "dropping capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return ckpt_fail_errno(err, errno, "setting no_new_privs");
    return 0;
}

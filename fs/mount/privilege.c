/* SPDX-License-Identifier: Apache-2.0 */
/* Dropping capabilities by system call, which needs no library for four numbers. */
#include "mount/sandbox.h"

#include <errno.h>
#include <linux/capability.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/err.h"

int ckptfs_privilege_drop(struct ckpt_err *err)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {0};
    struct __user_cap_data_struct *const kept = &data[CAP_TO_INDEX(CAP_DAC_READ_SEARCH)];
    const uint32_t search = CAP_TO_MASK(CAP_DAC_READ_SEARCH);

    if (syscall(SYS_capget, &head, data) < 0)
        return ckpt_fail_errno(err, errno, "reading the capabilities");
    const struct __user_cap_data_struct some = {.effective = kept->effective & search,
                                                .permitted = kept->permitted & search};
    memset(data, 0, sizeof data);
    *kept = some;
    if (syscall(SYS_capset, &head, data) < 0)
        return ckpt_fail_errno(err, errno, "dropping capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return ckpt_fail_errno(err, errno, "setting no_new_privs");
    return 0;
}

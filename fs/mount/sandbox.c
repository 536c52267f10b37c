/* SPDX-License-Identifier: Apache-2.0 */
/* The sandbox limits the daemon to what it may still do: base/confine.h with the places of the run.
 * Capabilities are dropped by system calls, which need no library for four numbers. */
#include "mount/sandbox.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/confine.h"
#include "base/err.h"
#include "base/mem.h"

static int allow_place(void *ctx, const char *place)
{
    return ckpt_landlock_allow(*(const int *)ctx, place);
}

/* Allow the system's files that the C library and libfuse read: the time zone, the number of
 * processors, the limit of a request's size. */
static int allow_system(int rules)
{
    static const char *const paths[] = {"/etc/localtime", "/sys/devices/system/cpu",
                                        "/proc/sys/fs/fuse"};

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (ckpt_landlock_allow(rules, paths[i]) < 0)
            return -1;
    return CKPT_LEAKS_ARE_LOOKED_FOR ? ckpt_landlock_allow(rules, "/proc") : 0;
}

static int confine_files(const struct ckptfs_config *config, unsigned version, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int rules = -1;

    if (ckpt_landlock_begin(version, &rules, err) < 0)
        return -1;
    if (ckpt_options_places(config->opt, config->run, allow_place, &rules, err) < 0 ||
        allow_system(rules) < 0)
        return ckpt_fail_errno(err, errno, "adding a Landlock rule");
    return ckpt_landlock_enter(rules, err);
}

int ckptfs_sandbox_enter(const struct ckptfs_config *config, struct ckptfs_sandbox *ret,
                         struct ckpt_err *err)
{
    const unsigned version = ckpt_landlock_version();

    *ret = (struct ckptfs_sandbox){0};
    /* the C library loads it at the first cancellation of a thread: libfuse cancels its threads at
     * the end */
    (void)dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (version > 0 && confine_files(config, version, err) < 0)
        return -1;
    ret->landlock = version;
    ret->seccomp = ckpt_seccomp_enter(false);
    return 0;
}

const char *ckptfs_sandbox_text(const struct ckptfs_sandbox *s, char *buf, size_t cap)
{
    if (!s->landlock)
        return s->seccomp ? "seccomp" : "none";
    (void)snprintf(buf, cap, "landlock %u%s", s->landlock, s->seccomp ? ", seccomp" : "");
    return buf;
}

void ckptfs_sandbox_explain(const struct ckptfs_sandbox *s, struct ckpt_err *err)
{
    const size_t len = strlen(err->text);

    if (!s->landlock || !strstr(err->text, strerror(EACCES)))
        return;
    (void)snprintf(err->text + len, sizeof err->text - len,
                   "; ckptfs may only open what lay in the run, in its base, or where their links "
                   "led when it was mounted: mount again, or with -o sandbox=no");
}

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

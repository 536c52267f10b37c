/* SPDX-License-Identifier: Apache-2.0 */
/* Finding CUDA's driver in the process, or on the machine. */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <string.h>

#include "base/err.h"

static const char LIBRARY[] = "libcuda.so.1";

#define NONE "there is no CUDA device: "

static int check_version(const struct ckpt_cuda_driver *call, struct ckpt_err *err)
{
    int version = 0;

    if (call->version(&version) == CUDA_SUCCESS && version >= CKPT_CUDA_LEAST)
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     NONE "its driver (%s) is of CUDA %d.%d; %d.%d or later is needed (driver 525)",
                     LIBRARY, version / 1000, version % 1000 / 10, CKPT_CUDA_LEAST / 1000,
                     CKPT_CUDA_LEAST % 1000 / 10);
}

static int find_calls(void *library, struct ckpt_cuda_driver *ret, struct ckpt_err *err)
{
    const char *missing = NULL;
    void *found;

#define FIND(member, symbol, type)                                                                 \
    found = dlsym(library, #symbol);                                                               \
    memcpy(&ret->member, &found, sizeof found);                                                    \
    missing = found || missing ? missing : #symbol;
    CKPT_CUDA_CALLS(FIND)
#undef FIND
    if (!missing)
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED, NONE "its driver (%s) has no %s: too old?", LIBRARY,
                     missing);
}

int ckpt_cuda_driver_open(struct ckpt_cuda_driver *ret, int *ret_devices, struct ckpt_err *err)
{
    struct ckpt_cuda_driver call;
    const char *why = "none was found";
    int n = 0;
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL); /* for good */

    if (!library)
        return ckpt_fail(err, CKPT_UNSUPPORTED, NONE "its driver can't be loaded: %s", dlerror());
    if (find_calls(library, &call, err) < 0)
        return -1;
    CUresult rc = call.init(0);
    if (rc == CUDA_SUCCESS && check_version(&call, err) < 0)
        return -1;
    if (rc == CUDA_SUCCESS)
        rc = call.device_count(&n);
    if (rc != CUDA_SUCCESS)
        (void)call.error_text(rc, &why);
    if (rc != CUDA_SUCCESS || n < 1)
        return ckpt_fail(err, CKPT_UNSUPPORTED, NONE "%s (%s)", why ? why : "unknown error",
                         LIBRARY);
    *ret = call;
    *ret_devices = n;
    return 0;
}

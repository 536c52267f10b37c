/* SPDX-License-Identifier: Apache-2.0 */
/* Launching: choosing a transport by what the launcher has put into the environment. This stands
 * above the transports, of which it knows all; those in libraries of their own are loaded here. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "comm/comm.h"
#include "comm/tcp/rendezvous.h"

/* Look beside libckptfs_load, then in the folder where it was to be installed, then where the
 * dynamic linker looks. */
static void *open_library(const char *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *beside = NULL;
    ckpt_cleanup(ckpt_freep) char *installed = ckpt_asprintf("%s/%s", CKPT_LOAD_LIBDIR, name);
    ckpt_cleanup(ckpt_freep) char *why = NULL;
    Dl_info here;

    if (dladdr((void *)(uintptr_t)&ckpt_comm_from_env, &here) && here.dli_fname) {
        const char *slash = strrchr(here.dli_fname, '/');
        int n = slash ? (int)(slash - here.dli_fname) : 0;
        beside = ckpt_asprintf("%.*s%s%s", n, here.dli_fname, slash ? "/" : "", name);
    }
    const char *const try[] = {beside, installed, name};
    for (size_t i = 0; i < 3; i++) {
        void *lib = try[i] ? dlopen(try[i], RTLD_NOW | RTLD_GLOBAL) : NULL;
        if (lib)
            return lib;
        if (i == 0)
            why = strdup(dlerror());
    }
    (void)ckpt_fail(err, CKPT_UNSUPPORTED,
                    "this launch needs the transport library %s, which can't be loaded: %s", name,
                    why ? why : "not found");
    return NULL;
}

/* A function of that library; NULL and *err if there is none. */
static void *open_function(const char *library, const char *name, struct ckpt_err *err)
{
    void *lib = open_library(library, err);
    void *fn = lib ? dlsym(lib, name) : NULL;

    if (lib && !fn)
        (void)ckpt_fail(err, CKPT_UNSUPPORTED, "%s belongs to another version of ckptfs", library);
    return fn;
}

static int open_transport(const char *name, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_xport *x;
    ckpt_xport_open *fn;

    *(void **)&fn = open_function(name, CKPT_XPORT_OPEN, err);
    if (!fn)
        return -1;
    return fn(&x, err) < 0 ? -1 : ckpt_comm_wrap_members(x, ret, err);
}

static bool under_mpirun(void)
{
    const char *n = getenv("OMPI_COMM_WORLD_SIZE");

    n = n ? n : getenv("PMI_SIZE");
    return n && strcmp(n, "1") != 0;
}

static bool under_torchrun(void)
{
    return getenv("RANK") && getenv("WORLD_SIZE") && getenv("MASTER_ADDR") && getenv("MASTER_PORT");
}

static int launched(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err)
{
    if (under_mpirun())
        return open_transport("libckptfs_load_mpi.so.0", ret, err);
    if (under_torchrun())
        return ckpt_comm_tcp_env(log, ctx, ret, err);
    return ckpt_comm_self(ret, err);
}

/* A comm over the launcher's transport, with a CUDA device for each rank. */
static int open_devices(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_comm *ctl = NULL;
    ckpt_comm_device *fn;

    *(void **)&fn = open_function("libckptfs_load_nccl.so.0", CKPT_COMM_DEVICE, err);
    if (!fn || launched(log, ctx, &ctl, err) < 0)
        return -1;
    ckpt_comm_set_log(ctl, log, ctx);
    if (fn(ctl, ret, err) == 0)
        return 0;
    ckpt_comm_free(ctl);
    return -1;
}

static int open_env(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err)
{
    const char *say = getenv("CKPTFS_TRANSPORT");

    if (!say || !*say)
        return launched(log, ctx, ret, err);
    if (strcmp(say, "self") == 0)
        return ckpt_comm_self(ret, err);
    if (strcmp(say, "tcp") == 0)
        return ckpt_comm_tcp_env(log, ctx, ret, err);
    if (strcmp(say, "mpi") == 0)
        return open_transport("libckptfs_load_mpi.so.0", ret, err);
    if (strcmp(say, "nccl") == 0)
        return open_devices(log, ctx, ret, err);
    return ckpt_fail(err, CKPT_USAGE, "CKPTFS_TRANSPORT=%s: expected self, tcp, mpi or nccl", say);
}

int ckpt_comm_from_env_log(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret,
                           struct ckpt_err *err)
{
    if (open_env(log, ctx, ret, err) < 0)
        return -1;
    ckpt_comm_set_log(*ret, log, ctx);
    return 0;
}

int ckpt_comm_from_env(struct ckpt_comm **ret, struct ckpt_err *err)
{
    return ckpt_comm_from_env_log(NULL, NULL, ret, err);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of CUDA's driver that a load needs. They are looked up in libcuda.so.1 at run time, so
 * that one build works with every CUDA since 12.0. The CUDA runtime is neither linked nor needed.
 */
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

struct ckpt_err;

enum { CKPT_CUDA_LEAST = 12000 }; /* CUDA 12.0, whose driver is 525 */

/* For each call: our name for it, the driver's symbol, and the type. The type's name ends with the
 * version of CUDA that introduced this form of the call; none may be later than CKPT_CUDA_LEAST. */
#define CKPT_CUDA_CALLS(CALL)                                                                      \
    CALL(init, cuInit, PFN_cuInit_v2000)                                                           \
    CALL(version, cuDriverGetVersion, PFN_cuDriverGetVersion_v2020)                                \
    CALL(error_name, cuGetErrorName, PFN_cuGetErrorName_v6000)                                     \
    CALL(error_text, cuGetErrorString, PFN_cuGetErrorString_v6000)                                 \
    CALL(device_count, cuDeviceGetCount, PFN_cuDeviceGetCount_v2000)                               \
    CALL(device_get, cuDeviceGet, PFN_cuDeviceGet_v2000)                                           \
    CALL(pci_bus_id, cuDeviceGetPCIBusId, PFN_cuDeviceGetPCIBusId_v4010)                           \
    CALL(primary_retain, cuDevicePrimaryCtxRetain, PFN_cuDevicePrimaryCtxRetain_v7000)             \
    CALL(ctx_current, cuCtxGetCurrent, PFN_cuCtxGetCurrent_v4000)                                  \
    CALL(ctx_set, cuCtxSetCurrent, PFN_cuCtxSetCurrent_v4000)                                      \
    CALL(ctx_push, cuCtxPushCurrent_v2, PFN_cuCtxPushCurrent_v4000)                                \
    CALL(ctx_pop, cuCtxPopCurrent_v2, PFN_cuCtxPopCurrent_v4000)                                   \
    CALL(ctx_device, cuCtxGetDevice, PFN_cuCtxGetDevice_v2000)                                     \
    CALL(capture_mode, cuThreadExchangeStreamCaptureMode,                                          \
         PFN_cuThreadExchangeStreamCaptureMode_v10010)                                             \
    CALL(mem_alloc, cuMemAlloc_v2, PFN_cuMemAlloc_v3020)                                           \
    CALL(mem_free, cuMemFree_v2, PFN_cuMemFree_v3020)                                              \
    CALL(host_alloc, cuMemHostAlloc, PFN_cuMemHostAlloc_v2020)                                     \
    CALL(host_free, cuMemFreeHost, PFN_cuMemFreeHost_v2000)                                        \
    CALL(host_register, cuMemHostRegister_v2, PFN_cuMemHostRegister_v6050)                         \
    CALL(host_unregister, cuMemHostUnregister, PFN_cuMemHostUnregister_v4000)                      \
    CALL(pointer_attributes, cuPointerGetAttributes, PFN_cuPointerGetAttributes_v7000)             \
    CALL(copy, cuMemcpy, PFN_cuMemcpy_v4000)                                                       \
    CALL(upload, cuMemcpyHtoDAsync_v2, PFN_cuMemcpyHtoDAsync_v3020)                                \
    CALL(download, cuMemcpyDtoHAsync_v2, PFN_cuMemcpyDtoHAsync_v3020)                              \
    CALL(stream_new, cuStreamCreate, PFN_cuStreamCreate_v2000)                                     \
    CALL(stream_free, cuStreamDestroy_v2, PFN_cuStreamDestroy_v4000)                               \
    CALL(stream_ctx, cuStreamGetCtx, PFN_cuStreamGetCtx_v9020)                                     \
    CALL(stream_capturing, cuStreamIsCapturing, PFN_cuStreamIsCapturing_v10000)                    \
    CALL(stream_query, cuStreamQuery, PFN_cuStreamQuery_v2000)                                     \
    CALL(stream_wait, cuStreamWaitEvent, PFN_cuStreamWaitEvent_v3020)                              \
    CALL(event_new, cuEventCreate, PFN_cuEventCreate_v2000)                                        \
    CALL(event_free, cuEventDestroy_v2, PFN_cuEventDestroy_v4000)                                  \
    CALL(event_record, cuEventRecord, PFN_cuEventRecord_v2000)                                     \
    CALL(event_query, cuEventQuery, PFN_cuEventQuery_v2000)                                        \
    CALL(module_load, cuModuleLoadData, PFN_cuModuleLoadData_v2000)                                \
    CALL(module_free, cuModuleUnload, PFN_cuModuleUnload_v2000)                                    \
    CALL(module_function, cuModuleGetFunction, PFN_cuModuleGetFunction_v2000)                      \
    CALL(function_attribute, cuFuncGetAttribute, PFN_cuFuncGetAttribute_v2020)                     \
    CALL(launch, cuLaunchKernel, PFN_cuLaunchKernel_v4000)

#define CKPT_CUDA_MEMBER(member, symbol, type) type member;
struct ckpt_cuda_driver {
    CKPT_CUDA_CALLS(CKPT_CUDA_MEMBER)
};

/* Load the driver, look up all calls, and count the devices (at least one). Creates no context.
 * UNSUPPORTED or MISSING say what the machine lacks. */
int ckpt_cuda_driver_open(struct ckpt_cuda_driver *ret, int *ret_devices, struct ckpt_err *err);

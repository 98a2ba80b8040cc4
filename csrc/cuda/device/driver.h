// The part of the CUDA driver API that the host side uses. The driver's library is loaded when it is first needed. So
// this package can be built without a CUDA toolkit, and runs the CPU engine where there is no driver.
//
// Names and signatures are those of the driver's exported symbols, whose ABI does not change. Enumerations are ints.
// tests/test_cuda_host.py compares all of them with cuda.h if the machine has that file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/error.h"

namespace flashmoe::cuda {

using host::Error;

using CudaResult = int;
using DevicePtr = unsigned long long;
using DriverContext = struct CUctx_st*;
using DriverModule = struct CUmod_st*;
using DriverFunction = struct CUfunc_st*;
using DriverStream = struct CUstream_st*;
using DriverEvent = struct CUevent_st*;

inline constexpr CudaResult kCudaSuccess = 0;
inline constexpr CudaResult kCudaOutOfMemory = 2;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};
inline constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr unsigned kHostAllocPortable = 1, kHostAllocMapped = 2;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kCaptureNone = 0;  // CU_STREAM_CAPTURE_STATUS_NONE

enum TensorMapType : int { kMapUInt8 = 0, kMapFloat16 = 6, kMapFloat32 = 7, kMapBFloat16 = 9 };
inline constexpr int kMapInterleaveNone = 0, kMapSwizzle128B = 3, kMapPromotionNone = 0, kMapPromotion256B = 3,
                     kMapFillZero = 0;

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char pad[4];
  union {
    char bytes[64];
    int cooperative;
  } value;
};
inline constexpr int kLaunchCooperative = 2;  // CU_LAUNCH_ATTRIBUTE_COOPERATIVE

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  DriverStream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// X(symbol, parameters)
#define FLASHMOE_DRIVER_API(X)                                                                      \
  X(cuInit, (unsigned flags))                                                                       \
  X(cuGetErrorName, (CudaResult, const char** name))                                                \
  X(cuGetErrorString, (CudaResult, const char** text))                                              \
  X(cuDeviceGet, (int* device, int ordinal))                                                        \
  X(cuDeviceGetCount, (int* count))                                                                 \
  X(cuDeviceGetName, (char* name, int length, int device))                                          \
  X(cuDeviceGetUuid_v2, (void* uuid, int device))                                                   \
  X(cuDeviceGetAttribute, (int* value, int attribute, int device))                                  \
  X(cuDevicePrimaryCtxRetain, (DriverContext*, int device))                                         \
  X(cuDevicePrimaryCtxRelease_v2, (int device))                                                     \
  X(cuCtxGetDevice, (int* device))                                                                  \
  X(cuCtxPushCurrent_v2, (DriverContext))                                                           \
  X(cuCtxPopCurrent_v2, (DriverContext*))                                                           \
  X(cuCtxSynchronize, ())                                                                           \
  X(cuStreamCreate, (DriverStream*, unsigned flags))                                                \
  X(cuStreamDestroy_v2, (DriverStream))                                                             \
  X(cuStreamSynchronize, (DriverStream))                                                            \
  X(cuEventCreate, (DriverEvent*, unsigned flags))                                                  \
  X(cuEventRecord, (DriverEvent, DriverStream))                                                     \
  X(cuEventSynchronize, (DriverEvent))                                                              \
  X(cuEventDestroy_v2, (DriverEvent))                                                               \
  X(cuMemAlloc_v2, (DevicePtr*, size_t bytes))                                                      \
  X(cuMemFree_v2, (DevicePtr))                                                                      \
  X(cuMemGetInfo_v2, (size_t* free, size_t* total))                                                 \
  X(cuMemHostAlloc, (void**, size_t bytes, unsigned flags))                                         \
  X(cuMemHostGetDevicePointer_v2, (DevicePtr*, void* host, unsigned flags))                         \
  X(cuMemFreeHost, (void*))                                                                         \
  X(cuMemsetD8_v2, (DevicePtr, unsigned char value, size_t bytes))                                  \
  X(cuMemcpyHtoD_v2, (DevicePtr to, const void* from, size_t bytes))                                \
  X(cuMemcpyHtoDAsync_v2, (DevicePtr to, const void* from, size_t bytes, DriverStream))             \
  X(cuMemcpyDtoH_v2, (void* to, DevicePtr from, size_t bytes))                                      \
  X(cuMemcpyDtoHAsync_v2, (void* to, DevicePtr from, size_t bytes, DriverStream))                   \
  X(cuModuleLoadData, (DriverModule*, const void* image))                                           \
  X(cuModuleUnload, (DriverModule))                                                                 \
  X(cuModuleGetFunction, (DriverFunction*, DriverModule, const char* name))                         \
  X(cuModuleGetGlobal_v2, (DevicePtr*, size_t* bytes, DriverModule, const char* name))              \
  X(cuFuncSetAttribute, (DriverFunction, int attribute, int value))                                 \
  X(cuStreamIsCapturing, (DriverStream, int* status))                                               \
  X(cuLaunchKernelEx, (const LaunchConfig*, DriverFunction, void** params, void** extra))           \
  X(cuTensorMapEncodeTiled,                                                                         \
    (void* map, int type, unsigned rank, void* base, const uint64_t* dims, const uint64_t* strides, \
     const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion, int fill))

struct Driver {
#define FLASHMOE_DRIVER_MEMBER(symbol, parameters) CudaResult(*symbol) parameters;
  FLASHMOE_DRIVER_API(FLASHMOE_DRIVER_MEMBER)
#undef FLASHMOE_DRIVER_MEMBER
};

// The driver, initialised. Throws Error if there is no driver, or if it is too old.
const Driver& driver();

// Throws Error unless the result is success: "<doing>: CUDA_ERROR_...: <the driver's words>".
void check(CudaResult result, const char* doing);

}  // namespace flashmoe::cuda

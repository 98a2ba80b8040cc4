// The network: what the kernel calls of NVSHMEM, and all that these calls do. Only kernels for peers that are not
// mapped include this file.
//
// The calls are inlined from NVSHMEM's headers. If one call were left in the kernel, even of an assertion, ptxas would
// serialise every wgmma. The code by which a GPU itself talks to a network card (IBGDA, GPUNetIO) is left out: it is
// 390 KB of instructions with a stack frame and a printf, and needs headers of rdma-core that NVSHMEM's package lacks.
// Instead, NVSHMEM's CPU proxy sends to a peer that is not mapped. If a peer is mapped, these functions write its
// memory themselves.
//
// The calls are NVSHMEM's public ones, with three exceptions: settle() is public only as the end of a wait; quiet() is
// public only for a lane; put() is not public from 3.8 on. The exceptions, and how the headers declare what the host
// fills in, change from release to release. So only those releases are compiled with whose result somebody has looked
// at (python/flashmoe/nvshmem.py).
//
// A remote address is a symmetric address: that of the same place in the own heap.
#pragma once

#include <cstdint>
#include <cstdio>

#define NDEBUG
#include <cassert>

#define NVSHMEM_ENABLE_ALL_DEVICE_INLINING
#include "non_abi/nvshmem_build_options.h"
#include "non_abi/nvshmem_version.h"
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_GPUNETIO_SUPPORT
#if NVSHMEM_VENDOR_MINOR_VERSION == 6  // declares nvshmemi_device_state_d for relocatable code alone, unless told how
#define EXTERN_CONSTANT static __constant__
#endif
#include "device/nvshmem_defines.h"
#include "device/nvshmemx_defines.h"

#undef NDEBUG
#include <cassert>

// nvshmemx_cumodule_init looks for it in the module, and for nvshmemi_device_state_d, which the headers define.
#if NVSHMEM_VENDOR_MINOR_VERSION < 7  // else they define both
__constant__ nvshmemi_version_t nvshmemi_device_lib_version_d = {
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
#endif

namespace flashmoe::gpu {

// What Platform is made of where peers are not mapped.
struct Puts {
  static constexpr bool kPeersMapped = false;

  // Sends `bytes` to the place `to` of a peer's heap. The source must not change before quiet(). All lanes of a warp, whose
  // earlier writes are sent.
  static __device__ __forceinline__ void put(void* to, const void* from, uint32_t bytes, uint32_t peer) {
#if NVSHMEM_VENDOR_MINOR_VERSION < 8
    nvshmemx_putmem_nbi_warp(to, from, bytes, static_cast<int>(peer));
#else  // the public one looks for a region that batches puts, which is never open here, by a function that is not inlined
    nvshmemi_put_nbi<char, NVSHMEMI_THREADGROUP_WARP>(static_cast<char*>(to), static_cast<const char*>(from), bytes,
                                                      static_cast<int>(peer));
#endif
  }

  // put(), then the signal. Earlier puts are ordered before both by fence(). All lanes.
  static __device__ __forceinline__ void put_signal(void* to, const void* from, uint32_t bytes, uint64_t* signal,
                                                    uint64_t word, uint32_t peer) {
    nvshmemx_putmem_signal_nbi_warp(to, from, bytes, signal, word, NVSHMEM_SIGNAL_SET, static_cast<int>(peer));
  }

  // Orders the warp's earlier puts before its later ones to the same peer. All lanes; one of them issued the puts to peers that
  // are not mapped, and it is that one's fence.
  static __device__ __forceinline__ void fence() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) nvshmem_fence();
    __syncwarp();
  }

  // Returns when the warp's earlier puts have arrived. All lanes.
  static __device__ __forceinline__ void quiet() {
    __syncwarp();
    nvshmemi_quiet<NVSHMEMI_THREADGROUP_WARP>();
  }

  // Sets a word of a peer, after puts of any warp that has been through quiet() and of which this lane knows. One lane.
  static __device__ __forceinline__ void signal(uint64_t* to, uint64_t word, uint32_t peer) {
    __threadfence_system();
    nvshmemx_signal_op(to, word, NVSHMEM_SIGNAL_SET, static_cast<int>(peer));
  }

  // After a peer's signal was seen here: makes what was put before it visible, where a transport needs help with that. (As
  // nvshmem_signal_wait_until does once its wait is over.) Any lane.
  static __device__ __forceinline__ void settle() { nvshmemi_transfer_syncapi_update_mem(); }
};

}  // namespace flashmoe::gpu

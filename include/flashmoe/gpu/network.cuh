// The network: what the kernel calls of NVSHMEM, and all that these calls do. Only kernels for peers that are not
// mapped include this file.
//
// The calls are inlined from NVSHMEM's headers. If one call were left in the kernel, even of an assertion, ptxas would
// serialise every wgmma. The code by which a GPU itself talks to a network card (IBGDA, GPUNetIO) is left out: it is
// 390 KB of instructions with a stack frame and a printf, and needs headers of rdma-core that NVSHMEM's package lacks.
// Instead, NVSHMEM's CPU proxy sends to a peer that is not mapped. If a peer is mapped, these functions write its
// memory themselves.
//
// The calls are NVSHMEM's public ones, with three exceptions: what settle() calls is public only as the end of a
// wait; what quiet() calls is public only for a lane; what put() calls is not public from 3.8 on. These exceptions,
// and how the headers declare what the host fills in, change from release to release. So the kernel is compiled only
// with those releases for which the compiled result has been examined (python/flashmoe/nvshmem.py).
//
// A remote address is a symmetric address: the address of the same place in this rank's own heap.
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
#if NVSHMEM_VENDOR_MINOR_VERSION == 6  // without this, declares nvshmemi_device_state_d only for relocatable code
#define EXTERN_CONSTANT static __constant__
#endif
#include "device/nvshmem_defines.h"
#include "device/nvshmemx_defines.h"

#undef NDEBUG
#include <cassert>

// nvshmemx_cumodule_init looks in the module for nvshmemi_device_lib_version_d, and for nvshmemi_device_state_d,
// which the headers define.
#if NVSHMEM_VENDOR_MINOR_VERSION < 7  // later headers define both
__constant__ nvshmemi_version_t nvshmemi_device_lib_version_d = {
    NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
#endif

namespace flashmoe::gpu {

// The base of Platform if peers are not mapped.
struct Puts {
  static constexpr bool kPeersMapped = false;

  // Sends `bytes` bytes to the place `to` of a peer's heap. The source must not change before quiet(). Called by all
  // lanes of a warp: what any of them has written before is sent.
  static __device__ __forceinline__ void put(void* to, const void* from, uint32_t bytes, uint32_t peer) {
#if NVSHMEM_VENDOR_MINOR_VERSION < 8
    nvshmemx_putmem_nbi_warp(to, from, bytes, static_cast<int>(peer));
#else  // the public call asks whether puts are batched (they never are here) by a function that is not inlined
    nvshmemi_put_nbi<char, NVSHMEMI_THREADGROUP_WARP>(static_cast<char*>(to), static_cast<const char*>(from), bytes,
                                                      static_cast<int>(peer));
#endif
  }

  // put(), then sets the word `signal`. A fence() before this call orders earlier puts before both. All lanes.
  static __device__ __forceinline__ void put_signal(void* to, const void* from, uint32_t bytes, uint64_t* signal,
                                                    uint64_t word, uint32_t peer) {
    nvshmemx_putmem_signal_nbi_warp(to, from, bytes, signal, word, NVSHMEM_SIGNAL_SET, static_cast<int>(peer));
  }

  // Orders the warp's earlier puts before its later ones to the same peer. Called by all lanes. The first lane
  // fences, because it has issued the puts to peers that are not mapped.
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

  // Sets a word of a peer. The word arrives after the puts of every warp of which this lane knows that its quiet()
  // has returned. Called by one lane.
  static __device__ __forceinline__ void signal(uint64_t* to, uint64_t word, uint32_t peer) {
    __threadfence_system();
    nvshmemx_signal_op(to, word, NVSHMEM_SIGNAL_SET, static_cast<int>(peer));
  }

  // Called by any lane that has seen a peer's signal: makes what the peer put before the signal visible, because some
  // transports need this. (nvshmem_signal_wait_until does the same when its wait is over.)
  static __device__ __forceinline__ void settle() { nvshmemi_transfer_syncapi_update_mem(); }
};

}  // namespace flashmoe::gpu

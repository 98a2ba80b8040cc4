// Copies between global and shared memory: whole boxes and runs of bytes by the copy engine (TMA), 16 bytes at a time by
// cp.async.
#pragma once

#include <cstdint>

#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// How long the L2 is to keep what is loaded: as long as other lines, or no longer than it must. What
// createpolicy.fractional would return, as constants: registers are full of the gather's addresses, and a policy in
// them would be spilled.
inline constexpr uint64_t kEvictNormally = 0x1000'0000'0000'0000;
inline constexpr uint64_t kEvictFirst = 0x12f0'0000'0000'0000;

// Box of a tensor at coordinates (c0 innermost) to shared memory; its bytes complete transactions of `barrier`.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, uint32_t c0,
                                         uint32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, uint32_t c0, uint32_t c1,
                                         uint32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, uint32_t c0, uint32_t c1,
                                         uint32_t c2, uint32_t c3, uint32_t c4, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(hint)
      : "memory");
}

// The same to both blocks of the cluster, at the same place of each, where it completes transactions of the same barrier.
__device__ __forceinline__ void tma_load_to_cluster(uint32_t to, const TensorMap* map, uint32_t barrier, uint32_t c0,
                                                    uint32_t c1, uint32_t c2, uint32_t c3, uint32_t c4, uint64_t hint) {
  constexpr uint16_t kBoth = (1 << kClusterBlocks) - 1;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(kBoth), "l"(hint)
      : "memory");
}

// Has the copy engine fetch a map, which else its first load waits for.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// `bytes` bytes, a multiple of 16 as both addresses are, to shared memory; they complete transactions of `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// From shared memory to global memory, a peer's too. bulk_commit() makes the thread's stores since its last one a
// group.
__device__ __forceinline__ void bulk_store(uint8_t* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the shared memory of all of the thread's groups has been read;
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// until they are written, as if by the thread.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// 16 bytes. Past L1: each byte is used once per block.
__device__ __forceinline__ void cp_async16(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 8 bytes.
__device__ __forceinline__ void cp_async8(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void cp_async4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The same as cp_async16, of which the first `valid` (0 or 16) are read, the others zero.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t to, const uint8_t* from, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// 4 bytes, of which the first `valid` are read, the others zero.
__device__ __forceinline__ void cp_async4_or_zero(uint32_t to, const void* from, uint32_t valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// One of the arrivals that `barrier` was initialized with, made once all cp.async of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// This thread's cp.async since the last commit are a group; waits until no more than kLater groups are under way.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <uint32_t kLater>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Has the L2 fetch so many bytes, a multiple of 16, as the address is.
__device__ __forceinline__ void prefetch_to_l2(const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace flashmoe::sm90

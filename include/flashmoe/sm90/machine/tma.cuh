// Copies between global and shared memory: whole boxes and runs of bytes by the copy engine (TMA), up to 16 bytes at a
// time by cp.async.
#pragma once

#include <cstdint>

#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// How long the L2 is to keep what is loaded: as long as other lines, or no longer than it must. The values are those
// that createpolicy.fractional returns. They are constants because a policy in registers, which are full of the
// gather's addresses, would be spilled.
inline constexpr uint64_t kEvictNormally = 0x1000'0000'0000'0000;
inline constexpr uint64_t kEvictFirst = 0x12f0'0000'0000'0000;

// Loads the box of a tensor at these coordinates (c0 innermost) to shared memory. The bytes count towards those for
// which `barrier` waits (arrive_expect_tx).
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

// The same to both blocks of the cluster, at the same address in each. In each block, the bytes count at the block's
// own barrier at address `barrier`.
__device__ __forceinline__ void tma_load_to_cluster(uint32_t to, const TensorMap* map, uint32_t barrier, uint32_t c0,
                                                    uint32_t c1, uint32_t c2, uint32_t c3, uint32_t c4, uint64_t hint) {
  constexpr uint16_t kBoth = (1 << kClusterBlocks) - 1;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(kBoth), "l"(hint)
      : "memory");
}

// Makes the copy engine fetch a tensor map in advance. Otherwise the first load by the map waits for it.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies `bytes` bytes from global to shared memory. `bytes` and both addresses are multiples of 16. The bytes count
// towards those for which `barrier` waits.
__device__ __forceinline__ void bulk_load(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Copies from shared memory to global memory, which may be a peer's. bulk_commit() makes one group of all
// bulk_store() of this thread since its last bulk_commit().
__device__ __forceinline__ void bulk_store(uint8_t* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the shared memory of all of the thread's groups has been read.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until all of the thread's groups are written. They then count as writes of this thread.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Copies 16 bytes to shared memory, asynchronously. It bypasses L1, because a block uses each byte once.
__device__ __forceinline__ void cp_async16(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies 8 bytes, likewise, but through L1.
__device__ __forceinline__ void cp_async8(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Copies 4 bytes, likewise, through L1.
__device__ __forceinline__ void cp_async4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The same as cp_async16(), but only the first `valid` bytes (0 or 16) are read, and the others become zero.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t to, const uint8_t* from, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// The same as cp_async4(), but only the first `valid` bytes are read, and the others become zero.
__device__ __forceinline__ void cp_async4_or_zero(uint32_t to, const void* from, uint32_t valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// Arrives at `barrier` once all cp.async of this thread so far have landed. It is one of the arrivals with which the
// barrier was initialized.
__device__ __forceinline__ void cp_async_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// cp_async_commit() makes one group of this thread's cp.async since its last call. cp_async_wait() waits until no
// more than kLater groups are under way.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <uint32_t kLater>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Makes the L2 fetch `bytes` bytes. `bytes` and the address are multiples of 16.
__device__ __forceinline__ void prefetch_to_l2(const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace flashmoe::sm90

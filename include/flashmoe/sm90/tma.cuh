// Copies from global to shared memory: whole boxes by the copy engine (TMA), 16 bytes at a time by cp.async.
#pragma once

#include <cstdint>

#include "flashmoe/sm90/kernel_args.h"

namespace flashmoe::sm90 {

// L2 eviction priority as `createpolicy.fractional.L2::evict_normal.b64 policy, 1.0` encodes it.
enum class L2Hint : uint64_t {
  kEvictNormal = 0x1000000000000000,
};

// Box of a tensor at coordinates (c0 innermost) to shared memory; its bytes complete transactions of `barrier`. Without
// a cluster launch the block is a cluster of its own, so that its shared::cta addresses are shared::cluster addresses.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, L2Hint hint, uint32_t c0,
                                         uint32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(static_cast<uint64_t>(hint)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, L2Hint hint, uint32_t c0,
                                         uint32_t c1, uint32_t c2, uint32_t c3, uint32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(static_cast<uint64_t>(hint)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// 16 bytes. Past L1: each byte is used once per block.
__device__ __forceinline__ void cp_async16(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, of which the first `valid` (0 or 16) are read, the others zero.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t to, const uint8_t* from, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// One of the arrivals that `barrier` was initialized with, made once all cp.async of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace flashmoe::sm90

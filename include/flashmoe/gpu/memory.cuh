// Loads from device memory that say how the caches are to treat them.
#pragma once

#include <cstdint>

namespace flashmoe::gpu {

// 16 bytes that nobody of this multiprocessor will read again.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Has the L2 fetch so many bytes, a multiple of 16 as the address is.
__device__ __forceinline__ void prefetch_l2(const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace flashmoe::gpu

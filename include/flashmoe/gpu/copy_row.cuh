// Copies rows that pass through a multiprocessor once.
#pragma once

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// Copies a row of a multiple of 16 bytes, by one warp. kFlight: how many loads of 16 bytes a lane has in flight. The
// row may have been written while the kernel runs.
template <uint32_t kFlight = 8>
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, uint32_t bytes) {
#pragma unroll 1
  for (uint32_t base = Platform::lane() * 16; base < bytes; base += kFlight * 512) {
    uint4 v[kFlight];
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) {
      if (base + i * 512 < bytes) v[i] = load_once(from + base + i * 512);
    }
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) {
      if (base + i * 512 < bytes) *reinterpret_cast<uint4*>(to + base + i * 512) = v[i];
    }
  }
}

}  // namespace flashmoe::gpu

// How a warp copies a row from device memory to device memory, where no pipeline's memory is free for the copy engine.
#pragma once

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// Copies a row of `bytes`, a multiple of 16. kChunks: chunks of 16 bytes that a lane has on their way. All lanes.
template <uint32_t kChunks>
__device__ __forceinline__ void copy_row(const uint8_t* from, uint8_t* to, uint32_t bytes) {
  using P = Platform;
  constexpr uint32_t kStep = P::kLanes * 16;
  FLASHMOE_NO_UNROLL
  for (uint32_t at = P::lane() * 16; at < bytes; at += kChunks * kStep) {
    uint4 chunk[kChunks];
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k) {
      if (at + k * kStep < bytes) chunk[k] = load_once(from + at + k * kStep);
    }
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k) {
      if (at + k * kStep < bytes) *reinterpret_cast<uint4*>(to + at + k * kStep) = chunk[k];
    }
  }
}

}  // namespace flashmoe::sm90

// How a warp copies rows for a PutSender (actors/put_sender.h).
#pragma once

#include "flashmoe/actors/put_sender.h"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/tracer.cuh"
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

// The GPU's engine of a PutSender.
template <class Dtype, class Trace>
class PutEngine {
 public:
  __device__ __forceinline__ PutEngine(const KernelArgs& args, const Call& call, const Trace& trace)
      : args_(args), c_(call), trace_(trace) {}

  __device__ __forceinline__ void stage_row(uint32_t token) const {
    // With more on their way, and NVSHMEM's code in the same loop, kernels spill.
    constexpr uint32_t kChunks = Dtype::kBytes == 2 ? 4 : 2;
    copy_row<kChunks>(args_.x + token * args_.x_row_bytes, c_.out_row(token), c_.memory.token_row_bytes);
  }
  __device__ __forceinline__ void begin() const { trace_.begin(); }
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column) const {
    trace_.end(phase, index, column);
  }

 private:
  const KernelArgs& args_;
  const Call& c_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

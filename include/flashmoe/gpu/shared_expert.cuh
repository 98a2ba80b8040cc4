// The shared expert's weight in a token's sum. It is 1; with a gate, it is the sigmoid of the token's row times the
// gate's row. (The shared expert is cut into slices, each as wide as an expert. In the kernel for a few tokens each slice
// is a choice of every token. In the general kernel the whole shared expert is one choice of every token: GEMM0 has tasks
// for each slice, and GEMM1 sums over all slices at once. See CallShape::shared.)
#pragma once

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/route.cuh"

namespace flashmoe::gpu {

// The weight for the token whose row is at `row`: the same in every lane, and the same bits in every kernel. One warp.
template <class Dtype>
__device__ __forceinline__ float shared_weight(const KernelArgs& args, const uint8_t* row, uint32_t hidden) {
  if (args.shared_gate == nullptr) return 1.0f;
  constexpr uint32_t kElements = 16 / Dtype::kBytes;
  const auto* const gate = static_cast<const uint8_t*>(args.shared_gate);
  float sum[kElements] = {};
#pragma unroll 8
  for (uint32_t at = Platform::lane(); at < hidden / kElements; at += Platform::kLanes) {
    float w[kElements], v[kElements];
    Dtype::spread(w, load_row16(gate + at * 16));
    Dtype::spread(v, load_row16(row + at * 16));
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) sum[i] = fmaf(w[i], v[i], sum[i]);
  }
#pragma unroll
  for (uint32_t i = 1; i < kElements; ++i) sum[0] += sum[i];
#pragma unroll
  for (uint32_t apart = 16; apart != 0; apart /= 2) sum[0] += __shfl_xor_sync(kFullWarp, sum[0], apart);
  return sigmoid(sum[0]);
}

}  // namespace flashmoe::gpu

// The gradient of a choice's combine weight, in a backward pass.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"

namespace flashmoe::gpu {

// How many rows of pre-activations a token has: one for each choice of a routed expert, and one for each slice of the
// shared expert.
__device__ __forceinline__ uint32_t rows_of_token(const CallShape& shape) {
  return kBuild.sliced ? shape.routed_top_k() + shape.shared : shape.top_k;
}

// The router's E and K. In builds without slices (kBuild.sliced), these are the call's `experts` and `top_k`.
__device__ __forceinline__ uint32_t gate_experts_of(const CallShape& shape) {
  return kBuild.sliced ? shape.gate_experts : shape.experts;
}
__device__ __forceinline__ uint32_t gate_top_k_of(const CallShape& shape) {
  return kBuild.sliced ? shape.gate_top_k : shape.top_k;
}

namespace detail {

// The gradient of the weight of the call's choice k of a token. (If experts are cut into slices, each slice is a
// choice of the call.)
__device__ __forceinline__ float slice_gradient(const KernelArgs& args, uint32_t token, uint32_t k, uint32_t parts) {
  const CallShape& shape = args.call.shape;
  const BackwardArgs& b = args.backward;
  const uint64_t choice = uint64_t{token} * shape.top_k + k;
  if (b.kept.ids[choice] < 0) return 0.0f;
  if constexpr (kTrainsInGroup) {
    const uint8_t* const own = args.call.memory.heaps[args.call.rank] + args.group.weights_at;
    return reinterpret_cast<const float*>(own + uint64_t{token} * args.group.weights_pitch)[k];
  }
  const uint64_t all = uint64_t{shape.tokens} * rows_of_token(shape);
  const uint64_t row = kBuild.sliced ? uint64_t{token} * rows_of_token(shape) + k : choice;
  float sum = 0.0f;
#pragma unroll 8
  for (uint32_t p = 0; p < parts; ++p) sum += b.weight_parts[p * all + row];
  return sum;
}

}  // namespace detail

// The gradient of the weight of the router's choice k of a token; 0 if the choice was dropped. On a rank alone, it is
// the sum of `parts` parts, and the caller calls this only when all parts are stored. Among several ranks, it is the
// number that has come home, and the caller calls this only when all of dX has returned.
__device__ __forceinline__ float choice_gradient(const KernelArgs& args, uint32_t token, uint32_t k, uint32_t parts) {
  if constexpr (!kBuild.sliced) return detail::slice_gradient(args, token, k, parts);
  const uint32_t slices = args.call.shape.slices;
  float sum = 0.0f;
#pragma unroll 1
  for (uint32_t s = 0; s < slices; ++s) sum += detail::slice_gradient(args, token, k * slices + s, parts);
  return sum;
}

}  // namespace flashmoe::gpu

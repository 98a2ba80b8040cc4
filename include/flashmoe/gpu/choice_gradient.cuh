// The gradient of a choice's combine weight, of a backward pass.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"

namespace flashmoe::gpu {

// Rows of pre-activations that a token has: one for each choice, of the shared expert for each slice.
__device__ __forceinline__ uint32_t rows_of_token(const CallShape& shape) {
  return kBuild.sliced ? shape.routed_top_k() + shape.shared : shape.top_k;
}

// The router's experts and choices, which in builds of passes that train without slices are the call's.
__device__ __forceinline__ uint32_t gate_experts_of(const CallShape& shape) {
  return kBuild.sliced ? shape.gate_experts : shape.experts;
}
__device__ __forceinline__ uint32_t gate_top_k_of(const CallShape& shape) {
  return kBuild.sliced ? shape.gate_top_k : shape.top_k;
}

namespace detail {

// Of one of the call's choices, of which one is a slice of an expert's.
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

// Of choice k of a token, 0 where it was dropped. A rank alone: the sum of its parts, of which there are so many, once all are
// stored. Among several ranks: what has come home, once all of dX has returned.
__device__ __forceinline__ float choice_gradient(const KernelArgs& args, uint32_t token, uint32_t k, uint32_t parts) {
  if constexpr (!kBuild.sliced) return detail::slice_gradient(args, token, k, parts);
  const uint32_t slices = args.call.shape.slices;
  float sum = 0.0f;
#pragma unroll 1
  for (uint32_t s = 0; s < slices; ++s) sum += detail::slice_gradient(args, token, k * slices + s, parts);
  return sum;
}

}  // namespace flashmoe::gpu

// The gradient of a choice's combine weight, of a backward pass.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// Of choice k of a token, 0 where it was dropped. A rank alone: the sum of its parts, of which there are so many, once all are
// stored. Among several ranks: what has come home, once all of dX has returned.
__device__ __forceinline__ float choice_gradient(const KernelArgs& args, uint32_t token, uint32_t k, uint32_t parts) {
  const CallShape& shape = args.call.shape;
  const BackwardArgs& b = args.backward;
  const uint64_t choice = uint64_t{token} * shape.top_k + k;
  if (b.kept.ids[choice] < 0) return 0.0f;
  if constexpr (kTrainsInGroup) {
    const uint8_t* const own = args.call.memory.heaps[args.call.rank] + args.group.weights_at;
    return reinterpret_cast<const float*>(own + uint64_t{token} * args.group.weights_pitch)[k];
  }
  const uint64_t all = uint64_t{shape.tokens} * shape.top_k;
  float sum = 0.0f;
#pragma unroll 8
  for (uint32_t p = 0; p < parts; ++p) sum += b.weight_parts[p * all + choice];
  return sum;
}

}  // namespace flashmoe::gpu

// The products of the gate's stages, as both of its forms need them (roles/dispatch.cuh, roles/shared_gate.cuh). Run by
// a consumer warpgroup. It reads stages in shared memory, releases them, and keeps sums in registers.
#pragma once

#include "flashmoe/sm90/machine/mainloop.cuh"

namespace flashmoe::sm90 {

// acc = the logits of `stages` stages, which have all of H, without their biases. By the tensor cores each segment of H
// has a sum of its own (kLogitSegments), and sums are added in the order of segments.
template <class Dtype, class Shape>
__device__ __forceinline__ void multiply_segments(typename Shape::Stage::Ring& ring, uint32_t group, uint32_t stages,
                                                  Accumulators<Shape>& acc) {
  static_assert(Shape::Stage::kBlocks == 1);  // a stage has one k-block
  if constexpr (!Dtype::kTensorCores) {
    multiply<Dtype, Shape>(ring, group, stages, false, acc);
  } else {
    clear<Shape>(acc);
#pragma unroll 1
    for (uint32_t segment = 0; segment < kLogitSegments; ++segment) {
      const uint32_t of_segment = segment_begin(stages, segment + 1) - segment_begin(stages, segment);
      if (of_segment == 0) continue;
      Accumulators<Shape> sums;
      multiply<Dtype, Shape>(ring, group, of_segment, false, sums);
#pragma unroll
      for (uint32_t m = 0; m < Shape::kMs; ++m) {
#pragma unroll
        for (uint32_t i = 0; i < Shape::kN / 2; ++i) acc[m][i] += sums[m][i];
      }
    }
  }
}

}  // namespace flashmoe::sm90

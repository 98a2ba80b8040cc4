// Consumer warpgroups compute a task's product of rows and weights in e4m3, in the shapes TokensByFeatures<Wide> and
// TokensByHalfFeatures<Wide>.
//
// The tensor cores add products of e4m3 with some 14 bits of mantissa. So they add them only over one k-block of 128.
// The result is multiplied by the scales, and added to sums in fp32 ("promoted"). A thread has 128 sums, and registers
// for the products of 64 of the 256 features. So a k-block is four wgmmas, one after the other, and the warpgroup waits
// for each. While one warpgroup promotes, the tensor cores work for the other. Rows are loaded to registers once for
// all four wgmmas. From shared memory they would be read four times, and its bandwidth would be the limit.
#pragma once

#include "flashmoe/sm90/machine/lane.cuh"
#include "flashmoe/sm90/machine/mainloop.cuh"
#include "flashmoe/sm90/machine/stage_scales.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kPromoted = 64;  // features at a time
inline constexpr uint32_t kSteps = kRowBytes / kWgmmaBytes;
inline constexpr auto kScaleBytes = static_cast<uint32_t>(sizeof(StageScales));

// The products of a k-block: rows are a's, the features lie at the descriptor.
__device__ __forceinline__ void multiply_block(float (&products)[kPromoted / 2], const uint32_t (&a)[kSteps][4],
                                               uint32_t features) {
  wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kSteps; ++k) {
    wgmma_e4m3(products, a[k], features + (k * kWgmmaBytes >> 4), k != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_accumulators(products);
}

}  // namespace detail

// sum = rows * weights^T over so many stages, times their scales. `scales`: shared address of stage 0's StageScales.
// `in_turn`: of 16 features 8 have the one scale of the weights and 8 the other; else the first and the last 128 have.
// `scaled`: false where weights' scales are not the stages'. All 128 threads of the warpgroup, converged.
template <class Shape>
__device__ __forceinline__ void multiply_quantised(Pipeline& ring, uint32_t scales, uint32_t group, uint32_t stages,
                                                   bool in_turn, bool scaled, float (&sum)[Shape::kN / 2]) {
  using namespace detail;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kN / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
  for (; stages != 0; --stages) {
    wait(ring.full(), ring.parity);
    const Lane at = Lane::of_thread(group);  // anew each time: registers are full
    const uint32_t row = group * Shape::kNextA + at.warp * 16, of_stage = scales + ring.stage * kScaleBytes;
    const float low = load_shared4(of_stage + (row + at.row()) * 4),
                high = load_shared4(of_stage + (row + at.row() + 8) * 4);
    float first = 1.0f, second = 1.0f;
    if (scaled) {
      first = load_shared4(of_stage + offsetof(StageScales, weights));
      second = load_shared4(of_stage + offsetof(StageScales, weights) + sizeof(float));
    }
    const uint32_t rows = chunk_address(ring.data() + Wide::tokens(0), row + at.lane % 16, at.lane / 16);
    uint32_t a[kSteps][4];
#pragma unroll
    for (uint32_t k = 0; k < kSteps; ++k) load_matrices(a[k], rows ^ k * kWgmmaBytes);
    const auto stage =
        static_cast<uint32_t>(matrix_descriptor(ring.data() + Wide::features(0) + group * Shape::kNextB * kRowBytes));
#pragma unroll
    for (uint32_t c = 0; c < Shape::kN / kPromoted; ++c) {
      float products[kPromoted / 2];
      multiply_block(products, a, stage + (c * kPromoted * kRowBytes >> 4));
      const bool upper = kHalvesColumns<Shape> ? group != 0 : c >= 2;
      const float even = in_turn || !upper ? first : second, odd = in_turn || upper ? second : first;
#pragma unroll
      for (uint32_t j = 0; j < kPromoted / 8; ++j) {
        const float w = j % 2 == 0 ? even : odd;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          float& to = sum[c * (kPromoted / 2) + 4 * j + i];
          to = fmaf(products[4 * j + i], (i < 2 ? low : high) * w, to);
        }
      }
    }
    release_stage<E4M3, Wide>(ring.empty());
    ring.advance();
  }
}

}  // namespace flashmoe::sm90

// Consumer warpgroups compute a task's product of rows and weights in e4m3, in the shapes TokensByFeatures<Wide> and
// TokensByHalfFeatures<Wide>.
//
// The tensor cores add products of e4m3 with some 14 bits of mantissa. So they add products only over one k-block of
// 128 elements. The result is multiplied by the scales, and added to sums in fp32 ("promoted"). A thread has up to
// 128 sums, and registers for the products of 64 features. So a k-block is multiplied in parts of 64 features, one
// after the other, and the warpgroup waits for each part: four parts with TokensByFeatures, two with
// TokensByHalfFeatures. While one warpgroup promotes, the tensor cores work for the other. Rows are loaded to
// registers once for all parts. If wgmma read them from shared memory, it would read them once for each part, and the
// memory's bandwidth would be the limit.
#pragma once

#include "flashmoe/sm90/machine/lane.cuh"
#include "flashmoe/sm90/machine/mainloop.cuh"
#include "flashmoe/sm90/machine/stage_scales.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kPromoted = 64;  // features of a part
inline constexpr uint32_t kSteps = kRowBytes / kWgmmaBytes;
inline constexpr auto kScaleBytes = static_cast<uint32_t>(sizeof(StageScales));

// The products of a k-block: the rows are in the registers `a`; the descriptor `features` says where the features lie.
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

// sum = rows * weights^T over `stages` stages, times the scales of rows and weights. `scales`: shared address of
// stage 0's StageScales. `in_turn`: of each 16 features, the first 8 have the weights' first scale, and the other 8
// the second; otherwise the first 128 features have the first scale, and the last 128 the second. `scaled`: false if
// the stages have no scales of weights. Run by all 128 threads of the warpgroup, converged.
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

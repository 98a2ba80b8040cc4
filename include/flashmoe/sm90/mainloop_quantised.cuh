// Consumer warpgroups: a task's product of rows and weights in e4m3, in the shape TokensByFeatures<Wide>.
//
// The tensor cores add products of e4m3 up with some 14 bits of mantissa, so they do it for one k-block of 128 alone; what
// they give is multiplied by the scales, and added to sums in fp32. Besides the 128 sums of a thread there are registers
// for the products of 64 of the 256 features: of 32 that are promoted, and of 32 that the tensor cores have meanwhile. Rows
// are loaded to registers, once for all features of a k-block: from shared memory they would be read eight times over, and
// its bandwidth would be the limit.
#pragma once

#include "flashmoe/sm90/epilogue.cuh"
#include "flashmoe/sm90/mainloop.cuh"
#include "flashmoe/sm90/stage_scales.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kPromoted = 32;  // features at a time
inline constexpr uint32_t kParts = Wide::kFeatures / kPromoted;
inline constexpr uint32_t kSteps = kRowBytes / kWgmmaBytes;
inline constexpr auto kScaleBytes = static_cast<uint32_t>(sizeof(StageScales));

using Products = float[kPromoted / 2];

// A warp's rows of a stage, and what a thread's products are multiplied by.
struct RowsOfStage {
  uint32_t a[kSteps][4];
  float low, high;      // scales of its two rows
  float first, second;  // of the weights

  __device__ __forceinline__ void load(const Pipeline& ring, uint32_t scales, uint32_t group, bool scaled) {
    const Lane at = Lane::of_thread(group);  // anew each time: registers are full
    const uint32_t row = group * 64 + at.warp * 16, of_stage = scales + ring.stage * kScaleBytes;
    const uint32_t rows = chunk_address(ring.data() + Wide::tokens(0), row + at.lane % 16, at.lane / 16);
#pragma unroll
    for (uint32_t k = 0; k < kSteps; ++k) load_matrices(a[k], rows ^ k * kWgmmaBytes);
    low = load_shared4(of_stage + (row + at.row()) * 4);
    high = load_shared4(of_stage + (row + at.row() + 8) * 4);
    first = second = 1.0f;
    if (scaled) {
      first = load_shared4(of_stage + offsetof(StageScales, weights));
      second = load_shared4(of_stage + offsetof(StageScales, weights) + sizeof(float));
    }
  }
};

// Issues the products of part `part` of the stage's features, and does not wait for them.
__device__ __forceinline__ void multiply_part(Products& products, const RowsOfStage& rows, const Pipeline& ring,
                                              uint32_t part) {
  const auto features = static_cast<uint32_t>(matrix_descriptor(ring.data() + Wide::features(0)));
  wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kSteps; ++k) {
    wgmma_e4m3(products, rows.a[k], features + (part * kPromoted * kRowBytes + k * kWgmmaBytes >> 4), k != 0);
  }
  wgmma_commit();
}

// What products of a part are multiplied by, of 8 features and the next 8, and of the thread's two rows.
struct Factors8 {
  float of[2][2];

  __device__ __forceinline__ Factors8(const RowsOfStage& rows, bool in_turn, uint32_t part) {
    const bool upper = part >= kParts / 2;
    const float even = in_turn || !upper ? rows.first : rows.second, odd = in_turn || upper ? rows.second : rows.first;
    of[0][0] = rows.low * even, of[0][1] = rows.high * even, of[1][0] = rows.low * odd, of[1][1] = rows.high * odd;
  }
  __device__ __forceinline__ void promote(float (&sum)[128], const Products& products, uint32_t part) const {
#pragma unroll
    for (uint32_t i = 0; i < kPromoted / 2; ++i) {
      float& to = sum[part * (kPromoted / 2) + i];
      to = fmaf(products[i], of[i / 4 % 2][i % 4 / 2], to);
    }
  }
};

}  // namespace detail

// sum = rows * weights^T over so many stages, times their scales. `scales`: shared address of stage 0's StageScales.
// `in_turn`: of 16 features 8 have the one scale of the weights and 8 the other; else the first and the last 128 have.
// `scaled`: false where weights' scales are not the stages'. All 128 threads of the warpgroup, converged.
__device__ __forceinline__ void multiply_quantised(Pipeline& ring, uint32_t scales, uint32_t group, uint32_t stages,
                                                   bool in_turn, bool scaled, float (&sum)[128]) {
  using namespace detail;
#pragma unroll
  for (uint32_t i = 0; i < 128; ++i) sum[i] = 0.0f;
  RowsOfStage rows;
  Products products[2];
  wait(ring.full(), ring.parity);
  rows.load(ring, scales, group, scaled);
  multiply_part(products[0], rows, ring, 0);
#pragma unroll 1
  while (true) {
    const Factors8 lower(rows, in_turn, 0), upper(rows, in_turn, kParts - 1);
#pragma unroll
    for (uint32_t part = 0; part + 1 < kParts; ++part) {
      multiply_part(products[(part + 1) % 2], rows, ring, part + 1);
      wgmma_wait<1>();
      pin_accumulators(products[part % 2]);
      (part < kParts / 2 ? lower : upper).promote(sum, products[part % 2], part);
    }
    wgmma_wait<0>();
    pin_accumulators(products[1]);
    release_stage<E4M3, Wide>(ring.empty());
    ring.advance();
    if (--stages == 0) {
      upper.promote(sum, products[1], kParts - 1);
      return;
    }
    wait(ring.full(), ring.parity);
    rows.load(ring, scales, group, scaled);
    upper.promote(sum, products[1], kParts - 1);  // while the rows come
    multiply_part(products[0], rows, ring, 0);
  }
}

}  // namespace flashmoe::sm90

// The products of decode/products.cuh, for experts in e4m3. The tensor cores multiply in fp16. The same warps run it on
// the same memory. They also read the scales behind the stage's rows.
//
// Hopper's tensor cores take e4m3 only by wgmma. From mma.sync's m16n8k32, ptxas makes conversions to fp16 and two
// m16n8k16. So this code converts to fp16 itself, where it costs least: the warp that multiplies converts the weights,
// and the warp that loads converts each row once. fp16 has all numbers of e4m3, and fp32 has all of their products. The
// tensor cores add these products with all bits of fp32 or more. (wgmma adds products of e4m3 with some 14 bits.) The
// sum of a stage is multiplied by the stage's scales, and added to sums in fp32.
#pragma once

#include "flashmoe/gpu/quantise.cuh"
#include "flashmoe/sm90/decode/products.cuh"

namespace flashmoe::sm90::few {

// Where 16-byte chunk `chunk` of a row lies, from the beginning of a stage's rows. A row has 128 numbers in fp16.
__device__ __forceinline__ uint32_t wide_chunk_offset(uint32_t row, uint32_t chunk) {
  return row * kFewRowPitch + (chunk ^ row % 8) * 16;
}
// 16 elements of a row in fp16, by pairs. In a fragment of weights in e4m3 that ldmatrix loads, a lane has four
// neighbours of each 16 elements. A step of mma takes the first two as the lane's elements k and k + 1, and the other
// two as k + 8 and k + 9, since the order within a step is free. The rows' chunks must have the same order: the first
// has pairs 0, 2, 4 and 6 of the 16 elements, and the second the others.
struct StepPairs {
  uint32_t pair[8];

  __device__ __forceinline__ uint4 chunk(uint32_t second) const {
    return {pair[second], pair[2 + second], pair[4 + second], pair[6 + second]};
  }
};

template <class D>
struct StageWeights<Quantised<D>> {
  static constexpr uint32_t kSteps = kRowBytes / 16;
  uint32_t fragments[kSteps / 2][4];

  __device__ __forceinline__ void load(uint32_t stage, uint32_t feature) {
    const uint32_t matrix = P::lane() / 8, row = feature + matrix % kBlocks * kProductRows + P::lane() % 8;
#pragma unroll
    for (uint32_t h = 0; h < kSteps / 2; ++h) {
      load_matrices(fragments[h], chunk_address(stage, row, 2 * h + matrix / kBlocks));
    }
  }
  // Adds the products with the stage's rows, in an order that does not depend on their number. There is no branch, so
  // that the chains of products of two stages run side by side.
  template <class Arranged>
  __device__ __forceinline__ void multiply(uint32_t stage, Arranged, TensorSums<Quantised<D>>& sums) const {
    constexpr uint32_t kAtOnce = min_of(Arranged::kEights, 2u);
    uint32_t a[kSteps][4];
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {
      const uint32_t (&both)[4] = fragments[s / 2];
      widen_e4m3(both[s % 2 * 2], a[s][0], a[s][2]);
      widen_e4m3(both[s % 2 * 2 + 1], a[s][1], a[s][3]);
    }
#pragma unroll
    for (uint32_t n = 0; n < Arranged::kEights; n += kAtOnce) multiply_eights<kAtOnce>(a, stage, n, sums);
  }

 private:
  // Multiplies by kEights groups of eight rows side by side. Even steps have one sum and odd steps another, because
  // with one sum each step would wait for the step before.
  template <uint32_t kEights>
  static __device__ __forceinline__ void multiply_eights(const uint32_t (&a)[kSteps][4], uint32_t stage, uint32_t first,
                                                         TensorSums<Quantised<D>>& sums) {
    static_assert(kBlocks == 2);
    const uint32_t matrix = P::lane() / 8, row = P::lane() % 8;
    float products[kEights][2][4] = {};
#pragma unroll
    for (uint32_t h = 0; h < kSteps / 2; ++h) {
#pragma unroll
      for (uint32_t n = 0; n < kEights; ++n) {
        uint32_t b[4];  // of two steps
        load_matrices(b, stage + wide_chunk_offset(8 * (first + n) + row, 4 * h + matrix));
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t (&w)[4] = a[2 * h + i];
          gpu::detail::mma<Fp16>(products[n][i], w[0], w[1], w[2], w[3], b[2 * i], b[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kEights; ++n) {
      const uint32_t scales = stage + kFewScalesAt + (8 * (first + n) + P::lane() % 4 * 2) * sizeof(float);
      float sum[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) sum[i] = products[n][0][i] + products[n][1][i];
      sums.add_scaled(first + n, sum, load_shared8(scales), load_shared8(scales + kFewStageRows * sizeof(float)));
    }
  }
};

}  // namespace flashmoe::sm90::few

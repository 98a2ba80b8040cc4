// The same of experts in mxfp4, which are decoded to rows' type on the way from shared memory to the tensor cores.
//
// A stage is 256 of K, eight blocks of 32. Of a block of a row ldmatrix gives each of four lanes four bytes, so eight
// neighbouring numbers: all that the lane has in two steps of mma, for the order of K within them is free, if that of rows
// is the same. So a lane's part of these is eight neighbours, too: the 16 bytes of a chunk.
#pragma once

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/few_products.cuh"

namespace flashmoe::sm90::few {

template <class D>
struct StageWeights<MxFp4<D>> {
  static constexpr uint32_t kPairs = kRowBytes / 32;  // of blocks of a row
  uint32_t from, first;                               // the stage, and the warp's first feature
  // Of the lane's row of both blocks of eight: scales of the first four blocks along K, a byte each, and of the others.
  uint32_t scales[kBlocks][2];

  __device__ __forceinline__ void load(uint32_t stage, uint32_t feature) {
    from = stage, first = feature;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint32_t row = feature + i * kProductRows + P::lane() / 4;
      const uint4 v = load_shared16(stage + kFewWeightScalesAt + row * sizeof(StageScaleRow));
      const uint32_t words[3] = {v.x, v.y, v.z}, shift = v.w;
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) scales[i][j] = __funnelshift_r(words[j], words[j + 1], shift);
    }
  }
  // Adds the products with the stage's rows, in the order of StageWeights.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t rows, bool apart, TensorSums<D>& sums) const {
    static_assert(E2M1In<D>::kMostScale == 0x7f);
    const uint32_t all = scales[0][0] | scales[0][1] | scales[1][0] | scales[1][1];
    if (P::ballot((all & 0x80808080u) != 0) == 0) {
      multiply_rows<false>(stage, rows, apart, sums);
    } else {
      multiply_rows<true>(stage, rows, apart, sums);
    }
  }

 private:
  template <bool kLarge>
  __device__ __forceinline__ void multiply_rows(uint32_t stage, uint32_t rows, bool apart, TensorSums<D>& sums) const {
    auto sum_of_step = [](uint32_t step, uint32_t) { return step; };
    auto sum_of_eight = [](uint32_t, uint32_t eight) { return eight; };
    if (apart) {
      multiply_eights<kLarge, 1>(stage, sum_of_step, sums);
    } else if (rows <= 8) {
      multiply_eights<kLarge, 1>(stage, sum_of_eight, sums);
    } else if (rows <= 16) {
      multiply_eights<kLarge, 2>(stage, sum_of_eight, sums);
    } else {
      multiply_eights<kLarge, 4>(stage, sum_of_eight, sums);
    }
  }
  // With kEights eights of rows, side by side: each block is decoded once for all. kLarge: where a scale of the warp's is
  // 2 or more, as models have none; so it is compiled to few instructions.
  template <bool kLarge, uint32_t kEights, class SumOf>
  __device__ __forceinline__ void multiply_eights(uint32_t stage, SumOf&& sum_of, TensorSums<D>& sums) const {
    static_assert(kBlocks == 2 && TensorSums<D>::kSums == 4);
    constexpr uint32_t kUnroll = kLarge ? 1 : kPairs;
    const uint32_t matrix = P::lane() / 8, row = first + matrix % kBlocks * kProductRows + P::lane() % 8;
    const uint32_t codes_at = chunk_address(from, row, matrix / kBlocks), token = P::lane() / 4;
    uint32_t rows_at[2];  // the lane's chunk of the first eight, beside each block of a pair
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      rows_at[j] = stage + token * kFewRowPitch + ((4 * j + P::lane() % 4) ^ row_swizzle(token)) * 16;
    }
#pragma unroll kUnroll
    for (uint32_t p = 0; p < kPairs; ++p) {
      uint32_t codes[4];
      load_matrices(codes, codes_at ^ 2 * p * 16);  // two chunks on: of a row's address they are bits of their own
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        uint32_t w[kBlocks][4];
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
          const uint32_t four = p < 2 ? scales[i][0] : scales[i][1];
          decode_mxfp4<D, kLarge>(codes[kBlocks * j + i], four >> (p % 2 * 16 + j * 8) & 0xffu, w[i]);
        }
        if constexpr (kLarge) P::sync();  // lanes have taken different times
#pragma unroll
        for (uint32_t n = 0; n < kEights; ++n) {
          const uint4 b = load_shared16(rows_at[j] + 8 * n * kFewRowPitch + 8 * p * 16);
          sums.add(sum_of(2 * j, n), w[0][0], w[1][0], w[0][1], w[1][1], b.x, b.y);
          sums.add(sum_of(2 * j + 1, n), w[0][2], w[1][2], w[0][3], w[1][3], b.z, b.w);
        }
      }
    }
  }
};

}  // namespace flashmoe::sm90::few

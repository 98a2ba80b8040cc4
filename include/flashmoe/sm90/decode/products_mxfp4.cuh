// The products of decode/products.cuh, for experts in mxfp4. Weights are decoded to the type of rows on the way from
// shared memory to the tensor cores. The same warps run it on the same memory. They also read the scales behind the
// stage's weights, and a table of pairs in shared memory, which they fill together before their first task.
//
// A stage has 256 of K, which are eight blocks of 32. For a block of a row, ldmatrix gives each of four lanes four
// bytes, which are eight neighbouring numbers. These are all numbers that the lane needs in two steps of mma. This
// works because the order of K within the two steps is free, as long as rows have the same order. So a lane takes eight
// neighbours of a row of tokens, too: the 16 bytes of a chunk.
#pragma once

#include <cstddef>

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/decode/products.cuh"

namespace flashmoe::sm90::few {

// The pair of numbers that each byte of two codes stands for, before it is multiplied by the scale (E2M1Bits::pair).
// Each lane has a copy of the table, in a bank of its own. To look a pair up takes two instructions, to decode it four,
// on the units that limit how fast this code is.
class PairTable {
 public:
  __device__ __forceinline__ explicit PairTable(const Block& b)
      : lane_(P::lane() * uint32_t{sizeof(uint32_t)}), usable_(shared_address(b.s.pairs) == kAt) {}

  // Consumers, before their first task.
  template <class D>
  static __device__ __forceinline__ void fill(const Block& b) {
    constexpr uint32_t kPieces = P::kLanes / 4;  // of 16 bytes
    for (uint32_t i = threadIdx.x; i < kPairBytes * kPieces; i += kFewConsumers * P::kLanes) {
      const uint32_t pair = E2M1In<D>::pair(i / kPieces);
      reinterpret_cast<uint4*>(b.s.pairs[i / kPieces])[i % kPieces] = {pair, pair, pair, pair};
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kFewConsumers * P::kLanes) : "memory");
  }
  // Whether the table lies at kAt, where look_up() reads it.
  __device__ __forceinline__ bool usable() const { return usable_; }
  // The pairs of all four bytes of a word. In the table, a pair's address has the byte of codes in its second byte, and
  // the lane in its lowest. One instruction makes this address, and the load adds kAt to it.
  __device__ __forceinline__ void look_up(uint32_t codes, uint32_t (&pairs)[4]) const {
    static_assert(sizeof(FewShared::pairs[0]) == 256);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t at = __byte_perm(codes, lane_, 0x5504 | i << 4);
      asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(pairs[i]) : "r"(at), "n"(kAt));
    }
  }

 private:
  // The shared memory that a launch asks for begins after the 1024 bytes that every block has.
  static constexpr uint32_t kAt = 1024 + offsetof(FewShared, pairs);

  uint32_t lane_;
  bool usable_;
};

template <class D>
struct StageWeights<MxFp4<D>> {
  static constexpr uint32_t kPairs = kRowBytes / 32;  // of blocks along K
  // [pair of blocks along K] the codes of the first block, for both blocks of eight rows; then those of the second.
  uint32_t codes[kPairs][2 * kBlocks];
  // [block of eight rows] the scales of the lane's row, of a byte each: of the first four blocks along K, and of the
  // others.
  uint32_t scales[kBlocks][2];

  __device__ __forceinline__ void load(uint32_t stage, uint32_t feature) {
    const uint32_t matrix = P::lane() / 8, in_block = P::lane() % 8;
    const uint32_t from = chunk_address(stage, feature + matrix % kBlocks * kProductRows + in_block, matrix / kBlocks);
    uint4 words[kBlocks];
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint32_t row = feature + i * kProductRows + P::lane() / 4;
      words[i] = load_shared16(stage + kFewWeightScalesAt + row * sizeof(StageScaleRow));
    }
#pragma unroll
    for (uint32_t p = 0; p < kPairs; ++p) {
      load_matrices(codes[p], from ^ 2 * p * 16);  // chunks 2 p and 2 p + 1: a chunk's number is bits 4 to 6
    }
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      scales[i][0] = __funnelshift_r(words[i].x, words[i].y, words[i].w);
      scales[i][1] = __funnelshift_r(words[i].y, words[i].z, words[i].w);
    }
  }
  // Adds the products with the stage's rows.
  template <class Arranged>
  __device__ __forceinline__ void multiply(uint32_t stage, const PairTable& pairs, Arranged arrangement,
                                           TensorSums<D>& sums) const {
    static_assert(E2M1In<D>::kMostScale == 0x7f);
    const uint32_t all = scales[0][0] | scales[0][1] | scales[1][0] | scales[1][1];
    const RowsAt rows{stage};
    if (P::ballot((all & 0x80808080u) != 0) == 0 && pairs.usable()) {
#pragma unroll
      for (uint32_t p = 0; p < kPairs; ++p) {
        multiply_pair<false>(codes[p], {scales[0][p / 2], scales[1][p / 2]}, p % 2 * 2, rows, p, pairs, arrangement,
                             sums);
      }
      return;
    }
    // One of the warp's scales is 2 or more, or NaN, as in no model; or the table is not where look_up() reads it. Such
    // stages are decoded by code that has few instructions rather than being fast.
    StageWeights left = *this;
#pragma unroll 1
    for (uint32_t p = 0; p < kPairs; ++p, left.drop_pair()) {
      multiply_pair<true>(left.codes[0], {left.scales[0][0], left.scales[1][0]}, 0, rows, p, pairs, arrangement, sums);
    }
  }

 private:
  // Where the lane's chunks of the first eight rows of tokens lie that are multiplied by each block of the first pair.
  struct RowsAt {
    uint32_t of_block[2];

    __device__ __forceinline__ explicit RowsAt(uint32_t stage) {
      const uint32_t row = P::lane() / 4;
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        of_block[j] = stage + row * kFewRowPitch + ((4 * j + P::lane() % 4) ^ row_swizzle(row)) * 16;
      }
    }
  };

  // Multiplies pair p of blocks along K. Each block is decoded once for all rows. The scales of its two blocks are
  // bytes `byte` and `byte` + 1 of each word of `four`.
  template <bool kLarge, class Arranged>
  static __device__ __forceinline__ void multiply_pair(const uint32_t (&codes)[2 * kBlocks],
                                                       const uint32_t (&four)[kBlocks], uint32_t byte,
                                                       const RowsAt& rows, uint32_t p, const PairTable& pairs, Arranged,
                                                       TensorSums<D>& sums) {
    static_assert(kBlocks == 2 && TensorSums<D>::kSums == 4);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      uint32_t w[kBlocks][4];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        const uint32_t scale = __byte_perm(four[i], 0, 0x4440 | (byte + j));
        if constexpr (kLarge) {
          E2M1In<D>::decode(codes[kBlocks * j + i], scale, w[i], E2M1In<D>::multiply);
        } else {
          pairs.look_up(codes[kBlocks * j + i], w[i]);
          E2M1In<D>::template rescale<false>(scale, w[i], E2M1In<D>::multiply);
        }
      }
      if constexpr (kLarge) P::sync();  // lanes have taken different times
#pragma unroll
      for (uint32_t n = 0; n < Arranged::kEights; ++n) {
        const uint4 b = load_shared16(rows.of_block[j] + 8 * n * kFewRowPitch + 8 * p * 16);
        sums.add(Arranged::sum_of(2 * j, n), w[0][0], w[1][0], w[0][1], w[1][1], b.x, b.y);
        sums.add(Arranged::sum_of(2 * j + 1, n), w[0][2], w[1][2], w[0][3], w[1][3], b.z, b.w);
      }
    }
  }
  // Moves codes and scales on by a pair, so that the second pair becomes the first.
  __device__ __forceinline__ void drop_pair() {
#pragma unroll
    for (uint32_t p = 0; p + 1 < kPairs; ++p) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * kBlocks; ++i) codes[p][i] = codes[p + 1][i];
    }
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      scales[i][0] = __funnelshift_r(scales[i][0], scales[i][1], 16);
      scales[i][1] >>= 16;
    }
  }
};

}  // namespace flashmoe::sm90::few

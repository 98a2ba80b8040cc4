// One warp multiplies a few rows of weights by some tokens' rows, and sums the products. This is for calls that take as
// long as reading the weights. Weights come in blocks of eight rows. At the end, a lane has the sums of two
// neighbouring rows of each block (first_row() and the next one), for one token of each eight.
#pragma once

#include <type_traits>

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"

namespace flashmoe::gpu {

inline constexpr uint32_t kProductRows = 8;  // of a block of weights

namespace detail {

// c += a b for 16 tokens by 8 rows of weights, k 16.
template <class Dtype>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
#define FLASHMOE_MMA(type)                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "         \
      "{%0,%1,%2,%3};"                                       \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])       \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<Dtype, Bf16>) {
    FLASHMOE_MMA("bf16");
  } else {
    FLASHMOE_MMA("f16");
  }
#undef FLASHMOE_MMA
}

}  // namespace detail

// The sums of one block of weights with at most 16 tokens, by the tensor cores, in fp32. A step is 16 elements of K, in
// the order in which memory has them. The general kernel has the same steps, so a sum of the same steps has the same
// bits in both kernels.
template <class Dtype>
class BlockSums {
 public:
  // Adds a step's products: fragments of mma's m16n8k16, tokens by weights.
  __device__ __forceinline__ void add(const uint32_t (&tokens)[4], uint32_t b0, uint32_t b1) {
    detail::mma<Dtype>(sum_, tokens[0], tokens[1], tokens[2], tokens[3], b0, b1);
  }
  __device__ __forceinline__ void add(const BlockSums& other) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sum_[i] += other.sum_[i];
  }
  // Calls store(token, sums) for each token whose sums the lane has.
  template <class Store>
  __device__ __forceinline__ void finish(uint32_t tokens, Store&& store) const {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const float sums[1][2] = {{sum_[2 * h], sum_[2 * h + 1]}};
      const uint32_t token = 8 * h + Platform::lane() / 4;
      if (token < tokens) store(token, sums);
    }
  }
  static __device__ __forceinline__ uint32_t first_row() { return Platform::lane() % 4 * 2; }

 private:
  float sum_[4] = {};
};

// The sums of two blocks of weights with at most kTokens tokens, likewise. Here mma multiplies weights by eight tokens
// at a time, because there are seldom more than eight.
template <class Dtype, uint32_t kTokens = 32>
class TensorSums {
 public:
  static constexpr uint32_t kMostTokens = kTokens, kSums = kMostTokens / 8;

  // Adds a step's products to sum n: fragments of mma's m16n8k16, both blocks by eight tokens.
  __device__ __forceinline__ void add(uint32_t n, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
    detail::mma<Dtype>(sum_[n], a0, a1, a2, a3, b0, b1);
  }
  // Adds mma's products of both blocks by eight tokens to sum n, times scales. first and second: the scales of the
  // lane's row in the first and in the second block, each for both of the lane's two tokens.
  __device__ __forceinline__ void add_scaled(uint32_t n, const float (&products)[4], float2 first, float2 second) {
    sum_[n][0] = fmaf(products[0], first.x, sum_[n][0]);
    sum_[n][1] = fmaf(products[1], first.y, sum_[n][1]);
    sum_[n][2] = fmaf(products[2], second.x, sum_[n][2]);
    sum_[n][3] = fmaf(products[3], second.y, sum_[n][3]);
  }
  // If all kSums sums are parts of the sums of the same eight tokens: adds them up in the first one.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sum_[0][i] = (sum_[0][i] + sum_[1][i]) + (sum_[2][i] + sum_[3][i]);
  }
  // Sets all sums. acc: the lane's accumulators of a wgmma, whose 64 rows of A are those of four warps, and whose rows of
  // B are the tokens.
  __device__ __forceinline__ void set(const float (&acc)[4 * kSums]) {
#pragma unroll
    for (uint32_t i = 0; i < 4 * kSums; ++i) sum_[i / 4][i % 4] = acc[i];
  }
  // Calls store(token, sums) for each token whose sums the lane then has. Afterwards there are no sums any more.
  template <class Store>
  __device__ __forceinline__ void finish(uint32_t tokens, Store&& store) {
    const bool odd = Platform::lane() / 4 % 2 != 0;
    // A loop, where many sums would make much code. Each turn takes sum 0, and moves the others.
#pragma unroll(kSums > 4 ? 1 : kSums)
    for (uint32_t h = 0; h < kSums; ++h) {
      if (8 * h >= tokens) break;
      // The lane has two tokens of row lane / 4 of each block. It exchanges with the lane that has the same tokens of
      // the neighbouring row. Then each of the two has both rows of one token.
      float sums[2][2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const float even_token = sum_[0][2 * i], odd_token = sum_[0][2 * i + 1];
        const float theirs = __shfl_xor_sync(kFullWarp, odd ? even_token : odd_token, 4);
        sums[i][0] = odd ? theirs : even_token;
        sums[i][1] = odd ? odd_token : theirs;
      }
      const uint32_t token = 8 * h + Platform::lane() % 4 * 2 + (odd ? 1 : 0);
      if (token < tokens) store(token, sums);
#pragma unroll
      for (uint32_t i = 0; i + 1 < kSums; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) sum_[i][j] = sum_[i + 1][j];
      }
    }
  }
  static __device__ __forceinline__ uint32_t first_row() { return Platform::lane() / 8 * 2; }

 private:
  float sum_[kSums][4] = {};
};

// The sums by the CUDA cores, in fp32. Weights arrive at 19 bytes a clock and SM, so a lane has time for 26
// instructions for each element of fp32, and a few tokens take no longer than reading the weights. A lane has row g =
// lane / 4 of each block, and of each 64 bytes of its rows the q-th 16 bytes, q = lane % 4.
template <class Dtype, uint32_t kBlocks>
class ExactSums {
 public:
  static constexpr uint32_t kMostTokens = 8;

  // Adds the products with kChunks of the lane's 16-byte chunks of the weights. load(t, j) is chunk j of token t's row.
  template <uint32_t kChunks, class Load>
  __device__ __forceinline__ void add(const uint4 (&weights)[kBlocks][kChunks], uint32_t tokens, Load&& load) {
    constexpr uint32_t kElements = 16 / Dtype::kBytes;
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      float w[kBlocks][kElements];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) Dtype::spread(w[i], weights[i][j]);
#pragma unroll
      for (uint32_t n = 0; n < kMostTokens; ++n) {
        if (n >= tokens) break;
        float v[kElements];
        Dtype::spread(v, load(n, j));
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (uint32_t k = 0; k < kElements; ++k) sum_[i][n] = fmaf(w[i][k], v[k], sum_[i][n]);
        }
      }
    }
  }

  template <class Store>
  __device__ __forceinline__ void finish(uint32_t tokens, Store&& store) const {
    const uint32_t g = Platform::lane() / 4, q = Platform::lane() % 4;
    float sums[kBlocks][2];  // of token g
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t n = 0; n < kMostTokens; ++n) {
        float sum = sum_[i][n];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        const float even = __shfl_sync(kFullWarp, sum, static_cast<int>(8 * q));
        const float odd = __shfl_sync(kFullWarp, sum, static_cast<int>(8 * q + 4));
        if (n == g) sums[i][0] = even, sums[i][1] = odd;
      }
    }
    if (g < tokens) store(g, sums);
  }
  static __device__ __forceinline__ uint32_t first_row() { return Platform::lane() % 4 * 2; }

 private:
  float sum_[kBlocks][kMostTokens] = {};
};

}  // namespace flashmoe::gpu

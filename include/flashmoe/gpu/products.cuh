// Some blocks of eight rows of weights times some tokens' rows, by one warp: for calls whose time is that of reading the
// weights.
//
// A lane (g, q) = (lane / 4, lane % 4) has row g of each block and, of each eight tokens, the g-th. Of either it has 16 bytes
// of every 64, a chunk. What the tensor cores take as a fragment's k-indices are eight elements of a row in memory here: any
// order does, as long as both operands have the same, and with this one every load is of 16 bytes and nothing is rearranged.
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

// Of 16-bit types, in fp32, by the tensor cores. A token's bits do not depend on the others.
template <class Dtype, uint32_t kBlocks>
class TensorProducts {
 public:
  static constexpr uint32_t kMostTokens = 32;

  // Adds the products with kChunks chunks of the weights; load(t, j) is chunk j of token t.
  template <uint32_t kChunks, class Load>
  __device__ __forceinline__ void add(const uint4 (&weights)[kBlocks][kChunks], uint32_t tokens, Load&& load) {
#pragma unroll
    for (uint32_t m = 0; m < kMostTokens / 16; ++m) {
      if (16 * m >= tokens) break;
      const uint32_t token = 16 * m + Platform::lane() / 4;
      uint4 low[kChunks], high[kChunks];
#pragma unroll
      for (uint32_t j = 0; j < kChunks; ++j) low[j] = load(token, j);
#pragma unroll
      for (uint32_t j = 0; j < kChunks; ++j) high[j] = 16 * m + 8 < tokens ? load(token + 8, j) : uint4{};
#pragma unroll
      for (uint32_t j = 0; j < kChunks; ++j) {
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
          const uint4 &a = low[j], &b = high[j], &w = weights[i][j];
          detail::mma<Dtype>(sum_[m][i][0], a.x, b.x, a.y, b.y, w.x, w.y);
          detail::mma<Dtype>(sum_[m][i][1], a.z, b.z, a.w, b.w, w.z, w.w);
        }
      }
    }
  }

  // Calls store(token, sums) for what the lane has: of each block, a token's sums with rows 2 q and 2 q + 1.
  template <class Store>
  __device__ __forceinline__ void finish(uint32_t tokens, Store&& store) const {
#pragma unroll
    for (uint32_t h = 0; h < kMostTokens / 8; ++h) {
      if (8 * h >= tokens) break;
      const uint32_t token = 8 * h + Platform::lane() / 4;
      float sums[kBlocks][2];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        const auto& sum = sum_[h / 2][i];
        sums[i][0] = sum[0][h % 2 * 2] + sum[1][h % 2 * 2];
        sums[i][1] = sum[0][h % 2 * 2 + 1] + sum[1][h % 2 * 2 + 1];
      }
      if (token < tokens) store(token, sums);
    }
  }

 private:
  // Of each chunk's first half and of its second: half as long a chain of products that wait for one another.
  float sum_[kMostTokens / 16][kBlocks][2][4] = {};
};

// The same of fp32, multiplied as fp32 on the CUDA cores: at 19 bytes of weights a clock and SM, a lane has 26
// instructions for each element, so that a few tokens take no longer than reading the weights.
template <class Dtype, uint32_t kBlocks>
class ExactProducts {
 public:
  static constexpr uint32_t kMostTokens = 8;

  template <uint32_t kChunks, class Load>
  __device__ __forceinline__ void add(const uint4 (&weights)[kBlocks][kChunks], uint32_t tokens, Load&& load) {
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      float w[kBlocks][4];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) Dtype::spread(w[i], weights[i][j]);
#pragma unroll
      for (uint32_t n = 0; n < kMostTokens; ++n) {
        if (n >= tokens) break;
        float v[4];
        Dtype::spread(v, load(n, j));
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (uint32_t k = 0; k < 4; ++k) sum_[i][n] = fmaf(w[i][k], v[k], sum_[i][n]);
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

 private:
  float sum_[kBlocks][kMostTokens] = {};
};

template <class Dtype, uint32_t kBlocks>
using Products = std::conditional_t<Dtype::kBytes == 2, TensorProducts<Dtype, kBlocks>, ExactProducts<Dtype, kBlocks>>;

}  // namespace flashmoe::gpu

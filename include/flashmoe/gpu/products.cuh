// Sums of products of a few rows of weights with some tokens' rows, by one warp: for calls whose time is that of reading the
// weights. Weights come in blocks of eight rows; a lane (g, q) = (lane / 4, lane % 4) ends with the sums of rows 2 q and
// 2 q + 1 of each block with the g-th of each eight tokens.
#pragma once

#include <type_traits>

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"

namespace flashmoe::gpu {

inline constexpr uint32_t kProductRows = 8;  // of a block of weights

// Four 8x8 matrices of 16-bit elements, as fragments: the l-th address is that of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

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

// By the tensor cores, in fp32. A step is 16 elements of K, in the order in which memory has them: as in the general
// kernel, so that a row has the same bits there and here.
template <class Dtype, uint32_t kBlocks>
class TensorSums {
 public:
  static constexpr uint32_t kMostTokens = 32;

  // Adds a step's products of 16 tokens, from the m-th 16 on, with block i: fragments of mma's m16n8k16.
  __device__ __forceinline__ void add(uint32_t m, uint32_t i, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    detail::mma<Dtype>(sum_[m][i], a[0], a[1], a[2], a[3], b0, b1);
  }

  // Calls store(token, sums) for what the lane has.
  template <class Store>
  __device__ __forceinline__ void finish(uint32_t tokens, Store&& store) const {
#pragma unroll
    for (uint32_t h = 0; h < kMostTokens / 8; ++h) {
      if (8 * h >= tokens) break;
      const uint32_t token = 8 * h + Platform::lane() / 4;
      float sums[kBlocks][2];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        sums[i][0] = sum_[h / 2][i][h % 2 * 2];
        sums[i][1] = sum_[h / 2][i][h % 2 * 2 + 1];
      }
      if (token < tokens) store(token, sums);
    }
  }

 private:
  float sum_[kMostTokens / 16][kBlocks][4] = {};
};

// By the CUDA cores, as fp32: at 19 bytes of weights a clock and SM, a lane has 26 instructions for each element of fp32, so
// that a few tokens take no longer than reading the weights. A lane has row g of each block, and of all rows 16 bytes of
// every 64, the q-th.
template <class Dtype, uint32_t kBlocks>
class ExactSums {
 public:
  static constexpr uint32_t kMostTokens = 8;

  // Adds the products with kChunks of the lane's chunks of the weights; load(t, j) is the same chunk of token t.
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

 private:
  float sum_[kBlocks][kMostTokens] = {};
};

}  // namespace flashmoe::gpu

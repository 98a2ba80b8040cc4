// A consumer warp's products of one stage in the kernel for a few tokens (sm90/decode/alone.cuh).
//
// Each of warps 0 to 7 runs it for itself. It reads the stage in shared memory, keeps sums in registers, and touches no
// device memory.
#pragma once

#include "flashmoe/sm90/decode/block.cuh"

namespace flashmoe::sm90::few {

// Where 16-byte chunk `chunk` of a row of a stage lies. Chunks are swizzled so that lanes that read at the same time
// use different banks.
__device__ __forceinline__ uint32_t chunk_address(uint32_t stage, uint32_t row, uint32_t chunk) {
  return stage + row * kRowBytes + (chunk ^ row % 8) * 16;
}

// How a unit's rows are multiplied: kEights groups of eight rows side by side, with one sum for each group. Or, if
// kApart, one group of at most eight rows, with a sum for each step, because with one sum each step would wait for the
// step before.
template <uint32_t kRowEights, bool kIsApart>
struct Arrangement {
  static constexpr uint32_t kEights = kRowEights;
  static constexpr bool kApart = kIsApart;
  static_assert(!kApart || kEights == 1);

  static __device__ __forceinline__ constexpr uint32_t sum_of(uint32_t step, uint32_t eight) {
    return kApart ? step : eight;
  }
};
// Calls run(arrangement) with the arrangement for so many rows.
template <class Dtype, class Run>
__device__ __forceinline__ void with_arrangement(uint32_t rows, bool apart, Run&& run) {
  if (apart) {
    run(Arrangement<1, true>{});
  } else if (rows <= 8) {
    run(Arrangement<1, false>{});
  } else if (kUnitRows<Dtype> <= 16 || rows <= 16) {
    run(Arrangement<2, false>{});
  } else {
    run(Arrangement<kUnitRows<Dtype> / 8, false>{});
  }
}

// The most rows of a unit that warps multiply by mma, each warp by its own weights in registers. More rows are multiplied
// by wgmma: by mma, each warp would read all rows from shared memory, and 512 tokens of Qwen3-30B-A3B would take 372 us
// instead of 333.
template <class Dtype>
inline constexpr uint32_t kMmaRows = kAloneIn16Bits ? 16 : kUnitRows<Dtype>;

// The weights that a warp has of a stage, in registers. feature: the first of the warp's rows of weights.
template <class Dtype>
struct StageWeights {
  static constexpr uint32_t kSteps = kRowBytes / 32;  // of 16 elements
  uint32_t fragments[kBlocks][kSteps / 2][4];

  __device__ __forceinline__ void load(uint32_t stage, uint32_t feature) {
    const uint32_t matrix = P::lane() / 8, row = P::lane() % 8;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t h = 0; h < kSteps / 2; ++h) {
        load_matrices(fragments[i][h], chunk_address(stage, feature + i * kProductRows + row, 4 * h + matrix));
      }
    }
  }
  // Adds the products with the stage's rows, step after step along K as the general kernel does.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t rows, Sums<Dtype>& sums) const {
#pragma unroll
    for (uint32_t n = 0; n < kMmaRows<Dtype> / 8; n += 2) {
      if (8 * n >= rows) break;
      if (8 * n + 8 < rows) {
        multiply_eights<2>(stage, n, sums);
      } else {
        multiply_eights<1>(stage, n, sums);
      }
    }
  }

 private:
  // Multiplies by kEights groups of eight rows side by side.
  template <uint32_t kEights>
  __device__ __forceinline__ void multiply_eights(uint32_t stage, uint32_t first, Sums<Dtype>& sums) const {
    static_assert(kBlocks == 2);
    const uint32_t matrix = P::lane() / 8, row = P::lane() % 8;
#pragma unroll
    for (uint32_t h = 0; h < kSteps / 2; ++h) {
      const uint32_t (&low)[4] = fragments[0][h], (&high)[4] = fragments[1][h];
      uint32_t rows[kEights][4];  // of two steps
#pragma unroll
      for (uint32_t n = 0; n < kEights; ++n) {
        load_matrices(rows[n], chunk_address(stage, 8 * (first + n) + row, 4 * h + matrix));
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; i += 2) {
#pragma unroll
        for (uint32_t n = 0; n < kEights; ++n) {
          sums.add(first + n, low[i], high[i], low[i + 1], high[i + 1], rows[n][i], rows[n][i + 1]);
        }
      }
    }
  }
};

template <class Dtype>
  requires(Dtype::kBytes == 4)  // multiplied as fp32
struct StageWeights<Dtype> {
  static constexpr uint32_t kChunks = kRowBytes / 64;  // 16-byte chunks of a lane
  uint4 chunks[kBlocks][kChunks];

  static __device__ __forceinline__ uint4 load_chunk(uint32_t stage, uint32_t row, uint32_t j) {
    return load_shared16(chunk_address(stage, row, P::lane() % 4 * kChunks + j));
  }
  __device__ __forceinline__ void load(uint32_t stage, uint32_t feature) {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kChunks; ++j) {
        chunks[i][j] = load_chunk(stage, feature + i * kProductRows + P::lane() / 4, j);
      }
    }
  }
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t rows, ExactSums<Dtype, kBlocks>& sums) const {
    sums.add(chunks, rows, [&](uint32_t t, uint32_t j) { return load_chunk(stage, t, j); });
  }
};

}  // namespace flashmoe::sm90::few

// Consumer warpgroups store a task's accumulators to memory. This file is for accumulators that are FeaturesByTokens;
// epilogue/rows.cuh is for TokensByFeatures.
//
// The accumulators have features down and tokens across, but rows are stored token by token. So a warpgroup transposes
// them through a staging buffer, a few tokens at a time, into 16-byte stores of whole lines.
#pragma once

#include "flashmoe/gpu/activate.cuh"
#include "flashmoe/gpu/route.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/machine/lane.cuh"
#include "flashmoe/sm90/machine/mainloop.cuh"
#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/wgmma.cuh"

namespace flashmoe::sm90 {

// Staging: two halves, so that one chunk of tokens is written while the one before is still being read.
inline constexpr uint32_t kStagingHalf = 4 * 1024;
inline constexpr uint32_t kStagingBytes = 2 * kStagingHalf;  // per consumer warpgroup, 128-byte aligned

// Biases of the two features that a thread has in acc[m]: `low` is of d[4j] and d[4j+1], `high` of d[4j+2] and d[4j+3].
// To be loaded before the mainloop, which hides how long that takes.
struct FeatureBias {
  float low, high;
};

namespace detail {

__device__ __forceinline__ void store_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
// In PTX, since some addresses were integers, and the compiler cannot tell that they point to global memory.
__device__ __forceinline__ void store_global16(uint8_t* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Stores four 8x8 matrices transposed. Each thread has one register of each matrix, as in an accumulator fragment; lane
// l gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// Where 16-byte chunk `chunk` of row `token` (of 8) is staged; rows have 64 to 512 bytes. Chunks are permuted so that
// different banks have what is accessed together: one chunk of 8 tokens as it is written, and 8 consecutive chunks as
// they are read.
template <uint32_t kStagedRow>
__device__ __forceinline__ uint32_t staged(uint32_t token, uint32_t chunk) {
  return token * kStagedRow + (chunk ^ (kStagedRow == 64 ? token / 2 : token)) * 16;
}

// What a warpgroup stages of a token. A thread's four accumulators d[4j] .. d[4j+3] make four results, or with a gate
// two: the activated gates, of d[4j] and d[4j+1], times their ups, d[4j+2] and d[4j+3].
template <class Dtype, class Stage, bool kGated>
struct StagedRow {
  static constexpr uint32_t kHalves = kGated ? 1 : 2;  // groups of 8 columns of results that a warp has of each m
  static constexpr uint32_t kColumns = Stage::kMs * kHalves * 32;
  static constexpr uint32_t kBytes = kColumns * Dtype::kBytes;
  static constexpr uint32_t kTokens = kStagingHalf / kBytes;  // that a half has room for
};

// Writes tokens [8 * first_j, 8 * first_j + Row::kTokens) of the accumulators to one half of the staging buffer, as
// rows of Row::kColumns elements. finish(m, j, v) turns a thread's accumulators v = d[4j] .. d[4j+3] into Row::kHalves
// * 2 results, in place.
template <class Dtype, class Row, uint32_t kMs, uint32_t N, class Finish>
__device__ __forceinline__ void stage_tokens(uint32_t half, const Lane& at, const float (&acc)[kMs][N / 2],
                                             uint32_t first_j, Finish finish) {
  constexpr uint32_t kHalves = Row::kHalves;
  auto values = [&](uint32_t m, uint32_t j, float (&v)[4]) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) v[i] = acc[m][4 * j + i];
    pin_accumulators(v);  // else many tokens are computed side by side, and their temporaries spill
    finish(m, j, v);
  };
#pragma unroll
  for (uint32_t m = 0; m < kMs; ++m) {
    if constexpr (Dtype::kBytes == 2) {
      constexpr uint32_t kGroups = 4 / kHalves;  // groups of 8 tokens in one stmatrix
      const uint32_t matrix = at.lane / 8;
      const uint32_t to = half + matrix / kHalves * 8 * Row::kBytes +
                          staged<Row::kBytes>(at.lane % 8, (m * 4 + at.warp) * kHalves + matrix % kHalves);
#pragma unroll
      for (uint32_t g = 0; g < Row::kTokens / 8; g += kGroups) {
        if ((first_j + g) * 8 >= N) break;
        uint32_t packed[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < kGroups; ++i) {
          const uint32_t j = first_j + g + i;
          if (j * 8 >= N) break;
          float v[4];
          values(m, j, v);
#pragma unroll
          for (uint32_t h = 0; h < kHalves; ++h) packed[i * kHalves + h] = Dtype::pack(v[2 * h], v[2 * h + 1]);
        }
        store_matrices_transposed(to + g * 8 * Row::kBytes, packed);
      }
    } else {
#pragma unroll
      for (uint32_t g = 0; g < Row::kTokens / 8; ++g) {
        const uint32_t j = first_j + g;
        if (j * 8 >= N) break;
        float v[4];
        values(m, j, v);
#pragma unroll
        for (uint32_t i = 0; i < kHalves * 2; ++i) {
          const uint32_t column = ((m * 4 + at.warp) * kHalves + i / 2) * 8 + at.row();
          store_shared(
              half + g * 8 * Row::kBytes + staged<Row::kBytes>(at.token() + i % 2, column / 4) + column % 4 * 4, v[i]);
        }
      }
    }
  }
}

// Stores Row::kColumns results per token, or the first `columns` if no more exist, to row_of(token) and behind it.
// Tokens beyond `rows` are not stored.
template <class Dtype, class Row, uint32_t kMs, uint32_t N, class Finish, class RowOf>
__device__ __forceinline__ void store_tokens(uint32_t staging, const Lane& at, const float (&acc)[kMs][N / 2],
                                             uint32_t rows, uint32_t columns, Finish finish, RowOf row_of) {
  constexpr uint32_t kTokens = Row::kTokens;
  constexpr uint32_t kRowChunks = Row::kBytes / 16;
  constexpr uint32_t kRowsAtOnce = kWarpgroup / kRowChunks;
  const uint32_t thread = at.warp * 32 + at.lane;
  const uint32_t chunk = thread % kRowChunks, row = thread / kRowChunks;
  const bool exists = chunk * 16 < columns * Dtype::kBytes;
  constexpr uint32_t kChunks = ceil_div(N, kTokens), kPieces = kTokens / kRowsAtOnce;
  stage_tokens<Dtype, Row, kMs, N>(staging, at, acc, 0, finish);
  named_barrier_sync(group_barrier(at.group));
  // While a chunk of tokens is on its way out of shared memory, the next one is computed, because most of the time for
  // a chunk is latency.
#pragma unroll
  for (uint32_t c = 0; c < kChunks; ++c) {
    if (c * kTokens >= rows) break;
    uint4 piece[kPieces];
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t token = i * kRowsAtOnce + row;
      piece[i] = load_shared16(staging + c % 2 * kStagingHalf + token / 8 * 8 * Row::kBytes +
                               staged<Row::kBytes>(token % 8, chunk));
    }
    if (c + 1 < kChunks) {
      stage_tokens<Dtype, Row, kMs, N>(staging + (c + 1) % 2 * kStagingHalf, at, acc, (c + 1) * kTokens / 8, finish);
    }
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t token = c * kTokens + i * kRowsAtOnce + row;
      if (exists && token < rows) store_global16(row_of(token) + chunk * 16, piece[i]);
    }
    named_barrier_sync(group_barrier(at.group));
  }
}

}  // namespace detail

// Loads biases where each feature is a column of results (router, GEMM1, activation without a gate). first_feature: the
// warpgroup's first, of `features` in all. `bias` is the expert's row; null: none.
template <class Dtype, uint32_t kMs>
__device__ __forceinline__ void load_bias(FeatureBias (&to)[kMs], const void* bias, const Lane& at,
                                          uint32_t first_feature, uint32_t features) {
#pragma unroll
  for (uint32_t m = 0; m < kMs; ++m) {
    const uint32_t f = first_feature + m * 64 + at.warp * 16 + at.row();
    to[m] = {bias_at<Dtype>(bias, f, f < features), bias_at<Dtype>(bias, f + 8, f + 8 < features)};
  }
}

// Loads the biases of a task that activates. Its first column of results is `first_column`, of I. With a gate, `bias`
// has 2I numbers, in the order that `gated` describes.
template <class Dtype, class Stage, Activation A>
__device__ __forceinline__ void load_activation_bias(FeatureBias (&to)[Stage::kMs], const void* bias, const Lane& at,
                                                     uint32_t first_column, uint32_t intermediate, GatedRows gated) {
  if constexpr (is_gated(A)) {
#pragma unroll
    for (uint32_t m = 0; m < Stage::kMs; ++m) {
      const uint32_t i = first_column + (at.group * Stage::kGroupFeatures + m * 64) / 2 + at.warp * 8 + at.row();
      const uint32_t gate = i * gated.step;
      to[m] = {bias_at<Dtype>(bias, gate, i < intermediate), bias_at<Dtype>(bias, gate + gated.up, i < intermediate)};
    }
  } else {
    load_bias<Dtype>(to, bias, at, first_column + at.group * Stage::kGroupFeatures, intermediate);
  }
}

// Multiplies each token's products by its weight. `weights` as in store_returned().
template <class Stage, uint32_t N>
__device__ __forceinline__ void scale_tokens(const Lane& at, Accumulators<FeaturesByTokens<Stage, N>>& acc,
                                             const float* weights) {
#pragma unroll
  for (uint32_t j = 0; j < N / 8; ++j) {
    const float2 w = *reinterpret_cast<const float2*>(weights + j * 8 + at.token());
#pragma unroll
    for (uint32_t m = 0; m < Stage::kMs; ++m) {
      acc[m][4 * j] *= w.x, acc[m][4 * j + 1] *= w.y, acc[m][4 * j + 2] *= w.x, acc[m][4 * j + 3] *= w.y;
    }
  }
}

// Epilogue::kActivate: stores activated rows, rounded once, to the tile's intermediate rows: row r at tile + r * pitch.
// `staging`: the warpgroup's own buffer.
template <class Dtype, class Stage, Activation A, uint32_t N>
__device__ __forceinline__ void store_activated(uint32_t staging, const Lane& at,
                                                const Accumulators<FeaturesByTokens<Stage, N>>& acc,
                                                const FeatureBias (&bias)[Stage::kMs], uint32_t rows,
                                                uint32_t first_column, uint32_t intermediate, uint8_t* tile,
                                                uint64_t pitch, const ClampedShape& shape) {
  using Row = detail::StagedRow<Dtype, Stage, is_gated(A)>;
  const uint32_t first = first_column + at.group * Row::kColumns;
  const uint32_t columns = first < intermediate ? intermediate - first : 0;
  uint8_t* const to = tile + uint64_t{first} * Dtype::kBytes;
  detail::store_tokens<Dtype, Row, Stage::kMs, N>(
      staging, at, acc, rows, columns,
      [&](uint32_t m, uint32_t, float (&v)[4]) {
        v[0] += bias[m].low, v[1] += bias[m].low, v[2] += bias[m].high, v[3] += bias[m].high;
        activate_pair<Dtype, A>(v[0], v[1], shape);
        if constexpr (is_gated(A)) {
          v[0] *= shaped_up<A>(v[2], shape), v[1] *= shaped_up<A>(v[3], shape);
        } else {
          activate_pair<Dtype, A>(v[2], v[3], shape);
        }
      },
      [&](uint32_t token) { return to + token * pitch; });
}

// Epilogue::kReturn: stores (acc + bias) * weight, rounded once, to each token's own row. `rows_to` has the rows'
// global addresses. `weights` and `rows_to` lie in shared memory. N weights are read, whatever `rows` is, by pairs:
// `weights` is aligned to 8 bytes.
template <class Dtype, class Stage, uint32_t N>
__device__ __forceinline__ void store_returned(uint32_t staging, const Lane& at,
                                               const Accumulators<FeaturesByTokens<Stage, N>>& acc,
                                               const FeatureBias (&bias)[Stage::kMs], uint32_t rows,
                                               uint32_t first_feature, uint32_t hidden, const float* weights,
                                               const uint64_t* rows_to) {
  using Row = detail::StagedRow<Dtype, Stage, false>;
  const uint32_t first = first_feature + at.group * Row::kColumns;
  const uint32_t columns = first < hidden ? hidden - first : 0;
  const uint64_t offset = uint64_t{first} * Dtype::kBytes;
  detail::store_tokens<Dtype, Row, Stage::kMs, N>(
      staging, at, acc, rows, columns,
      [&](uint32_t m, uint32_t j, float (&v)[4]) {
        const float2 w = *reinterpret_cast<const float2*>(weights + j * 8 + at.token());
        v[0] = (v[0] + bias[m].low) * w.x, v[1] = (v[1] + bias[m].low) * w.y;
        v[2] = (v[2] + bias[m].high) * w.x, v[3] = (v[3] + bias[m].high) * w.y;
      },
      [&](uint32_t token) { return reinterpret_cast<uint8_t*>(rows_to[token] + offset); });
}

// Gate: stores logits in fp32, rounded as the rule says, of experts before end_expert. A thread has two neighbouring tokens of each eight. The
// logits of the first token of eight number i go to place(i)[expert], and those of the second `experts` elements
// further on. The code has few instructions, since it runs once, and with few experts in one warp alone.
template <class Dtype, uint32_t N, class Place>
__device__ __forceinline__ void store_gate(const Lane& at, const float (&acc)[N / 2], const FeatureBias& bias,
                                           const gpu::RouterRule& rule, uint32_t rows, uint32_t first_expert,
                                           uint32_t end_expert, uint32_t experts, Place&& place) {
  const uint32_t expert = first_expert + at.warp * 16 + at.row();
  if (expert >= end_expert) return;
  const bool both = expert + 8 < end_expert;
#pragma unroll
  for (uint32_t j = 0; j < N / 8; ++j) {
    const uint32_t token = j * 8 + at.token();
    if (token >= rows) break;
    float *const even = place(j) + expert, *const odd = even + experts;
    const auto store = [&](float* to, float logit) { *to = gpu::rounded_logit<Dtype>(rule, logit); };
    store(even, acc[4 * j] + bias.low);
    if (both) store(even + 8, acc[4 * j + 2] + bias.high);
    if (token + 1 < rows) {
      store(odd, acc[4 * j + 1] + bias.low);
      if (both) store(odd + 8, acc[4 * j + 3] + bias.high);
    }
  }
}

}  // namespace flashmoe::sm90

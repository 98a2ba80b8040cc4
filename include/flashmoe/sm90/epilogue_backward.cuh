// Consumer warpgroups: Epilogue::kDifferentiate, where the accumulators are dA, tokens down.
//
// Of each row of the task, from its pre-activations z and its combine weight w, with a = act(z):
//   to the tile's rows of dZ   w dA act'(z), gate and up
//   to its weighted rows       w a
//   a part of dS               the sum of dA a over the task's columns, in an order that columns alone decide on
// Gates' and ups' gradients take the accumulators' places, packed, until they are stored: else there are too few registers.
#pragma once

#include "flashmoe/gpu/differentiate.cuh"
#include "flashmoe/sm90/epilogue_rows.cuh"

namespace flashmoe::sm90 {

// Where a task's rows and columns are. Row r is the r-th of the block's share, column 0 the block's first.
struct GradientRows {
  const uint8_t* z;  // column 0 of row 0 of all rows that are kept
  uint64_t z_row_bytes;
  const uint32_t* numbers;  // among these
  const float* weights;
  uint32_t rows, padded;    // of the share; zeros are stored from `rows` to `padded`
  uint32_t columns;         // 0 or more, of which the accumulators may have too many
  uint8_t* gradients;       // dZ, column 0 of its gates, row 0
  uint64_t gradient_bytes;  // from row to row
  uint8_t* weighted;
  uint64_t weighted_bytes;
  GatedRows gated;
  float* parts;  // of dS, by the row's number
  float* spare;  // where a part of the same rows is zero; null: another block writes it
};

namespace detail {

// Stores a piece's lines: those that exist of rows first, first + 4, ... of the share, from `to` on, the lane's chunk of row
// `first`.
template <class Dtype>
__device__ __forceinline__ void store_piece(uint32_t own, const Lane& at, const Piece<Dtype>& piece, uint8_t* to,
                                            uint64_t row_bytes, uint32_t first, uint32_t rows, bool exists) {
  constexpr uint32_t kRowsApart = kWarpRows / kPieceStores;
  const uint32_t chunk = at.lane % 8, row = at.lane / 8;
  stage_piece(own, at, piece);
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < kPieceStores; ++i) {
    const uint4 line = load_shared16(own + staged_in_piece(row + i * kRowsApart, chunk));
    if (exists && first + i * kRowsApart < rows) store_global16(to + i * kRowsApart * row_bytes, line);
  }
  __syncwarp();
}

// Gate and up of two neighbouring columns, or without a gate the two alone.
template <class Dtype, bool kGated>
__device__ __forceinline__ uint2 load_pre_activations(const uint8_t* from, bool exists) {
  uint2 z = {};
  if (!exists) return z;
  if constexpr (kGated) {
    z = __ldcs(reinterpret_cast<const uint2*>(from));
  } else {
    z.x = __ldcs(reinterpret_cast<const uint32_t*>(from));
  }
  return z;
}

// From dA of two neighbouring columns and z: what takes their places (`first`, `second`: words of gates and ups, or of one
// column each where these lie in turn), w a packed, and the columns' term of dS.
template <class Dtype, Activation A>
__device__ __forceinline__ uint32_t differentiate_pair(float& first, float& second, const uint2& z, float weight,
                                                       bool in_turn, float& sum, const ClampedShape& shape) {
  if constexpr (is_gated(A)) {
    const float2 low = Dtype::unpack(z.x), high = Dtype::unpack(z.y);
    const ValueAndSlope g0 = differentiate<A>(low.x, shape), g1 = differentiate<A>(high.x, shape);
    const ValueAndSlope u0 = differentiate_up<A>(low.y, shape), u1 = differentiate_up<A>(high.y, shape);
    const float a0 = g0.value * u0.value, a1 = g1.value * u1.value;
    sum = fmaf(second, a1, fmaf(first, a0, sum));
    const float d0 = weight * first, d1 = weight * second;
    const float gate0 = d0 * g0.slope * u0.value, gate1 = d1 * g1.slope * u1.value;
    const float up0 = d0 * g0.value * u0.slope, up1 = d1 * g1.value * u1.slope;
    first = __uint_as_float(Dtype::pack(gate0, in_turn ? up0 : gate1));
    second = __uint_as_float(Dtype::pack(in_turn ? gate1 : up0, up1));
    return Dtype::pack(weight * a0, weight * a1);
  } else {
    const float2 v = Dtype::unpack(z.x);
    const ValueAndSlope a = differentiate<A>(v.x, shape), b = differentiate<A>(v.y, shape);
    sum = fmaf(second, b.value, fmaf(first, a.value, sum));
    first = __uint_as_float(Dtype::pack(weight * first * a.slope, weight * second * b.slope));
    return Dtype::pack(weight * a.value, weight * b.value);
  }
}

// The words that are left in the accumulators of a piece, 64 columns, as a piece: the `which`-th word of each row.
template <class Dtype, uint32_t kCount>
__device__ __forceinline__ Piece<Dtype> packed_piece(const float (&acc)[kCount], uint32_t piece, uint32_t which) {
  Piece<Dtype> to;
#pragma unroll
  for (uint32_t g = 0; g < Piece<Dtype>::kGroups; ++g) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      to.word[g][h][0] = __float_as_uint(acc[(piece * Piece<Dtype>::kGroups + g) * 4 + 2 * h + which]);
    }
  }
  return to;
}

// The same where gates and ups lie in turn, as the `half`-th 32 columns, of elements that are two words.
template <uint32_t kCount>
__device__ __forceinline__ Piece<Tf32> packed_pairs(const float (&acc)[kCount], uint32_t piece, uint32_t half) {
  Piece<Tf32> to;
#pragma unroll
  for (uint32_t g = 0; g < Piece<Tf32>::kGroups; ++g) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t d = ((piece * 2 + half) * Piece<Tf32>::kGroups + g) * 4 + 2 * h;
      to.word[g][h][0] = __float_as_uint(acc[d]), to.word[g][h][1] = __float_as_uint(acc[d + 1]);
    }
  }
  return to;
}

// Zeros in rows [from, to) of the share, `bytes` of each from `at` on. One warpgroup.
__device__ __forceinline__ void store_zeros(uint8_t* at, uint64_t row_bytes, uint32_t from, uint32_t to, uint32_t bytes,
                                            uint32_t thread) {
  const uint32_t chunks = bytes / 16;
#pragma unroll 1
  for (uint32_t i = thread; i < (to - from) * chunks; i += kWarpgroup) {
    store_global16(at + (from + i / chunks) * row_bytes + i % chunks * 16, uint4{});
  }
}

}  // namespace detail

template <class Dtype, Activation A, uint32_t kCount>
__device__ __forceinline__ void store_gradients(uint32_t staging, const Lane& at, float (&acc)[1][kCount],
                                                const GradientRows& to, const ClampedShape& shape) {
  constexpr bool kGated = is_gated(A);
  constexpr uint32_t kPieces = 2 * kCount * Dtype::kBytes / detail::kLineBytes, kColumns = 64;
  constexpr uint32_t kPasses = min_of(2u, kPieces), kPassAccumulators = kCount / kPasses;
  constexpr uint32_t kGroups = detail::Piece<Dtype>::kGroups, kZBytes = (kGated ? 2 : 1) * Dtype::kBytes;
  const uint32_t own = detail::own_staging(staging, at);
  const uint32_t row = at.group * 64 + at.warp * detail::kWarpRows + at.row();
  const uint32_t first = at.group * 64 + at.warp * detail::kWarpRows + at.lane / 8, chunk = at.lane % 8;
  const bool in_turn = kGated && to.gated.step != 1;
  const bool has[2] = {row < to.rows, row + 8 < to.rows};
  const uint32_t number[2] = {has[0] ? to.numbers[row] : 0, has[1] ? to.numbers[row + 8] : 0};
  const uint8_t* z[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) z[h] = to.z + number[h] * to.z_row_bytes + at.token() * kZBytes;
  const float weight[2] = {to.weights[row], to.weights[row + 8]};
  float sum[2] = {};
  uint32_t column = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (uint32_t p = 0; p < kPieces / kPasses; ++p) {
      const uint32_t at_column = column + p * kColumns;
      if (at_column >= to.columns) break;
      detail::Piece<Dtype> weighted;
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) {
        const bool exists = at_column + g * 8 < to.columns;
        const uint32_t d = (p * kGroups + g) * 4;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const uint2 pre =
              detail::load_pre_activations<Dtype, kGated>(z[h] + (p * kColumns + g * 8) * kZBytes, exists && has[h]);
          weighted.word[g][h][0] = detail::differentiate_pair<Dtype, A>(acc[0][d + 2 * h], acc[0][d + 2 * h + 1], pre,
                                                                        weight[h], in_turn, sum[h], shape);
        }
        if (g % 4 == 3) __syncwarp();  // else ptxas loads so far ahead that it spills
      }
      const bool here = at_column + chunk * 8 < to.columns;
      uint8_t* const weighted_to = to.weighted + first * to.weighted_bytes + at_column * Dtype::kBytes + chunk * 16;
      detail::store_piece<Dtype>(own, at, weighted, weighted_to, to.weighted_bytes, first, to.rows, here);
      uint8_t* const line = to.gradients + first * to.gradient_bytes + chunk * 16;
      if (!in_turn) {
        uint8_t* const gate_to = line + at_column * Dtype::kBytes;
        detail::store_piece<Dtype>(own, at, detail::packed_piece<Dtype>(acc[0], p, 0), gate_to, to.gradient_bytes,
                                   first, to.rows, here);
        if constexpr (kGated) {
          detail::store_piece<Dtype>(own, at, detail::packed_piece<Dtype>(acc[0], p, 1),
                                     gate_to + to.gated.up * Dtype::kBytes, to.gradient_bytes, first, to.rows, here);
        }
      } else if constexpr (kGated) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t pairs_at = at_column + half * kColumns / 2;
          detail::store_piece<Tf32>(own, at, detail::packed_pairs(acc[0], p, half), line + pairs_at * 2 * Dtype::kBytes,
                                    to.gradient_bytes, first, to.rows, pairs_at + chunk * 4 < to.columns);
        }
      }
    }
    column += kColumns * (kPieces / kPasses);
    if (column >= to.columns || column >= kPieces * kColumns) break;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) z[h] += kColumns * (kPieces / kPasses) * kZBytes;
#pragma unroll
    for (uint32_t i = kPassAccumulators; i < kCount; ++i) acc[0][i - kPassAccumulators] = acc[0][i];
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
    sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
    if (at.lane % 4 != 0 || !has[h]) continue;
    to.parts[number[h]] = sum[h];
    if (to.spare != nullptr) to.spare[number[h]] = 0.0f;
  }
  if (at.group == 0 && to.padded > to.rows) {
    const uint32_t thread = at.warp * 32 + at.lane, columns = min_of(to.columns, kPieces * kColumns);
    const uint32_t bytes = columns * Dtype::kBytes;
    detail::store_zeros(to.weighted, to.weighted_bytes, to.rows, to.padded, bytes, thread);
    const uint32_t together = in_turn ? 2 : 1;
    uint8_t* const gates = to.gradients;
    detail::store_zeros(gates, to.gradient_bytes, to.rows, to.padded, bytes * together, thread);
    if (kGated && !in_turn) {
      detail::store_zeros(gates + to.gated.up * Dtype::kBytes, to.gradient_bytes, to.rows, to.padded, bytes, thread);
    }
  }
  named_barrier_sync(group_barrier(at.group));  // the next task's epilogue may use the whole buffer (epilogue.cuh)
}

}  // namespace flashmoe::sm90

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

namespace detail {

// Where a lane writes words of a piece's first two groups of 8 columns, by stmatrix, as stage_piece() does; of groups g and
// g + 1: ^ g * 16.
__device__ __forceinline__ uint32_t staged_groups(uint32_t own, const Lane& at) {
  return own + at.lane / 8 % 2 * 8 * kLineBytes + staged_in_piece(at.lane % 8, at.lane / 16);
}

// Stores a staged piece's lines: those that exist of rows first, first + 4, ... of the share, from `to` on, the lane's chunk of
// row `first`.
__device__ __forceinline__ void store_lines(uint32_t own, const Lane& at, uint8_t* to, uint64_t row_bytes,
                                            uint32_t first, uint32_t rows, bool exists) {
  constexpr uint32_t kRowsApart = kWarpRows / kPieceStores;
  const uint32_t chunk = at.lane % 8, row = at.lane / 8;
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
// column each where these lie in turn), and the columns' term of dS.
template <class Dtype, Activation A>
__device__ __forceinline__ void differentiate_pair(float& first, float& second, const uint2& z, float weight,
                                                   bool in_turn, float& sum, const ClampedShape& shape) {
  if constexpr (is_gated(A)) {
    const float2 low = Dtype::unpack(z.x), high = Dtype::unpack(z.y);
    const ValueAndSlope g0 = differentiate<A>(low.x, shape), g1 = differentiate<A>(high.x, shape);
    const ValueAndSlope u0 = differentiate_up<A>(low.y, shape), u1 = differentiate_up<A>(high.y, shape);
    sum = fmaf(second, g1.value * u1.value, fmaf(first, g0.value * u0.value, sum));
    const float d0 = weight * first, d1 = weight * second;
    const float gate0 = d0 * g0.slope * u0.value, gate1 = d1 * g1.slope * u1.value;
    const float up0 = d0 * g0.value * u0.slope, up1 = d1 * g1.value * u1.slope;
    first = __uint_as_float(Dtype::pack(gate0, in_turn ? up0 : gate1));
    second = __uint_as_float(Dtype::pack(in_turn ? gate1 : up0, up1));
  } else {
    const float2 v = Dtype::unpack(z.x);
    const ValueAndSlope a = differentiate<A>(v.x, shape), b = differentiate<A>(v.y, shape);
    sum = fmaf(second, b.value, fmaf(first, a.value, sum));
    first = weight * first * a.slope, second = weight * second * b.slope;
  }
}

// w a of two neighbouring columns, packed.
template <class Dtype, Activation A>
__device__ __forceinline__ uint32_t weighted_pair(const uint2& z, float weight, const ClampedShape& shape) {
  const float2 low = Dtype::unpack(z.x), high = Dtype::unpack(z.y);
  float a = low.x, b = is_gated(A) ? high.x : low.y;
  activate_pair<Tf32, A>(a, b, shape);
  if constexpr (is_gated(A)) a *= shaped_up<A>(low.y, shape), b *= shaped_up<A>(high.y, shape);
  return Dtype::pack(weight * a, weight * b);
}

// Stages the gradients that are left in the accumulators of a piece, 64 columns: with a gate words, the `which`-th of each row
// and group; else the numbers themselves.
template <class Dtype, bool kGated, uint32_t kCount>
__device__ __forceinline__ void stage_words(uint32_t own, const Lane& at, const float (&acc)[kCount], uint32_t piece,
                                            uint32_t which) {
  const uint32_t to = staged_groups(own, at);
  const auto word = [&](uint32_t d) {
    return kGated ? __float_as_uint(acc[d + which]) : Dtype::pack(acc[d], acc[d + 1]);
  };
#pragma unroll
  for (uint32_t g = 0; g < 8; g += 2) {
    const uint32_t d = (piece * 8 + g) * 4;
    store_matrices(to ^ g * 16, {word(d), word(d + 2), word(d + 4), word(d + 6)});
  }
}

// The same where gates and ups lie in turn: both words of each of the `half`-th 32 columns, as stage_piece() of fp32 does.
template <uint32_t kCount>
__device__ __forceinline__ void stage_pairs(uint32_t own, const Lane& at, const float (&acc)[kCount], uint32_t piece,
                                            uint32_t half) {
  const uint32_t to = own + staged_in_piece(at.row(), at.lane % 4 / 2) + at.lane % 2 * 8;
#pragma unroll
  for (uint32_t g = 0; g < 4; ++g) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t d = ((piece * 2 + half) * 4 + g) * 4 + 2 * h;
      store_shared8((to ^ g * 32) + h * 8 * kLineBytes, __float_as_uint(acc[d]), __float_as_uint(acc[d + 1]));
    }
  }
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

// The thread's place, found anew wherever it is needed: the accumulators leave no registers to keep it.
__device__ __forceinline__ Lane this_lane() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return Lane::of_thread(thread / kWarpgroup);
}
__device__ __forceinline__ uint32_t slab_of(const Lane& at) {
  return at.group * 64 + at.warp * kWarpRows;
}

// Stores the gradients of a piece's 64 columns, which are in the accumulators.
template <class Dtype, bool kGated, uint32_t kCount, class Where>
__device__ __forceinline__ void store_finished(uint32_t staging, const float (&acc)[kCount], uint32_t piece,
                                               bool in_turn, const Where& where) {
  const Lane at = this_lane();
  const uint32_t column = piece * 64;
  const uint32_t own = own_staging(staging, at), first = slab_of(at) + at.lane / 8;
  const uint32_t here = column + at.lane % 8 * 8, columns = where.columns();
#pragma unroll
  for (uint32_t which = 0; which < (kGated ? 2 : 1); ++which) {
    if (!in_turn) {
      stage_words<Dtype, kGated>(own, at, acc, piece, which);
      store_lines(own, at, where.gradients(first, here + which * where.to_up()), where.gradient_bytes(), first,
                  where.rows(), here < columns);
    } else if constexpr (kGated) {
      const uint32_t pair = column + which * 32 + at.lane % 8 * 4;
      stage_pairs(own, at, acc, piece, which);
      store_lines(own, at, where.gradients(first, pair * 2), where.gradient_bytes(), first, where.rows(),
                  pair < columns);
    }
  }
}

// Stores w a of `end` columns at most. No sums are left in registers by then, so that z is loaded a second time, from the
// caches.
template <class Dtype, Activation A, class Where>
__device__ __forceinline__ void store_weighted(uint32_t staging, uint32_t end, const Where& where,
                                               const ClampedShape& shape) {
  constexpr uint32_t kColumns = 64, kZBytes = is_gated(A) ? 4 : 2;
  const Lane at = this_lane();
  const uint32_t own = own_staging(staging, at), row = slab_of(at) + at.row(), first = slab_of(at) + at.lane / 8;
  const uint8_t* const z[2] = {where.z(row) + at.token() * kZBytes, where.z(row + 8) + at.token() * kZBytes};
  const float weight[2] = {where.weight(row), where.weight(row + 8)};
#pragma unroll 1
  for (uint32_t column = 0; column < end; column += kColumns) {
    Piece<Dtype> piece;
#pragma unroll
    for (uint32_t g = 0; g < Piece<Dtype>::kGroups; ++g) {
      const uint32_t at_column = column + g * 8;
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint2 pre = load_pre_activations<Dtype, is_gated(A)>(z[h] + at_column * kZBytes, at_column < end);
        piece.word[g][h][0] = weighted_pair<Dtype, A>(pre, weight[h], shape);
      }
    }
    stage_piece(own, at, piece);
    const uint32_t here = column + at.lane % 8 * 8;
    store_lines(own, at, where.weighted(first, here), where.weighted_bytes(), first, where.rows(), here < end);
  }
}

// The rows' parts of dS: sums over a row's four lanes.
template <class Where>
__device__ __forceinline__ void store_weight_parts(const Lane& at, float (&sum)[2], const Where& where) {
  const uint32_t row = at.group * 64 + at.warp * kWarpRows + at.row();
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
    sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
    if (at.lane % 4 == 0 && row + 8 * h < where.rows()) where.store_part(row + 8 * h, sum[h]);
  }
}

// Zeros behind a tile's rows, in so many columns of w a, and of its gates and ups.
template <class Where>
__device__ __forceinline__ void store_padding(const Lane& at, uint32_t columns, bool in_turn, bool gated,
                                              const Where& where) {
  const uint32_t rows = where.rows(), padded = where.padded(), thread = at.warp * 32 + at.lane, bytes = columns * 2;
  if (at.group != 0 || padded <= rows) return;
  store_zeros(where.weighted(0, 0), where.weighted_bytes(), rows, padded, bytes, thread);
  store_zeros(where.gradients(0, 0), where.gradient_bytes(), rows, padded, in_turn ? 2 * bytes : bytes, thread);
  if (in_turn || !gated) return;
  store_zeros(where.gradients(0, where.to_up()), where.gradient_bytes(), rows, padded, bytes, thread);
}

}  // namespace detail

// `where` says of the block's share of rows, and from the block's first column on, whatever is asked of it, anew each time:
// kept, it would take too many registers. (Nor can pieces be a loop that moves accumulators, as in store_rows(): where both are
// changed, ptxas finds too few registers for wgmma.)
template <class Dtype, Activation A, uint32_t kCount, class Where>
__device__ __forceinline__ void store_gradients(uint32_t staging, float (&acc)[1][kCount], const Where& where,
                                                const ClampedShape& shape) {
  static_assert(Dtype::kBytes == 2);
  constexpr bool kGated = is_gated(A);
  constexpr uint32_t kColumns = 64, kGroups = kColumns / 8, kPieces = 2 * kCount / kColumns;
  constexpr uint32_t kAtOnce = 4;  // groups whose pre-activations are on their way
  constexpr uint32_t kZBytes = kGated ? 4 : 2;
  const bool in_turn = kGated && where.in_turn();
  float sum[2] = {};
#pragma unroll
  for (uint32_t p = 0; p < kPieces; ++p) {
    const uint32_t columns = where.columns();
    if (p * kColumns >= columns) break;
    const Lane at = detail::this_lane();
    const uint32_t row = detail::slab_of(at) + at.row();
    const uint8_t* const z[2] = {where.z(row) + at.token() * kZBytes, where.z(row + 8) + at.token() * kZBytes};
    const float weight[2] = {where.weight(row), where.weight(row + 8)};
#pragma unroll
    for (uint32_t g = p * kGroups; g < (p + 1) * kGroups; g += kAtOnce) {
      uint2 pre[kAtOnce * 2];  // of a group two rows'
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * 2; ++i) {
        const uint32_t column = (g + i / 2) * 8;
        pre[i] = detail::load_pre_activations<Dtype, kGated>(z[i % 2] + column * kZBytes, column < columns);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * 2; ++i) {
        const uint32_t h = i % 2, d = (g + i / 2) * 4 + 2 * h;
        detail::differentiate_pair<Dtype, A>(acc[0][d], acc[0][d + 1], pre[i], weight[h], in_turn, sum[h], shape);
      }
      __syncwarp();  // else ptxas loads so far ahead that it spills
    }
    detail::store_finished<Dtype, kGated>(staging, acc[0], p, in_turn, where);
  }
  const Lane at = detail::this_lane();
  const uint32_t columns = min_of(where.columns(), kPieces * kColumns);
  detail::store_weight_parts(at, sum, where);
  detail::store_weighted<Dtype, A>(staging, columns, where, shape);
  detail::store_padding(at, columns, in_turn, kGated, where);
  named_barrier_sync(group_barrier(at.group));  // the next task's epilogue may use the whole buffer (epilogue.cuh)
}

}  // namespace flashmoe::sm90

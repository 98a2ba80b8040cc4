// Consumer warpgroups: Epilogue::kDifferentiate, where the accumulators are dA, tokens down.
//
// Of each row of the task, from its pre-activations z and its combine weight w, with a = act(z):
//   to the tile's rows of dZ   w dA act'(z), gate and up
//   to its weighted rows       w a
//   a part of dS               the sum of dA a over the task's columns, in an order that columns alone decide on
// Where weights scale the products with gate_up (kOnInputBuild), these products u are kept, and z = w u + bias:
//   to dZ the same, which there is w times the gradient of z; where biases need that gradient, to rows behind dZ also this
//   to weighted rows a, and a part of dS is the sum of dA act'(z) u
// A piece is 32 columns. A warp stages its accumulators, fp32, in its own buffer, and takes them from there by rows: 4 columns of
// four rows a lane, so that all it loads and stores of a row is side by side. All pieces run the same code: it is executed once a
// task, and unrolled it was 80 KiB, which took longer to fetch than to run (38 us of 63 us a task).
#pragma once

#include "flashmoe/gpu/differentiate.cuh"
#include "flashmoe/sm90/epilogue_rows.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kGradientColumns = 32;            // of a piece
inline constexpr uint32_t kLaneColumns = 4, kLaneRows = 4;  // of a lane in a piece
inline constexpr uint32_t kLaneRowsApart = kWarpRows / kLaneRows;

// Stages the n-th 32 columns of accumulators, as stage_piece() of fp32 does.
template <uint32_t kCount>
__device__ __forceinline__ void stage_columns(uint32_t own, const Lane& at, const float (&acc)[kCount], uint32_t n) {
  const uint32_t to = own + staged_in_piece(at.row(), at.lane % 4 / 2) + at.lane % 2 * 8;
#pragma unroll
  for (uint32_t g = 0; g < 4; ++g) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t d = (n * 4 + g) * 4 + 2 * h;
      store_shared8((to ^ g * 32) + h * 8 * kLineBytes, __float_as_uint(acc[d]), __float_as_uint(acc[d + 1]));
    }
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

// Stages the piece-th 32 columns, of kMany from the kFirst-th on: by a tree of branches, since a warp waits for instructions at
// each that it jumps over.
template <uint32_t kFirst, uint32_t kMany, uint32_t kCount>
__device__ __forceinline__ void stage_piece_of(uint32_t piece, uint32_t own, const float (&acc)[kCount]) {
  if constexpr (kMany == 1) {
    stage_columns(own, this_lane(), acc, kFirst);
  } else if (piece < kFirst + kMany / 2) {
    stage_piece_of<kFirst, kMany / 2>(piece, own, acc);
  } else {
    stage_piece_of<kFirst + kMany / 2, kMany / 2>(piece, own, acc);
  }
}

// What becomes of a lane's columns of one row.
struct LaneGradients {
  uint32_t gates[2], ups[2];  // or without a gate all in `gates`
  uint32_t weighted[2];
};

__device__ __forceinline__ void store_words(uint8_t* to, const uint32_t (&words)[2]) {
  *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}

// Rounds gradients of pre-activations, times `by`. in_turn: see differentiate_columns().
template <class Dtype>
__device__ __forceinline__ void pack_gradients(LaneGradients& to, uint32_t p, const float (&gate)[2],
                                               const float (&up)[2], float by, bool in_turn) {
  to.gates[p] = Dtype::pack(by * gate[0], by * (in_turn ? up[0] : gate[1]));
  to.ups[p] = Dtype::pack(by * (in_turn ? gate[1] : up[0]), by * up[1]);
}

// The same as differentiate_columns() of a layer whose weights scale products, which are u: `plain` has the gradients of
// pre-activations, the result these times the weight. bias(i, up): of the lane's i-th column.
template <class Dtype, Activation A, class Bias>
__device__ __forceinline__ LaneGradients differentiate_scaled_columns(const float (&da)[kLaneColumns], const uint4& u,
                                                                      float weight, bool in_turn, float& sum,
                                                                      const ClampedShape& shape, Bias&& bias,
                                                                      LaneGradients& plain) {
  constexpr bool kGated = is_gated(A);
  const uint32_t word[4] = {u.x, u.y, u.z, u.w};
  LaneGradients to;
#pragma unroll
  for (uint32_t p = 0; p < 2; ++p) {
    float a[2], gate[2], up[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float2 pair = Dtype::unpack(word[kGated ? 2 * p + j : p]);
      const float of_gate = kGated || j == 0 ? pair.x : pair.y;
      const float d = da[2 * p + j];
      const ValueAndSlope g = differentiate<A>(weight * of_gate + bias(2 * p + j, false), shape);
      a[j] = g.value, gate[j] = d * g.slope;
      if constexpr (kGated) {
        const ValueAndSlope v = differentiate_up<A>(weight * pair.y + bias(2 * p + j, true), shape);
        a[j] *= v.value, gate[j] *= v.value, up[j] = d * g.value * v.slope;
        sum = fmaf(up[j], pair.y, sum);
      }
      sum = fmaf(gate[j], of_gate, sum);
    }
    to.weighted[p] = Dtype::pack(a[0], a[1]);
    pack_gradients<Dtype>(to, p, gate, up, weight, in_turn);
    pack_gradients<Dtype>(plain, p, gate, up, 1.0f, in_turn);
  }
  return to;
}

// From dA and z of a lane's columns of one row: what is stored, and added to `sum` the columns' term of dS. in_turn: gates lie
// beside their ups, and these take turns in the words of gates and ups.
template <class Dtype, Activation A>
__device__ __forceinline__ LaneGradients differentiate_columns(const float (&da)[kLaneColumns], const uint4& z,
                                                               float weight, bool in_turn, float& sum,
                                                               const ClampedShape& shape) {
  constexpr bool kGated = is_gated(A);
  const uint32_t word[4] = {z.x, z.y, z.z, z.w};
  LaneGradients to;
#pragma unroll
  for (uint32_t p = 0; p < 2; ++p) {
    float a[2], gate[2], up[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float2 pair = Dtype::unpack(word[kGated ? 2 * p + j : p]);
      const float d = weight * da[2 * p + j];
      const ValueAndSlope g = differentiate<A>(kGated || j == 0 ? pair.x : pair.y, shape);
      a[j] = g.value, gate[j] = d * g.slope;
      if constexpr (kGated) {
        const ValueAndSlope u = differentiate_up<A>(pair.y, shape);
        a[j] *= u.value, gate[j] *= u.value, up[j] = d * g.value * u.slope;
      }
      sum = fmaf(da[2 * p + j], a[j], sum);
      a[j] *= weight;
    }
    to.weighted[p] = Dtype::pack(a[0], a[1]);
    to.gates[p] = Dtype::pack(gate[0], in_turn ? up[0] : gate[1]);
    to.ups[p] = Dtype::pack(in_turn ? gate[1] : up[0], up[1]);
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

// Where a lane's columns of a piece lie, in rows kLaneRowsApart from one another.
template <bool kGated>
struct LanePlaces {
  static constexpr uint32_t kZBytes = kGated ? 4 : 2;

  const uint8_t* z;          // of the next piece, in the first row of all,
  uint32_t kept[kLaneRows];  // and how far behind that the lane's rows are, in units of 16 bytes
  uint8_t *weighted, *gradients;

  // Of the first piece. first: the lane's first row; column: its first column, of `columns`. landing: see fetch().
  template <class Where>
  static __device__ __forceinline__ LanePlaces of(const Where& where, uint32_t first, uint32_t column,
                                                  uint32_t columns) {
    LanePlaces at;
#pragma unroll
    for (uint32_t i = 0; i < kLaneRows; ++i) {
      at.kept[i] = where.kept_row(first + i * kLaneRowsApart) * (where.z_bytes() / 16);
    }
    at.z = where.z() + (column < columns ? column * kZBytes : 0);
    at.weighted = where.weighted(first, column);
    at.gradients = where.gradients(first, where.in_turn() ? 2 * column : column);
    return at;
  }
  // Pre-activations of the lane's columns of its i-th row come to shared memory, one group of cp.async a row, into a place of the lane's
  // own behind `landing`, and from there to registers: gate and up of each column, or without a gate a half each, in z.x and z.y.
  static constexpr uint32_t kLandingRow = kLaneColumns * kZBytes;
  __device__ __forceinline__ void fetch(uint32_t i, uint32_t landing, bool exists) const {
    const uint8_t* const from = z + uint64_t{kept[i]} * 16;
    const uint32_t to = landing + i * 32 * kLandingRow;
    if (exists) {
      if constexpr (kGated)
        cp_async16(to, from);
      else
        cp_async8(to, from);
    }
    cp_async_commit();
  }
  // later: groups that were begun behind the row's.
  template <uint32_t kLater>
  static __device__ __forceinline__ uint4 fetched(uint32_t i, uint32_t landing) {
    cp_async_wait<kLater>();
    const uint32_t at = landing + i * 32 * kLandingRow;
    if constexpr (kGated) return load_shared16(at);
    const float2 v = load_shared8(at);
    return {__float_as_uint(v.x), __float_as_uint(v.y), 0, 0};
  }
  // Behind the last column: stays where it is.
  __device__ __forceinline__ void next_z(uint32_t column, uint32_t columns) {
    if (column < columns) z += kGradientColumns * kZBytes;
  }
  __device__ __forceinline__ void next_results(bool in_turn) {
    weighted += kGradientColumns * 2;
    gradients += kGradientColumns * (in_turn ? 4 : 2);
  }
  // Stores the lane's columns of its i-th row.
  template <class Where>
  __device__ __forceinline__ void store(const LaneGradients& g, uint32_t i, const Where& where) const {
    store_words(weighted + i * kLaneRowsApart * where.weighted_bytes(), g.weighted);
    store_gradients(gradients + i * kLaneRowsApart * where.gradient_bytes(), g, where);
  }
  // And its gradients without the weight, to rows so many bytes behind.
  template <class Where>
  __device__ __forceinline__ void store_plain(const LaneGradients& g, uint32_t i, uint64_t behind,
                                              const Where& where) const {
    store_gradients(gradients + i * kLaneRowsApart * where.gradient_bytes() + behind, g, where);
  }

 private:
  template <class Where>
  static __device__ __forceinline__ void store_gradients(uint8_t* to, const LaneGradients& g, const Where& where) {
    if (kGated && where.in_turn()) {
      store_global16(to, {g.gates[0], g.ups[0], g.gates[1], g.ups[1]});
      return;
    }
    store_words(to, g.gates);
    if constexpr (kGated) store_words(to + where.to_up() * 2, g.ups);
  }
};

// The rows' parts of dS: sums over a row's eight lanes.
template <class Where>
__device__ __forceinline__ void store_weight_parts(float (&sum)[kLaneRows], const Where& where) {
  const Lane at = this_lane();
  const uint32_t first = slab_of(at) + at.lane / 8;
#pragma unroll
  for (uint32_t i = 0; i < kLaneRows; ++i) {
#pragma unroll
    for (uint32_t lanes = 1; lanes < 8; lanes *= 2) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], lanes);
    const uint32_t r = first + i * kLaneRowsApart;
    if (at.lane % 8 == 0 && r < where.rows()) where.store_part(r, sum[i]);
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

// landing: a piece's bytes for each warp of the warpgroup, for pre-activations on their way. They take as long from the L2 as a
// piece's work, behind stores of others, and there are no registers to load them to so long before.
//
// `where` says of the block's share of rows, and from the block's first column on, whatever is asked of it.
template <class Dtype, Activation A, uint32_t kCount, class Where>
__device__ __forceinline__ void store_gradients(uint32_t staging, uint32_t landing, const float (&acc)[1][kCount],
                                                const Where& where, const ClampedShape& shape) {
  using namespace detail;
  static_assert(Dtype::kBytes == 2);
  constexpr bool kGated = is_gated(A);
  constexpr uint32_t kPieces = 2 * kCount / kGradientColumns;
  const auto in_turn = [&] { return kGated && where.in_turn(); };
  const uint32_t columns = min_of(where.columns(), kPieces * kGradientColumns);
  float sum[kLaneRows] = {};
  if (columns != 0) {
    const Lane at = this_lane();
    const uint32_t own = own_staging(staging, at), first = slab_of(at) + at.lane / 8;
    uint32_t column = at.lane % 8 * kLaneColumns;
    auto left = static_cast<int32_t>(where.rows() - first);
    auto places = LanePlaces<kGated>::of(where, first, column, columns);
    landing = own_staging(landing, at) + at.lane * LanePlaces<kGated>::kLandingRow;
#pragma unroll
    for (uint32_t i = 0; i < kLaneRows; ++i) places.fetch(i, landing, true);
#pragma unroll 1
    for (uint32_t piece = 0; piece * kGradientColumns < columns; ++piece, column += kGradientColumns) {
      asm("" : "+r"(left));  // else which rows exist is kept as bits, and spilled
      places.next_z(column + kGradientColumns, columns);
      const bool more = (piece + 1) * kGradientColumns < columns;
      stage_piece_of<0, kPieces>(piece, own, acc[0]);
      __syncwarp();
      uint4 z = places.template fetched<kLaneRows - 1>(0, landing);
#pragma unroll
      for (uint32_t i = 0; i < kLaneRows; ++i) {
        const uint4 staged = load_shared16(own + staged_in_piece(at.lane / 8 + i * kLaneRowsApart, at.lane % 8));
        const float da[kLaneColumns] = {__uint_as_float(staged.x), __uint_as_float(staged.y), __uint_as_float(staged.z),
                                        __uint_as_float(staged.w)};
        const float weight = where.weight(first + i * kLaneRowsApart);
        uint4 next = {};
        if (i + 1 < kLaneRows) next = places.template fetched<kLaneRows - 2>(i + 1, landing);
        float term = 0.0f;
        [[maybe_unused]] LaneGradients plain;
        const LaneGradients made = [&] {
          if constexpr (!kOnInputBuild) {
            return differentiate_columns<Dtype, A>(da, z, weight, in_turn(), term, shape);
          } else {
            const auto bias = [&](uint32_t n, bool up) { return where.template bias<Dtype>(column + n, up); };
            return differentiate_scaled_columns<Dtype, A>(da, z, weight, in_turn(), term, shape, bias, plain);
          }
        }();
        places.fetch(i, landing, more);
        z = next;
        if (column < columns) {
          sum[i] += term;
          if (static_cast<int32_t>(i * kLaneRowsApart) < left) {
            places.store(made, i, where);
            if constexpr (kOnInputBuild) {
              const uint64_t behind = where.plain_behind();
              if (behind != 0) places.store_plain(plain, i, behind, where);
            }
          }
        }
        __syncwarp();  // else ptxas computes rows side by side, and spills
      }
      places.next_results(in_turn());
    }
  }
  store_weight_parts(sum, where);
  store_padding(this_lane(), columns, in_turn(), kGated, where);
  fence_proxy_async_shared();  // the copy engine writes next where pre-activations landed
  named_barrier_sync(
      group_barrier(this_lane().group));  // the next task's epilogue may use the whole buffer (epilogue.cuh)
}

}  // namespace flashmoe::sm90

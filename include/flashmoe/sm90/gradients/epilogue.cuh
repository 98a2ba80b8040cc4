// Consumer warpgroups: Epilogue::kDifferentiate, where the accumulators are dA, tokens down.
//
// For each row of the task, from its pre-activations z and its combine weight w, with a = act(z), a warp computes
//   for the tile's rows of dZ   w dA act'(z), gate and up
//   for its weighted rows       w a
//   for dS, a part              the sum of dA a over the task's columns, in an order that only the columns decide
// (dS is the gradient of combine weights.)
// If weights scale the products with gate_up (kBuild.on_input), these products u are kept, and z = w u + bias. Then
//   for dZ                      the same, which is w times the gradient of z; and, if gate_up_bias has a gradient, the
//                               gradient of z itself, to rows behind dZ
//   for weighted rows           a
//   for dS, a part              the sum of dA act'(z) u
// A piece is 32 columns. A warp stages its fp32 accumulators in its own buffer, and reads them from there by rows. A
// lane has 4 columns of four rows, so its loads and stores of a row are side by side. All pieces run the same code, as
// a loop: it is executed once a task, and unrolled it was 80 KiB, which took longer to fetch than to run (38 us of 63
// us a task).
#pragma once

#include "flashmoe/gpu/differentiate.cuh"
#include "flashmoe/sm90/epilogue/rows.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kGradientColumns = 32;            // of a piece
inline constexpr uint32_t kLaneColumns = 4, kLaneRows = 4;  // of a lane in a piece
inline constexpr uint32_t kLaneRowsApart = kWarpRows / kLaneRows;

// Stages the n-th 32 columns of accumulators, as stage_piece() does in fp32.
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
  return Lane::of_thread(thread_anew() / kWarpgroup);
}
__device__ __forceinline__ uint32_t slab_of(const Lane& at) {
  return at.group * 64 + at.warp * kWarpRows;
}

// Stages piece number `piece`, which is one of the kMany pieces from number kFirst on. A tree of branches leads to the
// piece's code, because a warp waits for instructions whenever it jumps over a piece's code.
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

// Two neighbours of a row, as memory has them.
template <class Dtype>
struct Neighbours {
  uint32_t word[Dtype::kBytes / 2];

  Neighbours() = default;
  __device__ __forceinline__ Neighbours(float low, float high) {
    if constexpr (Dtype::kBytes == 2) {
      word[0] = Dtype::pack(low, high);
    } else {
      word[0] = __float_as_uint(low), word[1] = __float_as_uint(high);
    }
  }
};

// What a lane stores for its columns of one row, as pairs of neighbouring columns.
template <class Dtype>
struct LaneGradients {
  Neighbours<Dtype> gates[2], ups[2];  // or without a gate all in `gates`
  Neighbours<Dtype> weighted[2];
};

// Stores four neighbours of a row.
template <class Dtype>
__device__ __forceinline__ void store_four(uint8_t* to, const Neighbours<Dtype>& low, const Neighbours<Dtype>& high) {
  if constexpr (Dtype::kBytes == 2) {
    *reinterpret_cast<uint2*>(to) = {low.word[0], high.word[0]};
  } else {
    store_global16(to, {low.word[0], low.word[1], high.word[0], high.word[1]});
  }
}

// A lane's pre-activations of one row: of each of its columns gate and up, or without a gate one number. These are 8,
// 16 or 32 bytes.
struct TwoChunks {
  uint4 low, high;
};
template <class Dtype, bool kGated>
struct LaneInputs {
  static constexpr uint32_t kColumnBytes = (kGated ? 2 : 1) * Dtype::kBytes, kBytes = kLaneColumns * kColumnBytes;
  using Type = std::conditional_t<kBytes == sizeof(TwoChunks), TwoChunks, uint4>;
  static constexpr uint32_t kWords = sizeof(Type) / 4;

  static __device__ __forceinline__ void spread(uint32_t (&to)[4], const uint4& z) {
    to[0] = z.x, to[1] = z.y, to[2] = z.z, to[3] = z.w;
  }
  static __device__ __forceinline__ void spread(uint32_t (&to)[8], const TwoChunks& z) {
    to[0] = z.low.x, to[1] = z.low.y, to[2] = z.low.z, to[3] = z.low.w;
    to[4] = z.high.x, to[5] = z.high.y, to[6] = z.high.z, to[7] = z.high.w;
  }
};

// What LaneGradients holds, if combine weights scale products: the gradients of pre-activations in fp32, which times()
// then multiplies and rounds, and the activations, rounded already.
template <class Dtype>
struct ScaledGradients {
  float gates[kLaneColumns], ups[kLaneColumns];
  Neighbours<Dtype> weighted[2];

  // Gradients times `by`. in_turn: see differentiate_columns().
  __device__ __forceinline__ LaneGradients<Dtype> times(float by, bool in_turn) const {
    LaneGradients<Dtype> to;
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      const float *const gate = gates + 2 * p, *const up = ups + 2 * p;
      to.weighted[p] = weighted[p];
      to.gates[p] = {by * gate[0], by * (in_turn ? up[0] : gate[1])};
      to.ups[p] = {by * (in_turn ? gate[1] : up[0]), by * up[1]};
    }
    return to;
  }
};

// As differentiate_columns(), for a layer whose combine weights scale the products with gate_up. `u` has these
// products. bias(i, up): the bias of the lane's i-th column, of its up or of its gate.
template <class Dtype, Activation A, class Bias>
__device__ __forceinline__ ScaledGradients<Dtype> differentiate_scaled_columns(
    const float (&da)[kLaneColumns], const typename LaneInputs<Dtype, is_gated(A)>::Type& u, float weight, float& sum,
    const ClampedShape& shape, Bias&& bias) {
  constexpr bool kGated = is_gated(A), kExact = !Dtype::kTensorCores;
  uint32_t word[LaneInputs<Dtype, kGated>::kWords];
  LaneInputs<Dtype, kGated>::spread(word, u);
  ScaledGradients<Dtype> to;
  float a[kLaneColumns];
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    const float2 pair = pair_of<Dtype>(word, kGated ? i : i / 2);
    const float of_gate = kGated || i % 2 == 0 ? pair.x : pair.y;
    const ValueAndSlope g = differentiate<A, kExact>(weight * of_gate + bias(i, false), shape);
    a[i] = g.value, to.gates[i] = da[i] * g.slope, to.ups[i] = 0.0f;
    if constexpr (kGated) {
      const ValueAndSlope v = differentiate_up<A>(weight * pair.y + bias(i, true), shape);
      a[i] *= v.value, to.gates[i] *= v.value, to.ups[i] = da[i] * g.value * v.slope;
      sum = fmaf(to.ups[i], pair.y, sum);
    }
    sum = fmaf(to.gates[i], of_gate, sum);
    if (i == 1) __syncwarp();  // else ptxas computes all columns side by side, and spills
  }
  to.weighted[0] = {a[0], a[1]}, to.weighted[1] = {a[2], a[3]};
  return to;
}

// From dA and z of a lane's columns of one row: returns what the lane stores, and adds the columns' term of dS to
// `sum`. in_turn: in dZ each gate lies beside its up. Each pair of the result in `gates` and `ups` then is a gate and
// its up, and gates[0], ups[0], gates[1], ups[1] is the order of memory.
template <class Dtype, Activation A>
__device__ __forceinline__ LaneGradients<Dtype> differentiate_columns(
    const float (&da)[kLaneColumns], const typename LaneInputs<Dtype, is_gated(A)>::Type& z, float weight, bool in_turn,
    float& sum, const ClampedShape& shape) {
  constexpr bool kGated = is_gated(A);
  uint32_t word[LaneInputs<Dtype, kGated>::kWords];
  LaneInputs<Dtype, kGated>::spread(word, z);
  LaneGradients<Dtype> to;
#pragma unroll
  for (uint32_t p = 0; p < 2; ++p) {
    float a[2], gate[2], up[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float2 pair = pair_of<Dtype>(word, kGated ? 2 * p + j : p);
      const float d = weight * da[2 * p + j];
      const ValueAndSlope g = differentiate<A, !Dtype::kTensorCores>(kGated || j == 0 ? pair.x : pair.y, shape);
      a[j] = g.value, gate[j] = d * g.slope;
      if constexpr (kGated) {
        const ValueAndSlope u = differentiate_up<A>(pair.y, shape);
        a[j] *= u.value, gate[j] *= u.value, up[j] = d * g.value * u.slope;
      }
      sum = fmaf(da[2 * p + j], a[j], sum);
      a[j] *= weight;
    }
    to.weighted[p] = {a[0], a[1]};
    to.gates[p] = {gate[0], in_turn ? up[0] : gate[1]};
    to.ups[p] = {in_turn ? gate[1] : up[0], up[1]};
  }
  return to;
}

// Stores zeros to rows [from, to) of the share, `bytes` of each from `at` on. One warpgroup.
__device__ __forceinline__ void store_zeros(uint8_t* at, uint64_t row_bytes, uint32_t from, uint32_t to, uint32_t bytes,
                                            uint32_t thread) {
  const uint32_t chunks = bytes / 16;
#pragma unroll 1
  for (uint32_t i = thread; i < (to - from) * chunks; i += kWarpgroup) {
    store_global16(at + (from + i / chunks) * row_bytes + i % chunks * 16, uint4{});
  }
}

// Where a lane's columns of a piece lie, in the lane's kLaneRows rows, which are kLaneRowsApart rows apart.
template <class Dtype, bool kGated>
struct LanePlaces {
  using Inputs = typename LaneInputs<Dtype, kGated>::Type;
  static constexpr uint32_t kZBytes = LaneInputs<Dtype, kGated>::kColumnBytes;

  const uint8_t* z;          // the next piece's columns in the first row of all kept rows
  uint32_t kept[kLaneRows];  // how far behind the first kept row the lane's rows are, in units of 16 bytes
  uint8_t *weighted, *gradients;

  // The places for the first piece. first: the lane's first row. column: the lane's first column, of `columns`.
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
  // fetch() begins to copy the pre-activations of the lane's columns of its i-th row to shared memory: one group of
  // cp.async a row, to the lane's own place behind `landing`. From there fetched() loads them to registers. If there is
  // room for two rows only (kInTurn), rows i and i + 2 have the same place.
  static constexpr uint32_t kLandingRow = LaneInputs<Dtype, kGated>::kBytes;
  static constexpr uint32_t kLandings = min_of(kLaneRows, kPieceBytes / (32 * kLandingRow));
  static constexpr bool kInTurn = kLandings != kLaneRows;
  static __device__ __forceinline__ uint32_t landing_of(uint32_t i, uint32_t landing) {
    return landing + i % kLandings * 32 * kLandingRow;
  }
  __device__ __forceinline__ void fetch(uint32_t i, uint32_t landing, bool exists) const {
    const uint8_t* const from = z + uint64_t{kept[i]} * 16;
    const uint32_t to = landing_of(i, landing);
    if (exists) {
      if constexpr (kLandingRow >= 16)
        cp_async16(to, from);
      else
        cp_async8(to, from);
      if constexpr (kLandingRow == 32) cp_async16(to + 16, from + 16);
    }
    cp_async_commit();
  }
  // kLater: how many groups of cp.async were begun after the row's.
  template <uint32_t kLater>
  static __device__ __forceinline__ Inputs fetched(uint32_t i, uint32_t landing) {
    cp_async_wait<kLater>();
    const uint32_t at = landing_of(i, landing);
    if constexpr (kLandingRow == 32) {
      return {load_shared16(at), load_shared16(at + 16)};
    } else if constexpr (kLandingRow == 16) {
      return load_shared16(at);
    } else {
      const float2 v = load_shared8(at);
      return {__float_as_uint(v.x), __float_as_uint(v.y), 0, 0};
    }
  }
  // Goes on to the next piece, unless that begins behind the last column.
  __device__ __forceinline__ void next_z(uint32_t column, uint32_t columns) {
    if (column < columns) z += kGradientColumns * kZBytes;
  }
  __device__ __forceinline__ void next_results(bool in_turn) {
    weighted += kGradientColumns * Dtype::kBytes;
    gradients += kGradientColumns * (in_turn ? 2 : 1) * Dtype::kBytes;
  }
  // Stores the lane's columns of its i-th row.
  template <class Where>
  __device__ __forceinline__ void store(const LaneGradients<Dtype>& g, uint32_t i, const Where& where) const {
    store_four(weighted + i * kLaneRowsApart * where.weighted_bytes(), g.weighted[0], g.weighted[1]);
    store_gradients(gradients + i * kLaneRowsApart * where.gradient_bytes(), g, where);
  }
  // Stores the gradients without the weight, to rows that lie `behind` bytes behind those of dZ.
  template <class Where>
  __device__ __forceinline__ void store_plain(const LaneGradients<Dtype>& g, uint32_t i, uint64_t behind,
                                              const Where& where) const {
    uint8_t* to = gradients + i * kLaneRowsApart * where.gradient_bytes() + behind;
    asm("" : "+l"(to));  // else addresses of both layouts are kept from row to row, and spilled
    store_gradients(to, g, where);
  }

 private:
  template <class Where>
  static __device__ __forceinline__ void store_gradients(uint8_t* to, const LaneGradients<Dtype>& g,
                                                         const Where& where) {
    if (kGated && where.in_turn()) {
      if constexpr (Dtype::kBytes == 2) {
        store_global16(to, {g.gates[0].word[0], g.ups[0].word[0], g.gates[1].word[0], g.ups[1].word[0]});
      } else {
        store_four(to, g.gates[0], g.ups[0]);
        store_four(to + 16, g.gates[1], g.ups[1]);
      }
      return;
    }
    store_four(to, g.gates[0], g.gates[1]);
    if constexpr (kGated) store_four(to + where.to_up() * Dtype::kBytes, g.ups[0], g.ups[1]);
  }
};

// Stores the rows' parts of dS, each of which is the sum over the eight lanes that share the row.
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

// Stores zeros in the rows behind a tile's last row, in so many columns of w a, and of dZ's gates and ups.
template <class Dtype, class Where>
__device__ __forceinline__ void store_padding(const Lane& at, uint32_t columns, bool in_turn, bool gated,
                                              const Where& where) {
  const uint32_t rows = where.rows(), padded = where.padded(), thread = at.warp * 32 + at.lane,
                 bytes = columns * Dtype::kBytes;
  if (at.group != 0 || padded <= rows) return;
  store_zeros(where.weighted(0, 0), where.weighted_bytes(), rows, padded, bytes, thread);
  store_zeros(where.gradients(0, 0), where.gradient_bytes(), rows, padded, in_turn ? 2 * bytes : bytes, thread);
  if (in_turn || !gated) return;
  store_zeros(where.gradients(0, where.to_up()), where.gradient_bytes(), rows, padded, bytes, thread);
}

}  // namespace detail

// Epilogue::kDifferentiate, for a warpgroup's accumulators.
//
// landing: shared memory for pre-activations on their way, kPieceBytes for each warp of the warpgroup. From the L2 they
// take as long as the work on a piece, because they wait behind stores, and there are no registers into which they
// could be loaded so early.
//
// `where` (GradientPlace) says where things lie. Its rows are those of the block's share, and its columns are counted
// from the block's first column.
template <class Dtype, Activation A, uint32_t kCount, class Where>
__device__ __forceinline__ void store_gradients(uint32_t staging, uint32_t landing, const float (&acc)[1][kCount],
                                                const Where& where, const ClampedShape& shape) {
  using namespace detail;
  constexpr bool kGated = is_gated(A);
  constexpr uint32_t kPieces = 2 * kCount / kGradientColumns;
  using Places = LanePlaces<Dtype, kGated>;
  const auto in_turn = [&] { return kGated && where.in_turn(); };
  const uint32_t columns = min_of(where.columns(), kPieces * kGradientColumns);
  float sum[kLaneRows] = {};
  if (columns != 0) {
    const Lane at = this_lane();
    const uint32_t own = own_staging(staging, at), first = slab_of(at) + at.lane / 8;
    uint32_t column = at.lane % 8 * kLaneColumns;
    auto left = static_cast<int32_t>(where.rows() - first);
    auto places = Places::of(where, first, column, columns);
    landing = own_staging(landing, at) + at.lane * Places::kLandingRow;
#pragma unroll
    for (uint32_t i = 0; i < Places::kLandings; ++i) places.fetch(i, landing, true);
#pragma unroll 1
    for (uint32_t piece = 0; piece * kGradientColumns < columns; ++piece, column += kGradientColumns) {
      asm("" : "+r"(left));  // else ptxas keeps, as bits, which rows exist, and spills them
      if constexpr (!Places::kInTurn) places.next_z(column + kGradientColumns, columns);
      const bool more = (piece + 1) * kGradientColumns < columns;
      stage_piece_of<0, kPieces>(piece, own, acc[0]);
      __syncwarp();
      auto z = places.template fetched<Places::kLandings - 1>(0, landing);
#pragma unroll
      for (uint32_t i = 0; i < kLaneRows; ++i) {
        const uint4 staged = load_shared16(own + staged_in_piece(at.lane / 8 + i * kLaneRowsApart, at.lane % 8));
        const float da[kLaneColumns] = {__uint_as_float(staged.x), __uint_as_float(staged.y), __uint_as_float(staged.z),
                                        __uint_as_float(staged.w)};
        const float weight = where.weight(first + i * kLaneRowsApart);
        typename Places::Inputs next = {};
        if (i + 1 < kLaneRows && !Places::kInTurn) next = places.template fetched<kLaneRows - 2>(i + 1, landing);
        float term = 0.0f;
        const auto made = [&] {
          if constexpr (!kBuild.on_input) {
            return differentiate_columns<Dtype, A>(da, z, weight, in_turn(), term, shape);
          } else {
            const uint8_t* const biases = where.biases(column);  // the lane's columns exist all or not at all
            const auto bias = [&](uint32_t n, bool up) { return where.bias(biases, n, up); };
            return differentiate_scaled_columns<Dtype, A>(da, z, weight, term, shape, bias);
          }
        }();
        const uint32_t then = (i + Places::kLandings) % kLaneRows;  // a row of this piece, or of the next
        if (then == 0 && Places::kInTurn) places.next_z(column + kGradientColumns, columns);
        places.fetch(then, landing, then > i || more);
        z = next;
        if (column < columns) {
          sum[i] += term;
          if (static_cast<int32_t>(i * kLaneRowsApart) < left) {
            if constexpr (!kBuild.on_input) {
              places.store(made, i, where);
            } else {
              const uint64_t behind = where.plain_behind();
              if (behind != 0) places.store_plain(made.times(1.0f, in_turn()), i, behind, where);
              places.store(made.times(weight, in_turn()), i, where);
            }
          }
        }
        // The copy of the next row was begun one row earlier.
        if (i + 1 < kLaneRows && Places::kInTurn) z = places.template fetched<Places::kLandings - 1>(i + 1, landing);
        __syncwarp();  // else ptxas computes rows side by side, and spills
      }
      places.next_results(in_turn());
    }
  }
  store_weight_parts(sum, where);
  store_padding<Dtype>(this_lane(), columns, in_turn(), kGated, where);
  fence_proxy_async_shared();  // the copy engine will write where pre-activations were
  named_barrier_sync(
      group_barrier(this_lane().group));  // the next task's epilogue may use the whole buffer (epilogue/features.cuh)
}

}  // namespace flashmoe::sm90

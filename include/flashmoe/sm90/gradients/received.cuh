// Passes that train among several ranks: how keepers copy the rows of other ranks' tokens, and how the gradients of
// combine weights go home (docs/training.md).
#pragma once

#include "flashmoe/actors/keeper.h"
#include "flashmoe/gpu/choice_gradient.cuh"
#include "flashmoe/gpu/copy_row.cuh"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/gradients.h"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/gradients/returned.cuh"
#include "flashmoe/sm90/machine/load.cuh"

namespace flashmoe::sm90 {

// The row of `received` for rank p's token; kNone if the forward pass did not receive that token.
__device__ __forceinline__ uint32_t received_row(const GroupArgs& g, const Call& c, uint32_t p, uint32_t token) {
  if (g.numbers == nullptr) return peer_slot(p, c.rank, c.shape.ranks) * g.pitch + token;
  const uint32_t n = token < g.pitch ? g.numbers[uint64_t{p} * g.pitch + token] : GroupArgs::kNone;
  return n < g.received_rows ? n : GroupArgs::kNone;
}

struct ReceivedRows {
  // One warp: runs keeper number `first`.
  static __device__ __forceinline__ void keep_received(const KernelArgs& args, const Call& c, Source* sources,
                                                       uint32_t first) {
    using P = Platform;
    const uint32_t bytes = c.memory.token_row_bytes;
    const bool all = run_keeper<P>(c, sources, first, [&](uint32_t p, uint32_t token) {
      const uint32_t row = received_row(args.group, c, p, token);
      if (row == GroupArgs::kNone) return;
      const uint8_t* const from = c.dispatched_row(c.rank, p, token);
      copy_row(args.group.received + uint64_t{row} * bytes, from, bytes);
      if constexpr (kIsBackward) {
        if (args.group.x_behind == 0) return;
        copy_row(args.group.x + uint64_t{row} * bytes, from + args.group.x_behind, bytes);
      }
    });
    P::sync();
    if (all && P::lane() == 0) P::fetch_add_acq_rel(&c.control()->keepers_done.value, uint64_t{1});
  }

  // Whether every keeper is done. If so, the caller has acquired their copies, and may read the received rows. One
  // warp.
  static __device__ __forceinline__ bool all_received(const Call& c) {
    using P = Platform;
    return P::broadcast(P::load_acquire(&c.control()->keepers_done.value, kDevice), 0) == c.policy.keepers;
  }
};

// For the products over an expert's rows: the code (GroupArgs::gather) of where the token's row of a tile's row lies.
// (For a token that the forward pass did not receive, it is row 0. Ranks that have kept the same call send no such
// token.)
__device__ __forceinline__ uint32_t gather_code(const GroupArgs& g, const Call& c, const Row& row) {
  if (row.source == c.rank) return row.token;
  const uint32_t n = received_row(g, c, row.source, row.token);
  return TokenRows::kRemote | (n == GroupArgs::kNone ? 0 : n);
}

// The number of a tile's first row among the experts' rows. (If a peer sends more rows than in the forward pass, a
// number may be too large; within() then gives the last row's number.)
__device__ __forceinline__ uint32_t first_row_of(const GroupArgs& g, const Call& c, uint32_t tile, uint32_t expert) {
  return g.first_row[expert] + c.tile(tile)->nth * kTileTokens;
}
__device__ __forceinline__ uint32_t within(const GroupArgs& g, uint32_t row) {
  return row < g.rows ? row : g.rows - 1;
}

// The product of a row of dY with its expert's down_bias, in float64. One warp; every lane gets it.
template <class Dtype>
__device__ __forceinline__ double multiply_bias(const KernelArgs& args, const Call& c, const Row& row,
                                                uint32_t expert) {
  using P = Platform;
  const uint32_t bytes = c.memory.token_row_bytes;
  const auto* const bias = static_cast<const uint8_t*>(args.down_bias) + uint64_t{expert} * bytes;
  const uint8_t* const dy = row.source == c.rank ? args.dy() + row.token * args.dy_row_bytes()
                                                 : c.dispatched_row(c.rank, row.source, row.token);
  double sum = 0.0;
#pragma unroll 4
  for (uint32_t at = P::lane() * 16; at < bytes; at += 512) {
    const uint4 left = load_once(dy + at), right = load_row16(bias + at);
    const uint32_t l[4] = {left.x, left.y, left.z, left.w}, r[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (uint32_t i = 0; i < 8 / Dtype::kBytes; ++i) {
      const float2 a = pair_of<Dtype>(l, i), b = pair_of<Dtype>(r, i);
      sum += double{a.x} * b.x + double{a.y} * b.y;
    }
  }
#pragma unroll
  for (uint32_t lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  return sum;
}

// Sends the gradients of combine weights of a block's share of a tile to their homes. The tasks of the tile's columns
// of dX share the rows, and each sends its rows' gradients before the return signal of its column's group. One warp.
template <class Dtype>
__device__ __forceinline__ void send_weight_gradients(const KernelArgs& args, const Call& c, uint32_t tile,
                                                      uint32_t column, const Share& share, uint32_t expert) {
  using P = Platform;
  const GroupArgs& g = args.group;
  if (!share.wide && cluster_rank() != 0) return;          // both blocks have all rows
  if (kBuild.sliced && c.shape.is_shared(expert)) return;  // its weight is no choice's
  const uint32_t parts = ceil_div(c.shape.intermediate, kTaskFeatures) * kClusterBlocks;
  const uint32_t first = first_row_of(g, c, tile, expert), step = c.policy.columns[kReturning];
  const bool biased = !kBuild.on_input && args.down_bias != nullptr;  // on_input: results have no weight
  // With a bias, all lanes work on one row. Without one, each lane has a row of its own.
  const uint32_t rows_at_once = biased ? 1 : P::kLanes, own = biased ? 0 : P::lane();
#pragma unroll 1
  for (uint32_t r = column + own * step; r < share.rows; r += rows_at_once * step) {
    const uint32_t in_tile = share.first + r;
    const Row row = *c.tile_row(tile, in_tile);
    const float* const from = args.backward.weight_parts + within(g, first + in_tile);
    float sum = 0.0f;
#pragma unroll 4
    for (uint32_t p = 0; p < parts; ++p) sum += from[uint64_t{p} * g.rows];
    if (biased) sum = static_cast<float>(sum + multiply_bias<Dtype>(args, c, row, expert));
    uint8_t* const home = c.memory.heaps[row.source] + g.weights_at;
    if (!biased || P::lane() == 0) reinterpret_cast<float*>(home + uint64_t{row.token} * g.weights_pitch)[row.k] = sum;
  }
  P::sync();
}

// At home, once all ranks have returned all groups: stores the gradients of all own choices for the caller, if it wants
// them. All warps.
__device__ __forceinline__ void collect_weight_gradients(const KernelArgs& args, const Call& c) {
  if (args.backward.combine_gradients == nullptr || !wait_for_returns(c)) return;
  const uint32_t thread = thread_anew();
  const uint32_t top_k = gate_top_k_of(c.shape), all = c.shape.tokens * top_k;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + thread; i < all; i += gridDim.x * kThreads) {
    args.backward.combine_gradients[i] = choice_gradient(args, i / top_k, i % top_k, 0);
  }
}

}  // namespace flashmoe::sm90

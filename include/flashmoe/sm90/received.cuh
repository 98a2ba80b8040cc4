// Passes that train among several ranks: rows of other ranks' tokens as they are kept, and the gradients of combine weights,
// which go home (docs/training.md).
#pragma once

#include "flashmoe/actors/keeper.h"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/gradients.h"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/load.cuh"

namespace flashmoe::sm90 {

// The row of `received` that rank p's token has; kNone if it is none that the forward pass had.
__device__ __forceinline__ uint32_t received_row(const GroupArgs& g, const Call& c, uint32_t p, uint32_t token) {
  if (g.numbers == nullptr) return peer_slot(p, c.rank, c.shape.ranks) * g.pitch + token;
  const uint32_t n = token < g.pitch ? g.numbers[uint64_t{p} * g.pitch + token] : GroupArgs::kNone;
  return n < g.received_rows ? n : GroupArgs::kNone;
}

// A row, by one warp. from may have been written while the kernel runs.
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  constexpr uint32_t kFlight = 8;
#pragma unroll 1
  for (uint32_t base = Platform::lane() * 16; base < bytes; base += kFlight * 512) {
    uint4 v[kFlight];
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) {
      if (base + i * 512 < bytes) v[i] = load_once(from + base + i * 512);
    }
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) {
      if (base + i * 512 < bytes) *reinterpret_cast<uint4*>(to + base + i * 512) = v[i];
    }
  }
}

// One warp: the `first`-th keeper.
__device__ __forceinline__ void keep_received(const KernelArgs& args, const Call& c, Source* sources, uint32_t first) {
  using P = Platform;
  const uint32_t bytes = c.memory.token_row_bytes;
  const bool all = run_keeper<P>(c, sources, first, [&](uint32_t p, uint32_t token) {
    const uint32_t row = received_row(args.group, c, p, token);
    if (row == GroupArgs::kNone) return;
    copy_row(args.group.received + uint64_t{row} * bytes, c.dispatched_row(c.rank, p, token), bytes);
  });
  P::sync();
  if (all && P::lane() == 0) P::fetch_add_acq_rel(&c.control()->met.value, uint64_t{1});
}

// Whether every keeper is done: who acquires that may read the rows. One warp.
__device__ __forceinline__ bool all_received(const Call& c) {
  using P = Platform;
  return P::broadcast(P::load_acquire(&c.control()->met.value, kDevice), 0) == c.policy.keepers;
}

// Where a row of a tile has its token's row, as BackwardArgs' products gather it. (What is not received multiplies row 0:
// ranks that have kept the same call send no such token.)
__device__ __forceinline__ uint32_t gather_code(const GroupArgs& g, const Call& c, const Row& row) {
  if (row.source == c.rank) return row.token;
  const uint32_t n = received_row(g, c, row.source, row.token);
  return TokenRows::kRemote | (n == GroupArgs::kNone ? 0 : n);
}

// The number of a tile's first row. (A tile that a peer has filled beyond what the forward pass had is at the last rows.)
__device__ __forceinline__ uint32_t first_row_of(const GroupArgs& g, const Call& c, uint32_t tile, uint32_t expert) {
  return g.first_row[expert] + c.tile(tile)->nth * kTileTokens;
}
__device__ __forceinline__ uint32_t within(const GroupArgs& g, uint32_t row) {
  return row < g.rows ? row : g.rows - 1;
}

// The gradients of combine weights of a block's share of a tile, home: before the tile's rows of group 0 are counted, and so
// before the group's return signal. One warp.
__device__ __forceinline__ void send_weight_gradients(const KernelArgs& args, const Call& c, uint32_t tile,
                                                      const Share& share, uint32_t expert) {
  using P = Platform;
  const GroupArgs& g = args.group;
  if (!share.wide && cluster_rank() != 0) return;  // both blocks have all rows
  const uint32_t parts = ceil_div(c.shape.intermediate, kTaskFeatures) * kClusterBlocks;
  const uint32_t first = first_row_of(g, c, tile, expert);
#pragma unroll 1
  for (uint32_t r = share.first + P::lane(); r < share.first + share.rows; r += P::kLanes) {
    const Row row = *c.tile_row(tile, r);
    const float* const from = args.backward.weight_parts + within(g, first + r);
    float sum = 0.0f;
#pragma unroll 4
    for (uint32_t p = 0; p < parts; ++p) sum += from[uint64_t{p} * g.rows];
    uint8_t* const home = c.memory.heaps[row.source] + g.weights_at;
    reinterpret_cast<float*>(home + uint64_t{row.token} * g.weights_pitch)[row.k] = sum;
  }
}

// At home, once all ranks have returned group 0: the gradients of all own choices, 0 where one was dropped. All warps.
__device__ __forceinline__ void collect_weight_gradients(const KernelArgs& args, const Call& c) {
  using P = Platform;
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        bool all = true;
        for (uint32_t q = P::lane(); q < c.shape.ranks && c.shape.tokens != 0; q += P::kLanes) {
          all &= Signal::epoch(P::load_acquire(c.return_signal(c.rank, q, 0), kSystem)) == c.epoch;
        }
        return P::ballot(!all) == 0 ? Step::kDone : Step::kIdle;
      },
      OsLiveness<P>{c});
  if (end != WaitEnd::kDone) return;
  P::sync();
  uint32_t thread;  // volatile, so that it is not kept along the roles
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const uint32_t top_k = c.shape.top_k, all = c.shape.tokens * top_k;
  const uint8_t* const own = c.memory.heaps[c.rank] + args.group.weights_at;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + thread; i < all; i += gridDim.x * kThreads) {
    const auto* const row = reinterpret_cast<const float*>(own + uint64_t{i / top_k} * args.group.weights_pitch);
    args.backward.weights[i] = args.backward.kept.ids[i] >= 0 ? row[i % top_k] : 0.0f;
  }
}

}  // namespace flashmoe::sm90

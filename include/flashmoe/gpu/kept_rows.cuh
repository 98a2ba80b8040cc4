// Two kernels that run after a forward pass that keeps, among several ranks. The first counts the rows of the pass
// (CountedRows). The second moves them from where the pass has left them to memory that fits them (MovedRows).
//
// The host launches both before anybody knows the number of rows. If the memory has too little room, the second kernel
// does nothing. The first tells the host three numbers for each rank. From these the host sees that there was too
// little room, and launches the second kernel again with larger memory. All other data stays on the device.
//
// Both kernels read only memory of this rank. Peers may already write there for the next call, but they write the copy
// of the other parity.
#pragma once

#include "flashmoe/gpu/copy_row.cuh"
#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/protocol/tile_former.h"

namespace flashmoe::gpu {

inline constexpr uint32_t kTileRows = 256;
inline constexpr uint32_t kMoveWarps = kMoveThreads / 32;

// The call that is over. Its epoch is 0 if it failed, or was refused: then these kernels read nothing that it has left.
__device__ __forceinline__ Call ended_call(const KernelArgs& args) {
  Call c = args.call;
  const uint64_t calls = Platform::load_relaxed(&c.control()->calls.value);
  c.epoch = calls == kNoMoreCalls || calls == Platform::load_relaxed(&c.control()->refused.value) ? 0 : calls;
  return c;
}

// ---- Counting: a block for each rank p ------------------------------------------------------------------------------

// How many local experts may have rows of rank p's tokens. Packets from other ranks have nothing for the shared
// expert.
__device__ __forceinline__ uint32_t experts_for(const Call& c, uint32_t p) {
  if constexpr (!kBuild.sliced) return c.shape.local_experts;
  return p != c.rank ? c.shape.routed_local_experts() : c.shape.local_experts;
}

// How many rows of pre-activations a row of an expert has: one, or for the shared expert one for each slice.
__device__ __forceinline__ uint32_t kept_rows_of(const CallShape& shape, uint32_t expert) {
  return kBuild.sliced && shape.is_shared(expert) ? shape.shared : 1;
}

// Counts how many rows of rank p's tokens each expert has. Returns how many rows of pre-activations all these rows
// have.
__device__ __forceinline__ uint32_t count_of_experts(const Call& c, uint32_t p, uint32_t blocks, uint32_t* to) {
  __shared__ uint32_t rows[kMaxExperts + (kBuild.sliced ? 1 : 0)], all;
  const uint32_t el = c.shape.local_experts, theirs = experts_for(c, p);
  for (uint32_t l = threadIdx.x; l < el; l += kMoveThreads) rows[l] = 0;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  // Neighbouring threads take neighbouring experts of a packet, so they read neighbouring offsets. The counts are
  // integers, so the order of the additions does not change the sums.
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < blocks * theirs; i += kMoveThreads) {
    const uint16_t* const offsets = c.packet_offsets(c.rank, p, i / theirs) + i % theirs;
    const uint32_t here = offsets[1] - offsets[0];
    if (here != 0) atomicAdd(&rows[i % theirs], here);
  }
  __syncthreads();
  for (uint32_t l = threadIdx.x; l < el; l += kMoveThreads) {
    to[l] = rows[l];
    atomicAdd(&all, rows[l] * kept_rows_of(c.shape, l));
  }
  __syncthreads();
  return all;
}

// Numbers the received rows of rank p's tokens, in the order of the tokens. Returns how many there are. Each warp has
// consecutive tokens. First, each warp counts its rows. Then each warp knows how many rows come before its first one.
__device__ __forceinline__ uint32_t number_received(const Call& c, uint32_t p, uint32_t tokens, uint32_t* to) {
  using P = Platform;
  constexpr uint32_t kFlight = 8;
  __shared__ uint32_t in_warp[kMoveWarps];
  const uint32_t warp = threadIdx.x / 32, each = align_up(ceil_div(tokens, kMoveWarps), 32u);
  const uint32_t begin = min_of(warp * each, tokens), end = min_of(begin + each, tokens);
  const auto has = [&](uint32_t t) { return t < end && *c.packet_counts(c.rank, p, t) != 0; };
  uint32_t count = 0;
  for (uint32_t base = begin; base < end; base += kFlight * 32) {
    bool there[kFlight];
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) there[i] = has(base + i * 32 + P::lane());
#pragma unroll
    for (uint32_t i = 0; i < kFlight; ++i) count += P::popcount(P::ballot(there[i]));
  }
  if (P::lane() == 0) in_warp[warp] = count;
  __syncthreads();
  uint32_t number = 0, all = 0;
  for (uint32_t w = 0; w < kMoveWarps; ++w) {
    number += w < warp ? in_warp[w] : 0;
    all += in_warp[w];
  }
  for (uint32_t base = begin; base < end; base += 32) {
    const uint32_t t = base + P::lane();
    const bool there = has(t);
    const uint32_t those = P::ballot(there);
    if (t < end) to[t] = there ? number + P::popcount(those & ((1u << P::lane()) - 1)) : GroupArgs::kNone;
    number += P::popcount(those);
  }
  return all;
}

__device__ __forceinline__ void count_rows(const KernelArgs& args, const CountedRows& to) {
  const Call c = ended_call(args);
  const uint32_t p = blockIdx.x, el = c.shape.local_experts, theirs = experts_for(c, p);
  const bool over = c.epoch != 0;
  RankRows count{over ? c.tokens_of(p) : 0, 0, 0};
  count.rows = count_of_experts(c, p, over ? c.blocks_of(p) : 0, to.rows + p * el);
  // Nobody sends rows to a rank without routed experts.
  if (p != c.rank && theirs != 0) {
    count.received = number_received(c, p, count.tokens, to.numbers + uint64_t{p} * args.group.pitch);
  }
  if (threadIdx.x == 0) to.ranks[p] = to.told[p] = count;
}

// ---- Moving ---------------------------------------------------------------------------------------------------------

// How many experts have rows to move. Each slice of the shared expert counts as an expert, behind the others, and has
// the shared expert's tiles.
__device__ __forceinline__ uint32_t moved_experts(const CallShape& s) {
  return kBuild.sliced ? s.local_experts + max_of(s.shared, 1u) - 1 : s.local_experts;
}
__device__ __forceinline__ uint32_t expert_of_moved(const CallShape& s, uint32_t moved) {
  return kBuild.sliced ? min_of(moved, s.local_experts - 1) : moved;
}

// The room that the counted rows need. All lanes of all warps get it.
__device__ __forceinline__ KeptRoom needed_room(const Call& c, const MovedRows& to) {
  static_assert(kMaxRanks == 32);  // a lane for each rank
  const uint32_t p = Platform::lane();
  const RankRows of_rank = p < c.shape.ranks ? to.counted.ranks[p] : RankRows{};
  const uint32_t received = __reduce_add_sync(~0u, of_rank.received);
  return {__reduce_add_sync(~0u, of_rank.rows), to.received != nullptr ? received : 0,
          __reduce_max_sync(~0u, of_rank.tokens)};
}

// Writes the number of each expert's first row. Run by one warp.
__device__ __forceinline__ void write_first_rows(const Call& c, const MovedRows& to) {
  const uint32_t ranks = c.shape.ranks, el = c.shape.local_experts, moved = moved_experts(c.shape);
  uint32_t before = 0;
  for (uint32_t base = 0; base <= moved; base += 32) {
    const uint32_t m = base + Platform::lane(), l = expert_of_moved(c.shape, m);
    uint32_t rows = 0;
    for (uint32_t p = 0; m < moved && p < ranks; ++p) rows += to.counted.rows[p * el + l];
    uint32_t all;
    const uint32_t first = before + Platform::exclusive_scan(rows, all);
    if (m <= moved) to.first_row[m] = first;
    before += all;
  }
}

// Moves received rows. A warp moves the rows of tokens `first`, first + step, ... of each rank.
__device__ __forceinline__ void move_received(const KernelArgs& args, const Call& c, const MovedRows& to,
                                              uint32_t first, uint32_t step) {
  const uint32_t bytes = c.memory.token_row_bytes;
  uint32_t before = 0;  // received rows of the ranks so far
  for (uint32_t p = 0; p < c.shape.ranks; before += to.counted.ranks[p++].received) {
    const uint32_t slot = p == c.rank ? 0 : peer_slot(p, c.rank, c.shape.ranks);
    for (uint32_t t = first; t < to.room.pitch; t += step) {
      uint32_t n = GroupArgs::kNone;
      if (p != c.rank && experts_for(c, p) != 0 && t < to.counted.ranks[p].tokens) {
        n = to.counted.numbers[uint64_t{p} * args.group.pitch + t];
      }
      if (n != GroupArgs::kNone) {
        n += before;
        if (to.received != nullptr) {
          copy_row(to.received + uint64_t{n} * bytes,
                   args.group.received + (uint64_t{slot} * args.group.pitch + t) * bytes, bytes);
        }
      }
      if (Platform::lane() == 0) to.numbers[uint64_t{p} * to.room.pitch + t] = n;
    }
  }
}

// Which tile has a number among all tiles. Tiles are numbered expert by expert.
struct TilePlace {
  uint32_t expert, slice;  // slice: of the shared expert; else 0
  uint32_t nth;            // which of the expert's tiles it is
};

// Finds the tile with this number; false if there is none. Run by a whole warp, all of whose lanes get the place.
__device__ __forceinline__ bool find_tile(const Call& c, uint32_t number, TilePlace& place) {
  const uint32_t moved = moved_experts(c.shape);
  uint32_t before = 0;
  for (uint32_t base = 0; base < moved; base += 32) {
    const uint32_t m = base + Platform::lane();
    const uint32_t tiles = m < moved ? *c.expert_tile_count(expert_of_moved(c.shape, m)) : 0;
    uint32_t all;
    const uint32_t first = before + Platform::exclusive_scan(tiles, all);
    if (const uint32_t those = Platform::ballot(number - first < tiles); those != 0) {
      const uint32_t lane = __ffs(those) - 1;
      const uint32_t expert = expert_of_moved(c.shape, base + lane);
      place = {expert, base + lane - expert, number - Platform::broadcast(first, lane)};
      return true;
    }
    before += all;
  }
  return false;
}

// Where the rows of one tile go. All functions are run by all threads of a block.
struct TileRows {
  uint32_t next[kMaxRanks];  // number of each source's next row
  Segment segments[kTileRows];
  uint32_t number[kTileRows];

  // Finds `next` for each source. Before that row come all rows of earlier experts and earlier slices, this expert's
  // rows of earlier sources, and this source's rows in the expert's earlier tiles.
  __device__ __forceinline__ void find_next(const Call& c, const uint32_t* rows, const TilePlace& place) {
    static_assert(kMaxRanks == 32);  // a lane for each rank
    const uint32_t el = c.shape.local_experts, warp = threadIdx.x / 32, lane = Platform::lane();
    if (warp == 0) {
      uint32_t all;
      next[lane] = Platform::exclusive_scan(lane < c.shape.ranks ? rows[lane * el + place.expert] : 0, all);
    }
    __syncthreads();
    uint32_t of_experts = 0;
    for (uint32_t i = threadIdx.x; i < c.shape.ranks * el; i += kMoveThreads) {
      of_experts += i % el < place.expert ? rows[i] : 0;
      if (kBuild.sliced && i % el == place.expert) of_experts += place.slice * rows[i];
    }
    of_experts = __reduce_add_sync(~0u, of_experts);
    atomicAdd(&next[lane], of_experts);
    for (uint32_t i = warp; i < place.nth; i += kMoveWarps) {
      const uint32_t tile = c.expert_tiles(place.expert)[i];
      for (uint32_t s = lane; s < c.tile(tile)->shape.segments; s += 32) {
        const Segment segment = c.segments(tile)[s];
        atomicAdd(&next[segment.source], segment.count);
      }
    }
  }

  // Finds `number` for each row of the tile. Each thread has a segment, and adds up the segments before it: at most
  // 255, which all threads read at the same time.
  __device__ __forceinline__ void find(const Segment* from, uint32_t count) {
    static_assert(kMoveThreads >= kTileRows);
    const uint32_t s = threadIdx.x;
    if (s < count) segments[s] = from[s];
    __syncthreads();
    if (s < count) {
      const Segment own = segments[s];
      uint32_t row = 0, first = next[own.source];
#pragma unroll 8
      for (uint32_t i = 0; i < s; ++i) {
        row += segments[i].count;
        first += segments[i].source == own.source ? segments[i].count : 0;
      }
      for (uint32_t r = 0; r < own.count; ++r) number[row + r] = first + r;
    }
    __syncthreads();
  }
};

// Moves the pre-activations of the tile with this number among all tiles; false if there is none. The rows of a
// source are in the order of its tokens, both within a tile and from one of an expert's tiles to the next.
template <class Dtype>
__device__ __forceinline__ bool move_tile(const KernelArgs& args, const Call& c, const MovedRows& to, uint32_t number) {
  __shared__ TileRows rows;  // all threads meet after they have read `number`, before the next tile's are written
  const uint32_t bytes = args.backward.z_columns * Dtype::kBytes, warp = threadIdx.x / 32;
  TilePlace place;
  if (!find_tile(c, number, place)) return false;
  rows.find_next(c, to.counted.rows, place);
  const uint32_t tile = c.expert_tiles(place.expert)[place.nth];
  const auto shape = c.tile(tile)->shape;
  rows.find(c.segments(tile), shape.segments);
  const uint32_t inner = kBuild.sliced ? c.inner_tile(tile, place.nth * kTileRows, place.slice) : tile;
  for (uint32_t r = warp; r < shape.rows; r += kMoveWarps) {
    copy_row(to.pre_activations + uint64_t{rows.number[r]} * bytes,
             args.kept.pre_activations + (uint64_t{inner} * kTileRows + r) * bytes, bytes);
  }
  return true;
}

template <class Dtype>
__device__ __forceinline__ void move_rows(const KernelArgs& args, const MovedRows& to) {
  const Call c = ended_call(args);
  if (c.epoch == 0 || !to.room.has(needed_room(c, to))) return;
  if (blockIdx.x >= to.blocks) {
    for (uint32_t number = blockIdx.x - to.blocks; move_tile<Dtype>(args, c, to, number);)
      number += gridDim.x - to.blocks;
    return;
  }
  const uint32_t warp = blockIdx.x * kMoveWarps + threadIdx.x / 32;
  if (warp == 0) write_first_rows(c, to);
  move_received(args, c, to, warp, to.blocks * kMoveWarps);
}

}  // namespace flashmoe::gpu

// Behind a forward pass that keeps, among several ranks: counts its rows, and moves them from where the pass has left them to
// memory that has room for no more than these (CountedRows, MovedRows).
//
// All they read lies in this rank's memory: what peers write there in the next call is of the other parity.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/tile_former.h"

namespace flashmoe::gpu {

inline constexpr uint32_t kTileRows = 256;

// The call that is over. Its epoch is 0 if it failed: then what it has left is not looked at.
__device__ __forceinline__ Call ended_call(const KernelArgs& args) {
  Call c = args.call;
  const uint64_t calls = Platform::load_relaxed(&c.control()->calls.value);
  c.epoch = calls == kNoMoreCalls ? 0 : calls;
  return c;
}

// A block for each rank p.
__device__ __forceinline__ void count_rows(const KernelArgs& args, const CountedRows& to) {
  using P = Platform;
  constexpr uint32_t kWarpsOfBlock = kMoveThreads / 32;
  const Call c = ended_call(args);
  const uint32_t p = blockIdx.x, el = c.shape.local_experts, warp = threadIdx.x / 32;
  const uint32_t tokens = c.epoch == 0 ? 0 : c.tokens_of(p), blocks = c.epoch == 0 ? 0 : c.blocks_of(p);
  for (uint32_t l = threadIdx.x; l < el; l += kMoveThreads) {
    uint32_t rows = 0;
#pragma unroll 8
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint16_t* const offsets = c.packet_offsets(c.rank, p, b);
      rows += offsets[l + 1] - offsets[l];
    }
    to.rows[p * el + l] = rows;
  }
  __shared__ uint32_t in_warp[kWarpsOfBlock];
  uint32_t before = 0;  // of the tokens so far
  for (uint32_t base = 0; base < tokens && p != c.rank; base += kMoveThreads) {
    const uint32_t t = base + threadIdx.x;
    const bool has = el != 0 && t < tokens && *c.packet_counts(c.rank, p, t) != 0;
    const uint32_t those = P::ballot(has);
    if (P::lane() == 0) in_warp[warp] = P::popcount(those);
    __syncthreads();
    uint32_t number = before + P::popcount(those & ((1u << P::lane()) - 1));
    for (uint32_t w = 0; w < kWarpsOfBlock; ++w) {
      number += w < warp ? in_warp[w] : 0;
      before += in_warp[w];
    }
    if (t < tokens) to.numbers[uint64_t{p} * args.group.pitch + t] = has ? number : GroupArgs::kNone;
    __syncthreads();
  }
  if (threadIdx.x == 0) to.tokens[p] = tokens, to.received[p] = before;
}

// A row, by one warp.
__device__ __forceinline__ void move_row(uint8_t* to, const uint8_t* from, uint32_t bytes) {
#pragma unroll 4
  for (uint32_t at = Platform::lane() * 16; at < bytes; at += 512) {
    *reinterpret_cast<uint4*>(to + at) = load_once(from + at);
  }
}

// Received rows, by warps `first`, first + step, ... of all tokens.
__device__ __forceinline__ void move_received(const KernelArgs& args, const Call& c, const MovedRows& to,
                                              uint32_t pitch, uint32_t first, uint32_t step) {
  const uint32_t bytes = c.memory.token_row_bytes;
  uint32_t before = 0;  // of the ranks so far
  for (uint32_t p = 0; p < c.shape.ranks; before += to.counted.received[p++]) {
    const uint32_t slot = p == c.rank ? 0 : peer_slot(p, c.rank, c.shape.ranks);
    for (uint32_t t = first; t < pitch; t += step) {
      uint32_t n = GroupArgs::kNone;
      if (p != c.rank && t < to.counted.tokens[p]) n = to.counted.numbers[uint64_t{p} * args.group.pitch + t];
      if (n != GroupArgs::kNone) {
        n += before;
        if (to.received != nullptr) {
          move_row(to.received + uint64_t{n} * bytes,
                   args.group.received + (uint64_t{slot} * args.group.pitch + t) * bytes, bytes);
        }
      }
      if (Platform::lane() == 0) to.numbers[uint64_t{p} * pitch + t] = n;
    }
  }
}

// Where a tile's rows go: all threads of a block, of which the first has `next`, the number of each source's next row.
struct TileRows {
  Segment segments[kTileRows];               // none is empty
  uint32_t first[kTileRows], at[kTileRows];  // of each segment: its first row's number, and which of the tile's it is
  uint32_t number[kTileRows];

  __device__ __forceinline__ void find(const Segment* from, uint32_t count, uint32_t (&next)[kMaxRanks]) {
    const uint32_t s = threadIdx.x;
    if (s < count) segments[s] = from[s];
    __syncthreads();
    if (s == 0) {
      uint32_t row = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const Segment segment = segments[i];
        first[i] = next[segment.source], at[i] = row;
        next[segment.source] += segment.count, row += segment.count;
      }
    }
    __syncthreads();
    if (s < count) {
      for (uint32_t r = 0; r < segments[s].count; ++r) number[at[s] + r] = first[s] + r;
    }
    __syncthreads();
  }
};

// An expert's rows, by blocks `part` of `parts`: all follow its tiles, in whose segments a source's rows are in the order of its
// tokens, and each moves some. Segments have a few rows each; so a tile's are read at once, and no row waits for one.
template <class Dtype>
__device__ __forceinline__ void move_expert(const KernelArgs& args, const Call& c, const MovedRows& to, uint32_t l,
                                            uint32_t part, uint32_t parts) {
  static_assert(kMoveThreads >= kTileRows);
  __shared__ uint32_t next[kMaxRanks];
  __shared__ TileRows rows;
  const uint32_t ranks = c.shape.ranks, el = c.shape.local_experts, bytes = args.backward.z_columns * Dtype::kBytes;
  if (threadIdx.x == 0) {
    uint32_t row = to.first_row[l];
    for (uint32_t p = 0; p < ranks; ++p) {
      next[p] = row;
      row += to.counted.rows[p * el + l];
    }
  }
  const uint32_t warp = threadIdx.x / 32 + part * (kMoveThreads / 32), warps = parts * (kMoveThreads / 32);
  const uint32_t tiles = c.expert_state(l)->tiles;
  uint32_t before = 0;  // of the expert's rows, those in earlier tiles
  for (uint32_t i = 0; i < tiles; ++i) {
    const uint32_t tile = c.expert_tiles(l)[i];
    const auto shape = c.tile(tile)->shape;
    rows.find(c.segments(tile), shape.segments, next);
    for (uint32_t r = (warp + warps - before % warps) % warps; r < shape.rows; r += warps) {
      const uint64_t from = uint64_t{tile} * kTileRows + r;
      move_row(to.pre_activations + uint64_t{rows.number[r]} * bytes, args.keep.pre_activations + from * bytes, bytes);
    }
    before += shape.rows;
  }
}

// `parts` blocks for each local expert, and behind them blocks for received rows.
template <class Dtype>
__device__ __forceinline__ void move_rows(const KernelArgs& args, const MovedRows& to, uint32_t pitch, uint32_t parts) {
  const Call c = ended_call(args);
  if (c.epoch == 0) return;
  const uint32_t of_experts = c.shape.local_experts * parts;
  if (blockIdx.x < of_experts) return move_expert<Dtype>(args, c, to, blockIdx.x / parts, blockIdx.x % parts, parts);
  constexpr uint32_t kWarpsOfBlock = kMoveThreads / 32;
  move_received(args, c, to, pitch, (blockIdx.x - of_experts) * kWarpsOfBlock + threadIdx.x / 32,
                (gridDim.x - of_experts) * kWarpsOfBlock);
}

}  // namespace flashmoe::gpu

// Products of an expert's rows: tasks that contract over Axis::kRows, of an expert and kTaskFeatures columns of tokens.
//
//   kept[I, H] = sum over the expert's rows r of intermediate[r]^T x[r]
//
// The product contracts over the rows of both operands and keeps their columns: in wgmma's words they are MN-major,
// which it takes of 16-bit types alone. A stage has kStageRows rows of both:
//   tokens        at 0       4 spans of 64 columns, the task's 256 columns of H
//   intermediate  at 32 KiB  2 spans of 64 columns of I, one for each consumer warpgroup
// each span with its rows 128 bytes apart, swizzled as everywhere. A task takes 256 columns of I at a time ("a pass"):
// the cluster's first block the lower 128, the second the upper. The blocks share no loads, but keep the same pace. A
// pass goes over the expert's tiles in the order in which they closed, and over their rows. Both loader warps gather
// the rows by cp.async; rows beyond a tile's end are zeros, of both operands, since what lies there may be no number.
#pragma once

#include "flashmoe/sm90/load.cuh"
#include "flashmoe/sm90/wgmma.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kStageRows = kSpanRows;
inline constexpr uint32_t kTokenSpans = kTaskFeatures * 2 / kRowBytes, kIntermediateSpans = kConsumers;
inline constexpr uint32_t kIntermediateAt = kTokenSpans * kSpanBytes;
static_assert(kIntermediateAt + kIntermediateSpans * kSpanBytes == kStageBytes);

// Columns of I that a block has in a pass, and how many passes there are.
inline constexpr uint32_t kBlockColumns = kIntermediateSpans * kRowBytes / 2;
FLASHMOE_HD uint32_t column_passes(const Call& c) {
  return ceil_div(c.shape.intermediate, kClusterBlocks * kBlockColumns);
}
// The block's first column of a pass.
__device__ __forceinline__ uint32_t first_of_pass(uint32_t pass) {
  return (pass * kClusterBlocks + cluster_rank()) * kBlockColumns;
}

// Stages of a pass: at least one, of zeros where the expert has no rows. One warp.
template <class P>
__device__ __forceinline__ uint32_t stages_of_expert(const Call& c, uint32_t expert) {
  const uint32_t* const tiles = c.expert_tiles(expert);
  const uint32_t n = c.expert_state(expert)->tiles;
  uint32_t mine = 0, all;
  for (uint32_t i = P::lane(); i < n; i += P::kLanes) mine += ceil_div(c.tile(tiles[i])->shape.rows, kStageRows);
  P::exclusive_scan(mine, all);
  return max_of(all, 1u);
}

// All stages of a task. All loader threads; the first calls count() with each. row_of(row): where a tile's row of tokens lies.
template <class Dtype, class RowOf, class Count>
__device__ __forceinline__ void gather_expert(Pipeline& ring, const Call& c, uint32_t expert, uint32_t first_column,
                                              RowOf&& row_of, Count&& count) {
  static_assert(Dtype::kBytes == 2);
  constexpr uint32_t kRowsApart = kLoaders / 8;
  const uint32_t thread = loader_thread();
  const uint32_t chunk = thread % 8, first = thread / 8, column = chunk * (16 / Dtype::kBytes);
  const uint32_t slot = first * kRowBytes + (chunk ^ first % 8) * 16;
  const uint32_t* const tiles = c.expert_tiles(expert);
  const uint32_t n = c.expert_state(expert)->tiles;
  const uint8_t* const somewhere = c.intermediate_row(0, 0);  // a valid address, of which nothing is read
  // Loads `spans` spans of a row of `columns` columns, from column `at` on; null: zeros.
  auto load = [&](uint32_t to, const uint8_t* row, uint32_t spans, uint32_t at, uint32_t columns) {
    for (uint32_t s = 0; s < spans; ++s) {
      const uint32_t from = at + s * kSpanColumns + column;
      const bool valid = row != nullptr && from < columns;
      cp_async16_or_zero(to + s * kSpanBytes, valid ? row + from * Dtype::kBytes : somewhere, valid ? 16 : 0);
    }
  };
  // One stage: rows base, base + 1, ... of a tile that has `rows`.
  auto fill = [&](uint32_t tile, uint32_t base, uint32_t rows, uint32_t first_row) {
    wait(ring.empty(), ring.parity);
    if (thread == 0) {
      arrive(ring.full());
      count();
    }
#pragma unroll 1
    for (uint32_t r = first; r < kStageRows; r += kRowsApart) {
      const bool exists = base + r < rows;
      const uint32_t to = ring.data() + slot + (r - first) * kRowBytes;
      load(to, exists ? row_of(*c.tile_row(tile, base + r)) : nullptr, kTokenSpans, first_column, c.shape.hidden);
      load(to + kIntermediateAt, exists ? c.intermediate_row(tile, base + r) : nullptr, kIntermediateSpans, first_row,
           c.shape.intermediate);
    }
    cp_async_arrive_noinc(ring.full());
    ring.advance();
  };
#pragma unroll 1
  for (uint32_t pass = 0; pass < column_passes(c); ++pass) {
    uint32_t t = 0;
#pragma unroll 1
    do {
      const uint32_t tile = n == 0 ? 0 : tiles[t], rows = n == 0 ? 0 : c.tile(tile)->shape.rows;
      uint32_t base = 0;
#pragma unroll 1
      do {
        fill(tile, base, rows, first_of_pass(pass));
        base += kStageRows;
      } while (base < rows);
    } while (++t < n);
  }
}

namespace detail {

// As multiply_stage().
template <class Dtype, bool kFirst>
__device__ __forceinline__ void multiply_rows_of_stage(const Pipeline& ring, uint64_t a, uint64_t b,
                                                       float (&acc)[128]) {
  constexpr uint32_t kStep = kWgmmaBytes / Dtype::kBytes * kRowBytes;  // 16 rows: a wgmma's K
  wait(ring.full(), ring.parity);
  fence_proxy_async_shared();  // cp.async writes through the generic proxy
  wgmma_fence();
  const uint64_t stage = descriptor_step(ring.stage * Pipeline::kBytes);
#pragma unroll
  for (uint32_t k = 0; k < kSpanBytes; k += kStep) {
    Wgmma<Dtype, 256, Major::kMn, Major::kMn>::issue(acc, a + stage + descriptor_step(k),
                                                     b + stage + descriptor_step(k), !kFirst || k != 0);
  }
  wgmma_commit();
}

}  // namespace detail

// acc = the sum over the rows of `stages` stages, for the warpgroup's 64 columns of I and the task's 256 of H.
template <class Dtype>
__device__ __forceinline__ void multiply_rows(Pipeline& ring, uint32_t group, uint32_t stages, float (&acc)[128]) {
  const uint64_t a = mn_major_descriptor<kSpanBytes>(ring.stages + kIntermediateAt + group * kSpanBytes);
  const uint64_t b = mn_major_descriptor<kSpanBytes>(ring.stages);
  detail::multiply_rows_of_stage<Dtype, true>(ring, a, b, acc);
  uint32_t in_flight = ring.empty();
  ring.advance();
#pragma unroll 1
  for (uint32_t s = 1; s < stages; ++s) {
    detail::multiply_rows_of_stage<Dtype, false>(ring, a, b, acc);
    wgmma_wait<1>();
    release_stage<Dtype, Wide>(in_flight);
    in_flight = ring.empty();
    ring.advance();
  }
  wgmma_wait<0>();
  pin_accumulators(acc);
  release_stage<Dtype, Wide>(in_flight);
}

}  // namespace flashmoe::sm90

// Consumer warpgroups quantise the results of products in e4m3 (Epilogue::kActivate), and store them.
//
// A warp has all columns of 16 rows, so it has all 128 columns that share a scale. Four lanes share a row, and each has
// 32 of these columns. (In small tiles with a gate, a warp has 64 of the 128 columns; see stage_quantised().) Elements
// are stored as other results are (epilogue/rows.cuh): 128 elements of a row are one line.
#pragma once

#include "flashmoe/gpu/quantise.cuh"
#include "flashmoe/sm90/epilogue/rows.cuh"

namespace flashmoe::sm90 {

namespace detail {

// Quantises and stages one block of 128 columns of the warp's rows. The results are v(g, h, i): of the g-th 8 columns,
// the i-th that the lane has in row h of its two rows. `largest`: the largest magnitudes of these results in each row.
// If kColumns is 64, this is half a block, and the other warpgroup has the other half; the warpgroups then exchange
// their rows' largest magnitudes through `halves`. Returns the scales of the lane's two rows.
template <class Dtype, uint32_t kColumns, class Value>
__device__ __forceinline__ float2 stage_quantised(uint32_t own, const Lane& at, float (&largest)[2],
                                                  float (*halves)[64], Value v) {
  float scale[2];
  Piece<Dtype> piece;
  constexpr uint32_t kChunks = kColumns / 16;  // of 16 bytes
  static_assert(Piece<Dtype>::kGroups * 16 == kScaleBlock);
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 2));
  }
  if constexpr (kColumns != kScaleBlock) {
    const uint32_t r = at.warp * kWarpRows + at.row();
    if (at.lane % 4 == 0) halves[at.group][r] = largest[0], halves[at.group][r + 8] = largest[1];
    named_barrier_sync(kConsumersBarrier, kConsumers * kWarpgroup);
    largest[0] = fmaxf(largest[0], halves[1 - at.group][r]);
    largest[1] = fmaxf(largest[1], halves[1 - at.group][r + 8]);
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    scale[h] = scale_of(largest[h]);
    const float inverse = __frcp_rn(scale[h]);
#pragma unroll
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t g = 2 * chunk;
      const uint32_t word =
          pack_e4m3(v(g, h, 0), v(g, h, 1), inverse) | pack_e4m3(v(g + 1, h, 0), v(g + 1, h, 1), inverse) << 16;
      piece.word[chunk][h][0] = neighbours(at, word);
    }
  }
  stage_piece<Dtype, kChunks>(own, at, piece);
  return {scale[0], scale[1]};
}

}  // namespace detail

// As store_activated_rows(), but quantised. `tile`: the tile's rows, of which row number first_row is the first of the
// block's share. With kCount 64, the warpgroup has half of the task's columns, and `halves` is where the two warpgroups
// exchange magnitudes.
template <class Dtype, Activation A, uint32_t kCount>
__device__ __forceinline__ void store_quantised_rows(uint32_t staging, const Lane& at, float (&acc)[1][kCount],
                                                     const void* bias, uint32_t rows, uint32_t first_column,
                                                     uint32_t intermediate, uint8_t* tile, uint32_t first_row,
                                                     GatedRows gated, const ClampedShape& shape, float (*halves)[64]) {
  using namespace detail;
  constexpr bool kGated = is_gated(A);
  constexpr uint32_t kApart = kGated ? 8 : 4;  // a lane's accumulators for 8 columns of results
  constexpr uint32_t kAll = kCount / kApart * 8, kColumns = min_of(kAll, kScaleBlock), kBlocks = kAll / kColumns;
  const uint32_t own = own_staging(staging, at);
  add_bias<Dtype, kGated ? Columns::kGroups : Columns::kResults>(acc[0], own, bias, at, first_column, intermediate,
                                                                 gated);
  const uint32_t row = at.tokens * 64 + at.warp * kWarpRows;
  const uint32_t chunk = at.lane % 8;
#pragma unroll 1
  for (uint32_t b = 0; b < kBlocks; ++b) {
    if (kColumns == kScaleBlock && first_column + b * kScaleBlock >= intermediate)
      break;  // not with half a block: the other warpgroup waits for this one
    const uint32_t column = first_column + b * kScaleBlock;
    float largest[2] = {};
#pragma unroll
    for (uint32_t g = 0; g < kColumns / 8; ++g) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        float* const v = &acc[0][g * kApart + 2 * h];
        activate_pair<Dtype, A>(v[0], v[1], shape);
        if constexpr (kGated) v[0] *= shaped_up<A>(v[4], shape), v[1] *= shaped_up<A>(v[5], shape);
        largest[h] = larger(larger(largest[h], v[0]), v[1]);
      }
    }
    const float2 scale = stage_quantised<Dtype, kColumns>(
        own, at, largest, halves, [&](uint32_t g, uint32_t h, uint32_t i) { return acc[0][g * kApart + 2 * h + i]; });
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kPieceStores; ++i) {
      const uint32_t r = at.lane / 8 + i * (kWarpRows / kPieceStores);
      const uint4 piece = load_shared16(own + staged_in_piece(r, chunk));
      if (row + r >= rows || chunk * 16 >= kColumns || column + chunk * 16 >= intermediate) continue;
      store_global16(tile + (first_row + row + r) * quantised_pitch(intermediate) + column + chunk * 16, piece);
    }
    auto* const scales = reinterpret_cast<float*>(
        tile + quantised_scale(intermediate, column / kScaleBlock, first_row + row + at.row()));
    const bool stores = at.lane % 4 == 0 && (kColumns == kScaleBlock || at.group == 0);
    if (stores && row + at.row() < rows) scales[0] = scale.x;
    if (stores && row + at.row() + 8 < rows) scales[8] = scale.y;
    __syncwarp();                 // the staging buffer has been read
    if constexpr (kBlocks > 1) {  // so that the same code handles the next block
#pragma unroll
      for (uint32_t i = 0; i < 64; ++i) acc[0][i] = acc[0][i + 64];
    }
  }
}

}  // namespace flashmoe::sm90

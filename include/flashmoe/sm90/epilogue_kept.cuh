// Consumer warpgroups: Epilogue::kKeep, sums in fp32 to the expert's matrix, which stays on this rank.
#pragma once

#include "flashmoe/sm90/epilogue.cuh"

namespace flashmoe::sm90 {

// Stores accumulators of 64 rows by 256 columns to the matrix [rows, columns] at `to`, from (first_row, first_column)
// on and as far as it goes. `columns` is even.
__device__ __forceinline__ void store_kept(const Lane& at, const float (&acc)[128], float* to, uint32_t first_row,
                                           uint32_t rows, uint32_t first_column, uint32_t columns) {
  const uint32_t row = first_row + at.warp * 16 + at.row(), column = first_column + at.token();
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    if (row + 8 * h >= rows) break;
    float* const line = to + uint64_t{row + 8 * h} * columns;
#pragma unroll
    for (uint32_t j = 0; j < 32; ++j) {
      if (column + 8 * j >= columns) break;
      *reinterpret_cast<float2*>(line + column + 8 * j) = {acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]};
    }
  }
}

}  // namespace flashmoe::sm90

// GEMM of a tile's rows with an expert's weights, through the BLAS, with bits that do not depend on the row's place.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"

namespace flashmoe::cpu {

// Rows a tile may have at most.
inline constexpr uint32_t kMaxTileRows = 1024;

// out[rows, n] = a[rows, k] * w[n, k]^T, all accumulation in fp32. `a` has room for padded_rows(rows, n, k) rows,
// whose surplus is ignored; so has `out`. w is of type t with rows w_stride elements apart. Single-threaded.
// `wide` holds w in fp32 where t is narrower.
void gemm(float* out, const float* a, uint32_t rows, const void* w, uint64_t w_stride, DType t, uint32_t n, uint32_t k,
          std::vector<float>& wide);

// `rows` rounded up to what gemm computes for this shape.
//
// A row of a tile must come out the same whatever its place in the tile and however many rows the tile has, or the
// result would depend on timing. BLAS libraries promise no such thing. So a shape (n, k) is probed once, on random
// data: the granularity is the smallest g for which every multiple of g rows, in every place, gives each row the same
// bits. That is 8 or 16 for OpenBLAS's AVX2 kernels; if nothing holds, every row is computed alone.
uint32_t padded_rows(uint32_t rows, uint32_t n, uint32_t k);

}  // namespace flashmoe::cpu

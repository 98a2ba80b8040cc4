// Multiplies a tile's rows by an expert's weights through the BLAS. The bits of a row do not depend on the row's place.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"

namespace flashmoe::cpu {

// The most rows that a tile may have.
inline constexpr uint32_t kMaxTileRows = 1024;

// Buffers of a caller of gemm(). They grow as needed.
struct GemmBuffers {
  std::vector<float> weights;  // w in fp32, if its type is narrower
  std::vector<float> piece;    // results of one BLAS call, transposed
};

// How the right operand lies in memory: each row of its matrix is a column of the result (kResults), or a row of the
// contraction (kContraction).
enum class Rows : uint32_t { kResults, kContraction };

// out[rows, n] = a[rows, k] * w[n, k]^T, or * w[k, n] with Rows::kContraction; all accumulation in fp32. `a` has room
// for padded_rows(rows, n, k) rows; the rows beyond `rows` may hold anything. w is of type t; its rows are w_stride
// elements apart. Single-threaded.
void gemm(float* out, const float* a, uint32_t rows, const void* w, uint64_t w_stride, DType t, uint32_t n, uint32_t k,
          GemmBuffers& buffers, Rows of = Rows::kResults);

// sum[n, columns] += a[rows, n]^T * b[rows, columns], in fp32, by one call of the BLAS. Single-threaded.
void add_outer(float* sum, const float* a, uint32_t n, const float* b, uint32_t columns, uint32_t rows);

// How many rows of `a` gemm() reads for this shape: `rows`, rounded up.
//
// A row of a tile must come out the same whatever its place in the tile, and however many rows the tile has. Otherwise
// the result would depend on timing. BLAS libraries do not promise this: OpenBLAS's AVX2 kernel adds up the products of
// rows 6 to 11 of every 12 in another order than those of rows 0 to 5. So each shape (n, k) is probed once, on random
// data, for the sizes of calls that treat all places alike. If the library allows it, these are any multiple of 16
// rows; else calls of exactly 16, 8, 4, 2 or 1 rows. (With the AVX2 kernel exactly 16, at about half the speed of calls
// of 128.)
uint32_t padded_rows(uint32_t rows, uint32_t n, uint32_t k, Rows of = Rows::kResults);

}  // namespace flashmoe::cpu

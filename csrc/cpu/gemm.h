// GEMM of a tile's rows with an expert's weights, through the BLAS, with bits that do not depend on the row's place.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"

namespace flashmoe::cpu {

// Rows a tile may have at most.
inline constexpr uint32_t kMaxTileRows = 1024;

// Buffers of a caller of gemm, grown as needed.
struct GemmBuffers {
  std::vector<float> weights;  // w in fp32 where its type is narrower
  std::vector<float> piece;    // results of one BLAS call, transposed
};

// How the right operand lies in memory: the rows of its matrix are columns of the result, or rows of the contraction.
enum class Rows : uint32_t { kResults, kContraction };

// out[rows, n] = a[rows, k] * w[n, k]^T, or * w[k, n] with Rows::kContraction; all accumulation in fp32. `a` has room for
// padded_rows(rows, n, k) rows, whose surplus may hold anything. w is of type t with rows w_stride elements apart.
// Single-threaded.
void gemm(float* out, const float* a, uint32_t rows, const void* w, uint64_t w_stride, DType t, uint32_t n, uint32_t k,
          GemmBuffers& buffers, Rows of = Rows::kResults);

// sum[n, columns] += a[rows, n]^T * b[rows, columns], in fp32, by one call of the BLAS. Single-threaded.
void add_outer(float* sum, const float* a, uint32_t n, const float* b, uint32_t columns, uint32_t rows);

// `rows` rounded up to what gemm reads of `a` for this shape.
//
// A row of a tile must come out the same whatever its place in the tile and however many rows the tile has, or the
// result would depend on timing. BLAS libraries promise no such thing: OpenBLAS's AVX2 kernel adds up the products of
// rows 6 to 11 of every 12 in another order than those of rows 0 to 5. So each shape (n, k) is probed once, on random
// data, for the call sizes that treat all places alike: any multiple of 16 rows if the library is that kind, else calls
// of exactly 16, 8, 4, 2 or 1 rows. (Exactly 16 for the AVX2 kernel, at about half the speed of calls of 128.)
uint32_t padded_rows(uint32_t rows, uint32_t n, uint32_t k, Rows of = Rows::kResults);

}  // namespace flashmoe::cpu

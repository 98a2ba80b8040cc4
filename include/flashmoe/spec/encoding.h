// For every element type: how its elements are stored, and which elements of a matrix share a scale. Python has the
// quantised types of this table in flashmoe.spec.ENCODINGS, and the bytes of other types' elements in ELEMENT_BYTES.
#pragma once

#include <cstdint>

#include "flashmoe/spec/enums.h"
#include "flashmoe/spec/rows.h"

namespace flashmoe {

struct Encoding {
  uint32_t bits;                       // of an element
  uint32_t scale_bytes;                // of one scale of a matrix; 0: matrices of this type have no scales
  uint32_t block_rows, block_columns;  // of a matrix's block, where each block has a scale (WeightScales::kBlock)
};

// kMxFp4 is MXFP4 of the OCP Microscaling Formats: elements are e2m1, two in a byte, the first in the low 4 bits; a
// scale is e8m0.
constexpr Encoding encoding_of(DType t) {
  switch (t) {
    case DType::kFloat32: return {32, 0, 1, 1};
    case DType::kBFloat16:
    case DType::kFloat16: return {16, 0, 1, 1};
    case DType::kFloat8E4M3: return {8, 4, kScaleBlock, kScaleBlock};
    case DType::kMxFp4: return {4, 1, 1, 32};
  }
  return {};
}

// Whether matrices of that type have scales.
constexpr bool has_scales(DType t) {
  return encoding_of(t).scale_bytes != 0;
}
// Bytes of n elements. For kMxFp4, n must be even, because a byte has two elements.
constexpr uint64_t stored_bytes(DType t, uint64_t n) {
  return n * encoding_of(t).bits / 8;
}

}  // namespace flashmoe

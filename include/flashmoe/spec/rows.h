// The bytes of rows as they are stored and sent: one definition for host, device and peers.
//
// A row in float32, bfloat16 or float16 has only its elements. A row in e4m3 is quantised: behind its elements, from
// the next multiple of 16 bytes on, it has scales in fp32, one for each 128 elements (the last may be for fewer). A
// number of the row is an element times its scale. The row's bytes are a multiple of 16, as bulk copies need.
#pragma once

#include <cstdint>

#include "flashmoe/spec/markers.h"

namespace flashmoe {

// The number of elements of a row that share a scale. A block of e4m3 weights has this number of rows and of columns.
inline constexpr uint32_t kScaleBlock = 128;
inline constexpr uint32_t kRowAlign = 16;
inline constexpr float kLargestE4M3 = 448.0f;
// The least scale of a row's elements; elements that are all zero have it. (It is the smallest normal number, so its
// reciprocal is finite.)
inline constexpr float kLeastScale = 0x1p-126f;

// Of the types that rows have, only e4m3 has elements of one byte.
FLASHMOE_HD constexpr bool is_quantised(uint32_t elem_bytes) {
  return elem_bytes == 1;
}
FLASHMOE_HD constexpr uint32_t scale_blocks(uint32_t elements) {
  return (elements + kScaleBlock - 1) / kScaleBlock;
}
// Where the scales of a quantised row begin.
FLASHMOE_HD constexpr uint32_t scales_offset(uint32_t elements) {
  return (elements + kRowAlign - 1) / kRowAlign * kRowAlign;
}
FLASHMOE_HD constexpr uint32_t row_bytes(uint32_t elements, uint32_t elem_bytes) {
  if (!is_quantised(elem_bytes)) return elements * elem_bytes;
  return scales_offset(elements) + (scale_blocks(elements) * 4 + kRowAlign - 1) / kRowAlign * kRowAlign;
}

}  // namespace flashmoe

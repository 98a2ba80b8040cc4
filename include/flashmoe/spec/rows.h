// The bytes of rows as they are stored and sent: one definition for host, device and peers.
//
// A row of float32, bfloat16 or float16 is its elements. A row of e4m3 is quantised: behind its elements, from the next
// multiple of 16 bytes on, it has a scale in fp32 for each 128 of them, by which they are multiplied; the last one may
// be of fewer. It ends at a multiple of 16 bytes, as bulk copies need.
#pragma once

#include <cstdint>

#include "flashmoe/spec/markers.h"

namespace flashmoe {

// Elements of a row, and rows and columns of a block of weights, that share a scale.
inline constexpr uint32_t kScaleBlock = 128;
inline constexpr uint32_t kRowAlign = 16;
inline constexpr float kLargestE4M3 = 448.0f;
// The least scale of a row's elements: that of zeros, too. (The smallest normal number, whose reciprocal is finite.)
inline constexpr float kLeastScale = 0x1p-126f;

// Only e4m3 has elements of one byte.
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

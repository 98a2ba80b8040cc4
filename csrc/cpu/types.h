// The CPU engine's arithmetic on elements of tensors: conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float half_to_float(uint16_t h);
uint16_t float_to_half(float f);

// e4m3 (float8_e4m3fn) has no infinity, and one NaN of each sign. Rounds to nearest, ties to even; a magnitude beyond
// 448 becomes 448. NaN becomes 0x7f whatever its sign, as in a GPU's conversion.
float e4m3_to_float(uint8_t e);
uint8_t float_to_e4m3(float f);

// A scale of mxfp4, 2^(e - 127); 0xff is NaN.
float e8m0_to_float(uint8_t e);

// Converts n elements of type t to fp32. With mxfp4 the scales are not applied; the functions below do not take mxfp4.
void widen(float* to, const void* from, DType t, uint64_t n);
// The same for every step-th element.
void widen_every(float* to, const void* from, DType t, uint64_t n, uint64_t step);
// Converts n fp32 values, times scale, to type t; rounds to nearest even.
void narrow(void* to, const float* from, DType t, uint64_t n, float scale = 1.0f);
// v[i] rounded to type t.
void round_to(float* v, DType t, uint64_t n);
// Converts n values to elements of a quantised row (spec/rows.h). Each 128 values have a scale: the largest magnitude /
// 448, but no less than kLeastScale. An element is e4m3(value * (1 / scale)), all in fp32. NaN stays NaN, and does not
// count for a scale. If a value is infinite, the scale is infinite; the infinite value then becomes NaN, and finite
// values become 0.
void quantise(uint8_t* elements, float* scales, const float* values, uint32_t n);
// acc[i] += from[i]
void accumulate(float* acc, const void* from, DType t, uint64_t n);

}  // namespace flashmoe::cpu

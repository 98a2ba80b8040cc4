#include "cpu/types.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "flashmoe/spec/rows.h"

namespace flashmoe::cpu {

// Uses integer operations and one multiplication in float. For _Float16 the compiler would call a library routine per
// element on machines without F16C, and use other instructions on machines with it. The loops that call this function
// vectorise on every machine.
float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  // Place exponent and mantissa, then correct the bias by an exact multiplication, which also handles subnormals.
  uint32_t bits = magnitude << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  std::memcpy(&bits, &f, 4);
  if (magnitude >= 0x7c00u) bits |= 0x7f800000u;  // infinity and NaN
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) {  // 2^16 and above, infinity, NaN
    const bool nan = bits > 0x7f800000u;
    return static_cast<uint16_t>(sign | (nan ? 0x7e00u : 0x7c00u));
  }
  if (bits < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 lets the FPU round at the subnormal's last bit
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);  // rebias the exponent (-112), round to nearest even
  return static_cast<uint16_t>(sign | (bits >> 13));
}

uint8_t float_to_e4m3(float f) {
  uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 24 & 0x80u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7f;
  if (bits >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7e);  // 448 and above, infinity
  if (bits < 0x3c800000u) {  // below 2^-6: subnormal; adding 2^14 lets the FPU round at the last bit, 2^-9
    const float magnitude = std::bit_cast<float>(bits) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(magnitude) - 0x46800000u));
  }
  bits += 0xc407ffffu + (bits >> 20 & 1u);  // rebias the exponent (-120), round to nearest even
  return static_cast<uint8_t>(sign | bits >> 20);
}

namespace {

constexpr float value_of_e4m3(uint32_t e) {
  const uint32_t exponent = e >> 3 & 15u, fraction = e & 7u;
  float v = exponent == 0 ? static_cast<float>(fraction) : static_cast<float>(8 + fraction);
  for (uint32_t i = exponent == 0 ? 1 : exponent; i > 1; --i) v *= 2.0f;
  v *= 0x1p-9f;
  if ((e & 0x7fu) == 0x7fu) v = std::numeric_limits<float>::quiet_NaN();
  return (e & 0x80u) != 0 ? -v : v;
}

constexpr auto kE4M3 = [] {
  std::array<float, 256> values{};
  for (uint32_t e = 0; e < values.size(); ++e) values[e] = value_of_e4m3(e);
  return values;
}();

// The two elements of mxfp4 in each byte; the first is in the low bits. Up to 2 the values of e2m1 are 0.5 apart, up to
// 4 they are 1 apart, then 2.
constexpr auto kE2M1Pairs = [] {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const auto value = [&](uint32_t e) { return (e & 8u) != 0 ? -kMagnitudes[e & 7u] : kMagnitudes[e & 7u]; };
  std::array<std::array<float, 2>, 256> pairs{};
  for (uint32_t byte = 0; byte < pairs.size(); ++byte) pairs[byte] = {value(byte & 15u), value(byte >> 4)};
  return pairs;
}();

// The elements of a type in which each element is stored as one number.
template <class T, float (*kWiden)(T), T (*kNarrow)(float)>
struct Elements {
  using Element = T;
  static float widen(T v) { return kWiden(v); }
  static T narrow(float v) { return kNarrow(v); }
  static float at(const void* from, uint64_t i) { return kWiden(static_cast<const T*>(from)[i]); }
};
float unchanged(float v) {
  return v;
}

// Calls f with the Elements of t. Does not call f for mxfp4, since a byte of it has two elements.
template <class F>
void with_elements(DType t, F&& f) {
  switch (t) {
    case DType::kFloat8E4M3: return f(Elements<uint8_t, e4m3_to_float, float_to_e4m3>{});
    case DType::kMxFp4: return;
    case DType::kFloat32: return f(Elements<float, unchanged, unchanged>{});
    case DType::kBFloat16: return f(Elements<uint16_t, bf16_to_float, float_to_bf16>{});
    case DType::kFloat16: return f(Elements<uint16_t, half_to_float, float_to_half>{});
  }
}

}  // namespace

float e8m0_to_float(uint8_t e) {
  if (e == 0xff) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(e != 0 ? uint32_t{e} << 23 : 1u << 22);
}

float e4m3_to_float(uint8_t e) {
  return kE4M3[e];
}

void widen(float* to, const void* from, DType t, uint64_t n) {
  if (t == DType::kFloat32) {
    std::memcpy(to, from, n * 4);
  } else if (t == DType::kMxFp4) {
    const auto* pairs = static_cast<const uint8_t*>(from);
    for (uint64_t i = 0; i < n / 2; ++i) std::memcpy(to + 2 * i, kE2M1Pairs[pairs[i]].data(), sizeof(kE2M1Pairs[0]));
  } else {
    with_elements(t, [&](auto e) {
      for (uint64_t i = 0; i < n; ++i) to[i] = e.at(from, i);
    });
  }
}

void widen_every(float* to, const void* from, DType t, uint64_t n, uint64_t step) {
  if (step == 1) return widen(to, from, t, n);
  with_elements(t, [&](auto e) {
    for (uint64_t i = 0; i < n; ++i) to[i] = e.at(from, i * step);
  });
}

void narrow(void* to, const float* from, DType t, uint64_t n, float scale) {
  with_elements(t, [&](auto e) {
    auto* const elements = static_cast<decltype(e)::Element*>(to);
    for (uint64_t i = 0; i < n; ++i) elements[i] = e.narrow(from[i] * scale);
  });
}

void round_to(float* v, DType t, uint64_t n) {
  if (t == DType::kFloat32) return;
  with_elements(t, [&](auto e) {
    for (uint64_t i = 0; i < n; ++i) v[i] = e.widen(e.narrow(v[i]));
  });
}

void accumulate(float* acc, const void* from, DType t, uint64_t n) {
  with_elements(t, [&](auto e) {
    for (uint64_t i = 0; i < n; ++i) acc[i] += e.at(from, i);
  });
}

void quantise(uint8_t* elements, float* scales, const float* values, uint32_t n) {
  for (uint32_t first = 0; first < n; first += kScaleBlock) {
    const uint32_t count = std::min(kScaleBlock, n - first);
    const float* const v = values + first;
    float largest = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
      const float magnitude = std::fabs(v[i]);
      largest = magnitude > largest ? magnitude : largest;  // NaN compares false
    }
    const float quotient = largest / kLargestE4M3, scale = quotient > kLeastScale ? quotient : kLeastScale;
    scales[first / kScaleBlock] = scale;
    narrow(elements + first, v, DType::kFloat8E4M3, count, 1.0f / scale);
  }
}

}  // namespace flashmoe::cpu

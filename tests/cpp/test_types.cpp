// Compares element types with a reference that is computed in another way: all values, or where there are too many,
// random ones. Also checks that a row of a GEMM does not depend on its place in a tile.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/activations.h"
#include "cpu/gemm.h"
#include "cpu/types.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;

// A 16-bit float: 1 sign bit, `mantissa` bits of mantissa, and an exponent in the other bits.
struct Format {
  const char* name;
  int mantissa;
  DType type;
  int bias() const { return (1 << (14 - mantissa)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(0x7fff >> mantissa << mantissa); }
};
constexpr Format kBf16{"bfloat16", 7, DType::kBFloat16}, kFp16{"float16", 10, DType::kFloat16};

// The value of a finite pattern, by the definition of the format.
double value(const Format& f, uint16_t pattern) {
  const int exponent = (pattern & 0x7fff) >> f.mantissa;
  const int fraction = pattern & ((1 << f.mantissa) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - f.bias() - f.mantissa)
                                         : std::ldexp((1 << f.mantissa) + fraction, exponent - f.bias() - f.mantissa);
  return pattern & 0x8000 ? -magnitude : magnitude;
}

// The pattern nearest to v, ties to even, found by bisection over the values, which ascend with the pattern. The
// value of infinity's pattern is taken to be one step beyond the largest finite value. What is half of this step or
// more beyond the largest finite value becomes infinite.
uint16_t nearest(const Format& f, float v) {
  const double magnitude = std::fabs(static_cast<double>(v));
  uint16_t low = 0, high = f.infinity();
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (value(f, middle) <= magnitude ? low : high) = middle;
  }
  const double half = (value(f, low) + value(f, high)) / 2;
  const bool up = magnitude > half || (magnitude == half && low % 2 != 0);
  return static_cast<uint16_t>((up ? high : low) | (std::signbit(v) ? 0x8000 : 0));
}

float widened(const Format& f, uint16_t pattern) {
  float v;
  widen(&v, &pattern, f.type, 1);
  return v;
}

uint16_t narrowed(const Format& f, float v) {
  uint16_t pattern;
  narrow(&pattern, &v, f.type, 1);
  return pattern;
}

bool is_nan(const Format& f, uint16_t pattern) {
  return (pattern & 0x7fff) > f.infinity();
}

void check_format(const Format& f) {
  uint32_t nans = 0;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto pattern = static_cast<uint16_t>(i);
    const float v = widened(f, pattern);
    if (is_nan(f, pattern)) {
      CHECK(std::isnan(v));
      CHECK(is_nan(f, narrowed(f, v)));
      CHECK_EQ(narrowed(f, v) & 0x8000, pattern & 0x8000);
      ++nans;
      continue;
    }
    if ((pattern & 0x7fff) == f.infinity()) {
      CHECK(std::isinf(v));
    } else {
      CHECK_EQ(static_cast<double>(v), value(f, pattern));
    }
    CHECK_EQ(std::signbit(v), (pattern & 0x8000) != 0);
    CHECK_EQ(narrowed(f, v), pattern);
  }
  CHECK_EQ(nans, 2u * ((1u << f.mantissa) - 1));

  // The midpoint between each value and the next one, where the direction of rounding changes, and the two floats
  // next to the midpoint.
  uint32_t midpoints = 0;
  for (uint16_t pattern = 0; pattern < f.infinity(); ++pattern) {
    const double exact = (value(f, pattern) + value(f, static_cast<uint16_t>(pattern + 1))) / 2;
    const auto middle = static_cast<float>(exact);
    CHECK_EQ(static_cast<double>(middle), exact);
    ++midpoints;
    for (const float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
      CHECK_EQ(narrowed(f, v), nearest(f, v));
      CHECK_EQ(narrowed(f, -v), nearest(f, -v));
    }
    CHECK_EQ(narrowed(f, middle) % 2, 0);
  }

  std::mt19937 random(1);
  for (uint32_t i = 0; i < 300'000; ++i) {
    const auto v = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(v)) {
      CHECK(is_nan(f, narrowed(f, v)));
    } else if (std::isinf(v)) {
      CHECK_EQ(narrowed(f, v) & 0x7fff, f.infinity());
    } else {
      CHECK_EQ(narrowed(f, v), nearest(f, v));
    }
  }
  std::printf("%s: 65536 patterns, %u midpoints\n", f.name, midpoints);
}

// The value of a finite pattern of e4m3, by the definition of the format: no infinity, and one NaN of either sign.
double value_of_e4m3(uint8_t pattern) {
  const int exponent = pattern >> 3 & 15, fraction = pattern & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return pattern & 0x80 ? -magnitude : magnitude;
}

// The midpoint between each value and the next one, and the two floats next to the midpoint; values beyond the
// largest; and NaN.
void check_e4m3() {
  for (uint32_t i = 0; i < 0x7f; ++i) {
    const auto pattern = static_cast<uint8_t>(i);
    CHECK_EQ(static_cast<double>(e4m3_to_float(pattern)), value_of_e4m3(pattern));
    CHECK_EQ(static_cast<double>(e4m3_to_float(pattern | 0x80)), value_of_e4m3(pattern | 0x80));
    CHECK_EQ(float_to_e4m3(e4m3_to_float(pattern)), pattern);
    CHECK_EQ(float_to_e4m3(e4m3_to_float(pattern | 0x80)), pattern | 0x80);
    if (i == 0x7e) continue;
    const auto middle = static_cast<float>((value_of_e4m3(pattern) + value_of_e4m3(pattern + 1)) / 2);
    CHECK_EQ(float_to_e4m3(middle), pattern % 2 == 0 ? pattern : pattern + 1);
    CHECK_EQ(float_to_e4m3(std::nextafter(middle, 0.0f)), pattern);
    CHECK_EQ(float_to_e4m3(std::nextafter(middle, INFINITY)), pattern + 1);
    CHECK_EQ(float_to_e4m3(-middle), (pattern % 2 == 0 ? pattern : pattern + 1) | 0x80);
  }
  for (const float v : {448.0f, 449.0f, 1e30f, INFINITY}) {
    CHECK_EQ(float_to_e4m3(v), 0x7e);
    CHECK_EQ(float_to_e4m3(-v), 0xfe);
  }
  CHECK_EQ(float_to_e4m3(NAN), 0x7f);
  CHECK_EQ(float_to_e4m3(-NAN), 0x7f);
  CHECK(std::isnan(e4m3_to_float(0x7f)) && std::isnan(e4m3_to_float(0xff)));
}

// Where the scales lie in a quantised row, and how many bytes a row has, quantised or not.
static_assert(row_bytes(7168, 1) == 7392 && scales_offset(7168) == 7168);
static_assert(row_bytes(200, 1) == 224 && scales_offset(200) == 208 && scale_blocks(200) == 2);
static_assert(row_bytes(1, 1) == 32 && row_bytes(129, 2) == 258 && row_bytes(3, 4) == 12);

// ---- SiLU -------------------------------------------------------------------------------------------------

// SiLU of every bfloat16 value from -2^30 on. No change to the code may change a bit of the results, so their bits,
// in the order of the values' patterns, must have this FNV-1a hash.
void check_silu_bits() {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    float v = widened(kBf16, static_cast<uint16_t>(pattern));
    if (std::isnan(v) || v < -0x1p30f) continue;
    activate(&v, nullptr, {.activation = Activation::kSilu}, 1);
    hash = (hash ^ std::bit_cast<uint32_t>(v)) * 0x100000001b3u;
  }
  CHECK_EQ(hash, uint64_t{4085862573712623834u});
}

// Where fp32 cannot hold e^-x, SiLU has the value to which it tends: zero for large negative x, x for large positive
// x.
void check_silu_ends() {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const float x = widened(kBf16, static_cast<uint16_t>(pattern));
    float alone = x, gated[] = {x, x};
    const float up[] = {2.0f, -3.0f};
    activate(&alone, nullptr, {.activation = Activation::kSilu}, 1);
    activate(gated, up, {.activation = Activation::kSwiGlu}, 2);
    if (std::isnan(x)) {
      CHECK(std::isnan(alone) && std::isnan(gated[0]));
    } else if (x < -0x1p30f) {
      CHECK_EQ(alone, 0.0f);
      CHECK_EQ(gated[0], 0.0f);
      CHECK_EQ(gated[1], 0.0f);
    } else if (x > 0x1p30f) {
      CHECK_EQ(alone, x);
    }
    if (std::isfinite(x)) CHECK(std::fabs(alone - std::fmax(x, 0.0f)) < 0.279f);  // the most is at x = -1.278
  }
}

// ---- GELU by tanh -----------------------------------------------------------------------------------------

// GELU by tanh and its slope, of every bfloat16 value. The error must be within what the roundings of the computation
// explain. Where fp32 cannot hold e^-y, the result must be the value to which it tends.
void check_gelu_tanh() {
  const AgreedLayer layer{.activation = Activation::kGeluTanh};
  const double u = 0x1p-24, factor = std::sqrt(8 / M_PI);
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const float x = widened(kBf16, static_cast<uint16_t>(pattern)), one = 1.0f;
    float value = x, slope = 0.0f;
    activate(&value, nullptr, layer, 1);
    activate_backward({&slope, nullptr, 1}, &x, nullptr, &one, layer, 1.0f, 1);
    if (std::isnan(x) || std::isinf(x)) {
      CHECK(std::isnan(slope));
      CHECK(std::isnan(x) ? std::isnan(value) : value == std::fmax(x, 0.0f));
      continue;
    }
    const double v = x, y = factor * v * (1 + 0.044715 * v * v), steepness = factor * (1 + 3 * 0.044715 * v * v);
    const double s = 1 / (1 + std::exp(-y)), bent = std::fabs(v) / (1 + std::exp(std::fabs(y))) * steepness;
    // of_s and of_bent count roundings. Roundings of y count |y| times, because y is in the exponent of e^-y;
    // roundings of what is computed from e^-y count once. Where e^-y is small compared with 1, so is its error
    // compared with the result.
    const double of_s = 6 * std::fmax(-y, 0.0) + 11, of_bent = 6 * std::fabs(y) + 16;
    CHECK(std::fabs(value - v * s) <= (u * of_s * s + 0x1p-126) * std::fabs(v));
    const double expected = s + (bent == 0 ? 0 : v * s * (1 - s) * steepness);
    CHECK(std::fabs(slope - expected) <= u * (of_s * s + of_bent * bent) + 0x1p-120);
    if (std::fabs(x) > 12.0f) {
      CHECK_EQ(slope, x > 0.0f ? 1.0f : 0.0f);
      CHECK(x > 0.0f ? value == x : value >= x * 0x1p-126f);
    }
  }
}

// ---- GEMM -------------------------------------------------------------------------------------------------

float dot(const float* a, const float* b, uint32_t k) {
  double sum = 0;
  for (uint32_t i = 0; i < k; ++i) sum += static_cast<double>(a[i]) * b[i];
  return static_cast<float>(sum);
}

// Tiles of every size from 1 to 128, at several places among the rows. Every row must have the bits that it has
// alone.
void check_rows(uint32_t n, uint32_t k, DType t) {
  constexpr uint32_t kRows = 200;
  std::mt19937 random(n * 1000 + k);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> a(size_t{kRows + kMaxTileRows} * k, NAN);  // surplus rows may hold anything
  std::vector<float> w(size_t{n} * k);
  for (size_t i = 0; i < size_t{kRows} * k; ++i) a[i] = uniform(random);
  for (float& v : w) v = uniform(random);
  std::vector<uint8_t> weights(w.size() * element_bytes(t));
  narrow(weights.data(), w.data(), t, w.size());
  widen(w.data(), weights.data(), t, w.size());

  GemmBuffers buffers;
  std::vector<float> out(size_t{kRows + kMaxTileRows} * n), alone(size_t{kRows} * n);
  const auto multiply = [&](uint32_t first, uint32_t rows) {
    const uint32_t padded = padded_rows(rows, n, k);
    CHECK(padded >= rows && padded <= rows + kMaxTileRows);
    gemm(out.data(), a.data() + size_t{first} * k, rows, weights.data(), k, t, n, k, buffers);
  };
  for (uint32_t r = 0; r < kRows; ++r) {
    multiply(r, 1);
    std::copy_n(out.begin(), n, alone.begin() + size_t{r} * n);
    for (uint32_t j = 0; j < n; ++j) {
      const float exact = dot(&a[size_t{r} * k], &w[size_t{j} * k], k);
      CHECK(std::fabs(out[j] - exact) <= 1e-6f * static_cast<float>(k));
    }
  }
  for (uint32_t rows = 1; rows <= 128; ++rows) {
    for (const uint32_t first : {0u, 1u, static_cast<uint32_t>(random()) % (kRows - rows + 1), kRows - rows}) {
      multiply(first, rows);
      CHECK(std::memcmp(out.data(), &alone[size_t{first} * n], size_t{rows} * n * sizeof(float)) == 0);
    }
  }
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using flashmoe::DType;
  check_format(kBf16);
  check_format(kFp16);
  check_e4m3();
  check_silu_bits();
  check_silu_ends();
  check_gelu_tanh();
  struct Shape {
    uint32_t n, k;
  };
  constexpr Shape kShapes[] = {{1, 1},   {1, 64},  {2, 3},   {3, 100}, {5, 17},  {8, 8},
                               {16, 32}, {17, 64}, {24, 40}, {64, 16}, {64, 96}, {100, 33}};
  for (const Shape s : kShapes) check_rows(s.n, s.k, DType::kFloat32);
  check_rows(40, 24, DType::kBFloat16);
  check_rows(40, 24, DType::kFloat16);
  check_rows(40, 24, DType::kFloat8E4M3);
  std::printf("%zu GEMM shapes: rows have the same bits at every place\n", std::size(kShapes) + 3);
}

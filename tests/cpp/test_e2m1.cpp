// Numbers in mxfp4 as the kernel for a few tokens decodes them to bf16 and fp16: every code at every place, with
// every scale. What is expected is computed in double from the format's table and powers of two, and rounded to the
// type.
#include <cmath>

#include "check.h"
#include "flashmoe/gpu/e2m1.h"

namespace flashmoe::test {
namespace {

constexpr double kMagnitudes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

// A 16-bit type: a sign bit, an exponent that is stored with kBias added, and kMantissa bits of mantissa.
template <uint32_t kMantissa, uint32_t kBias>
struct Type {
  using Bits = gpu::E2M1Bits<kMantissa, kBias>;
  static constexpr uint32_t kInfinity = (2 * kBias + 1) << kMantissa;

  static double widen(uint32_t bits) {
    const uint32_t exponent = bits >> kMantissa & (2 * kBias + 1), mantissa = bits & ((1u << kMantissa) - 1);
    const double sign = bits >> 15 != 0 ? -1.0 : 1.0;
    if (exponent == 2 * kBias + 1) return mantissa != 0 ? std::nan("") : sign * INFINITY;
    const double fraction = std::ldexp(mantissa, -static_cast<int>(kMantissa));
    return exponent == 0 ? sign * std::ldexp(fraction, 1 - static_cast<int>(kBias))
                         : sign * std::ldexp(1.0 + fraction, static_cast<int>(exponent) - static_cast<int>(kBias));
  }
  // Rounds to nearest, ties to even.
  static uint32_t narrow(double v) {
    const uint32_t sign = std::signbit(v) ? 0x8000 : 0;
    if (std::isnan(v)) return 0x7fff;
    const double magnitude = std::fabs(v);
    const int least = 1 - static_cast<int>(kBias);
    const int exponent = magnitude == 0.0 ? least : std::max(std::ilogb(magnitude), least);
    if (exponent > static_cast<int>(kBias)) return sign | kInfinity;
    // The magnitude, counted in steps from one number of the type to the next with this exponent. If rounding makes
    // too many steps for the mantissa, adding them carries into the exponent, which gives the right number.
    const double steps = std::nearbyint(std::ldexp(magnitude, static_cast<int>(kMantissa) - exponent));
    const bool subnormal = exponent == least && steps < static_cast<double>(1u << kMantissa);
    const uint32_t stored = subnormal ? 0 : static_cast<uint32_t>(exponent + static_cast<int>(kBias)) - 1;
    return sign | ((stored << kMantissa) + static_cast<uint32_t>(steps));
  }
  static uint32_t multiply(uint32_t a, uint32_t b) {
    return narrow(widen(a & 0xffff) * widen(b & 0xffff)) | narrow(widen(a >> 16) * widen(b >> 16)) << 16;
  }
};

template <class T>
void check_type() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {  // widen() and narrow(), by which the test multiplies
    if (!std::isnan(T::widen(bits))) CHECK_EQ(T::narrow(T::widen(bits)), bits);
  }
}

// Decodes eight codes at once. Over all turns, each code is at each place. kLarge: by decode(); otherwise by pair()
// and rescale(), which are meant for a table of pairs.
template <class T, bool kLarge>
void check_decoding(uint32_t e) {
  for (uint32_t turn = 0; turn < 16; ++turn) {
    uint32_t codes = 0;
    for (uint32_t i = 0; i < 8; ++i) codes |= (turn + 3 * i) % 16 << 4 * i;
    uint32_t pairs[4];
    if (kLarge) {
      T::Bits::decode(codes, e, pairs, T::multiply);
    } else {
      for (uint32_t i = 0; i < 4; ++i) pairs[i] = T::Bits::pair(codes >> 8 * i & 0xff);
      T::Bits::template rescale<false>(e, pairs, T::multiply);
    }
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t code = (turn + 3 * i) % 16, got = pairs[i / 2] >> i % 2 * 16 & 0xffff;
      const double number = std::copysign(kMagnitudes[code % 8], code < 8 ? 1.0 : -1.0);
      if (e == 255) {
        CHECK(std::isnan(T::widen(got)));
      } else {
        CHECK_EQ(got, T::narrow(std::ldexp(number, static_cast<int>(e) - 127)));
      }
    }
  }
}

template <class T>
void check_scales() {
  for (uint32_t e = 0; e < 256; ++e) check_decoding<T, true>(e);
  for (uint32_t e = 0; e <= T::Bits::kMostScale; ++e) check_decoding<T, false>(e);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using InBf16 = Type<7, 127>;
  using InFp16 = Type<10, 15>;
  check_type<InBf16>();
  check_type<InFp16>();
  check_scales<InBf16>();
  check_scales<InFp16>();
  return 0;
}

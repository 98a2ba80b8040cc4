// Decodes mxfp4 to a 16-bit type. The caller supplies the multiplication of two words, so that hosts can test this
// file.
//
// A code has a sign, two bits of exponent and one bit of mantissa. The decoder puts these bits where a 16-bit type has
// its sign, the lowest bits of its exponent and the highest bit of its mantissa. The result is the number times a
// constant power of two. This is also true for exponent 0, since numbers of exponent 0 have no hidden bit in either
// type. So a number in mxfp4 is these bits times one power of two, which also includes the scale of the block.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/markers.h"

namespace flashmoe::gpu {

// The decoder to a 16-bit type with kMantissa bits of mantissa. The type stores exponents plus kBias, and kBias is
// also its largest exponent.
template <uint32_t kMantissa, uint32_t kBias>
struct E2M1Bits {
  static constexpr uint32_t kBoth = 0x00010001;  // times a number of 16 bits: a word with the number in both halves
  // The largest stored scale (its exponent plus 127) for which one multiplication is enough in both types.
  static constexpr uint32_t kMostScale = 127;

  // Decodes eight codes, the first in the lowest bits, of a block with scale `e`, to pairs of neighbours. Numbers
  // that the type does not have are rounded to nearest.
  template <class Multiply>
  static FLASHMOE_FN void decode(uint32_t codes, uint32_t e, uint32_t (&pairs)[4], Multiply&& multiply) {
    spread(codes, pairs);
    rescale<true>(e, pairs, multiply);
  }
  // The two steps of decode(). pair(): the two numbers of a byte of codes, each times 2^(1 - kBias). rescale(): makes
  // the numbers of a block with scale `e` from such pairs. kLarge: whether `e` may be larger than kMostScale, or NaN.
  static FLASHMOE_FN uint32_t pair(uint32_t byte) {
    uint32_t pairs[4];
    spread(byte, pairs);
    return pairs[0];
  }
  template <bool kLarge, class Multiply>
  static FLASHMOE_FN void rescale(uint32_t e, uint32_t (&pairs)[4], Multiply&& multiply) {
    auto multiply_by = [&](uint32_t both) {
      FLASHMOE_UNROLL
      for (uint32_t i = 0; i < 4; ++i) pairs[i] = multiply(pairs[i], both);
    };
    multiply_by(scale(kLarge ? min_of(e, kMostScale) : e));
    if constexpr (kLarge) {
      if (e == kNanScale) multiply_by(kNan);
      uint32_t left = e == kNanScale ? 0 : e - min_of(e, kMostScale);
      FLASHMOE_NO_UNROLL
      while (left != 0) {
        const uint32_t step = min_of(left, kBias);  // 2^kBias is the largest power that the type has
        multiply_by((step + kBias) * (kBoth << kMantissa));
        left -= step;
      }
    }
  }

 private:
  static constexpr uint32_t kNanScale = 0xff, kNan = kBoth * 0x7fff;

  // Makes pairs of neighbours, the first in the low half. Each is the code's number times 2^(1 - kBias).
  static FLASHMOE_FN void spread(uint32_t codes, uint32_t (&pairs)[4]) {
    // The two codes of a byte come to the same place in the two halves of a word. Each word has the codes of two bytes.
    const uint32_t low = halves<0x5410>(codes << 4, codes), high = halves<0x7632>(codes << 4, codes);
    pairs[0] = number(low << 8);
    pairs[1] = number(low);
    pairs[2] = number(high << 8);
    pairs[3] = number(high);
  }
  // The factor, in both halves, that turns such pairs into the numbers of a block with scale 2^(e - 127), for e up to
  // kMostScale. It is a power of two. If the type has no power so small, it is zero, because all numbers round to
  // zero.
  static FLASHMOE_FN uint32_t scale(uint32_t e) {
    constexpr int32_t kAdd = 2 * static_cast<int32_t>(kBias) - 128;
    if constexpr (kAdd >= 0) return e * (kBoth << kMantissa) + kAdd * (kBoth << kMantissa);
    constexpr uint32_t kNone = static_cast<uint32_t>(-kAdd);
    return (e > kNone ? e - kNone : 0) * (kBoth << kMantissa);
  }
  // A word of the low halves of `a` and `b`, or of their high halves. kSelected is the selector for prmt.
  template <uint32_t kSelected>
  static FLASHMOE_FN uint32_t halves(uint32_t a, uint32_t b) {
    static_assert(kSelected == 0x5410 || kSelected == 0x7632);
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, kSelected);  // the compiler makes three instructions of what is below
#else
    return kSelected == 0x5410 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
#endif
  }
  // The 16-bit numbers for the codes in the highest four bits of each half. The bits below may be anything.
  static FLASHMOE_FN uint32_t number(uint32_t code) {
    constexpr uint32_t kSign = kBoth << 15, kMagnitude = kBoth * (7u << (kMantissa - 1));
    return (code & kSign) | (code >> (13 - kMantissa) & kMagnitude);
  }
};

}  // namespace flashmoe::gpu

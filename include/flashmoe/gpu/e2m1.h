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

// A 16-bit type of so many bits of mantissa, whose exponents are stored plus kBias, which is also the largest.
template <uint32_t kMantissa, uint32_t kBias>
struct E2M1Bits {
  static constexpr uint32_t kBoth = 0x00010001;  // times 16 bits: these in both halves of a word
  // The largest scale, plus 127, that one multiplication has room for in both types.
  static constexpr uint32_t kMostScale = 127;

  // Eight numbers of a block with scale `e`, of which the first code is in the lowest bits: as pairs of neighbours,
  // rounded to nearest where the type has not got them.
  template <class Multiply>
  static FLASHMOE_FN void decode(uint32_t codes, uint32_t e, uint32_t (&pairs)[4], Multiply&& multiply) {
    spread(codes, pairs);
    rescale<true>(e, pairs, multiply);
  }
  // Its halves: both numbers of a byte of codes, times 2^(1 - kBias), and what makes of such pairs those with the scale.
  // kLarge: whether that may be larger than kMostScale, or NaN.
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

  // Pairs of neighbours, the first in the low half: each is its number times 2^(1 - kBias).
  static FLASHMOE_FN void spread(uint32_t codes, uint32_t (&pairs)[4]) {
    // Both codes of a byte come to the same place of two halves, of two bytes at a time.
    const uint32_t low = halves<0x5410>(codes << 4, codes), high = halves<0x7632>(codes << 4, codes);
    pairs[0] = number(low << 8);
    pairs[1] = number(low);
    pairs[2] = number(high << 8);
    pairs[3] = number(high);
  }
  // What makes of these the numbers of a block with scale 2^(e - 127), e up to kMostScale: a power of two, in both
  // halves. Where the type has none so small all numbers round to zero, and it is zero.
  static FLASHMOE_FN uint32_t scale(uint32_t e) {
    constexpr int32_t kAdd = 2 * static_cast<int32_t>(kBias) - 128;
    if constexpr (kAdd >= 0) return e * (kBoth << kMantissa) + kAdd * (kBoth << kMantissa);
    constexpr uint32_t kNone = static_cast<uint32_t>(-kAdd);
    return (e > kNone ? e - kNone : 0) * (kBoth << kMantissa);
  }
  // Both low halves of `a` and `b`, or both high ones: as prmt selects them.
  template <uint32_t kSelected>
  static FLASHMOE_FN uint32_t halves(uint32_t a, uint32_t b) {
    static_assert(kSelected == 0x5410 || kSelected == 0x7632);
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, kSelected);  // the compiler makes three instructions of what is below
#else
    return kSelected == 0x5410 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
#endif
  }
  // Of a code in the highest bits of each half, whatever is below.
  static FLASHMOE_FN uint32_t number(uint32_t code) {
    constexpr uint32_t kSign = kBoth << 15, kMagnitude = kBoth * (7u << (kMantissa - 1));
    return (code & kSign) | (code >> (13 - kMantissa) & kMagnitude);
  }
};

}  // namespace flashmoe::gpu

// Numbers in mxfp4 as those of a 16-bit type, rounded to nearest where it has not got them.
//
// bf16 has all of them exactly, but those beyond its range, which are infinite. fp16 has multiples of 2^-24 up to 65504:
// of others it has the nearest multiple, or infinity, as if they had been converted.
#pragma once

#include <cstdint>

#include "flashmoe/gpu/e2m1.h"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/spec/encoding.h"

namespace flashmoe::gpu {

// Of a row, what shares a scale.
inline constexpr uint32_t kMxFp4Block = encoding_of(DType::kMxFp4).block_columns;

// D's bits, and products of both halves of two words, rounded to nearest even. (Of subnormal numbers, too.)
template <class D>
struct E2M1In;
template <>
struct E2M1In<Bf16> : E2M1Bits<7, 127> {
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }
};
template <>
struct E2M1In<Fp16> : E2M1Bits<10, 15> {
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }
};

}  // namespace flashmoe::gpu

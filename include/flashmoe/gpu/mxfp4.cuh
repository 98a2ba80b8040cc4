// Converts numbers in mxfp4 to a 16-bit type. Numbers that the type does not have are rounded to nearest.
//
// bf16 has all numbers of mxfp4 exactly, except those beyond its range, which become infinite. fp16 has multiples of
// 2^-24 up to 65504. Other numbers become the nearest multiple, or infinity, as in an ordinary conversion.
#pragma once

#include <cstdint>

#include "flashmoe/gpu/e2m1.h"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/spec/encoding.h"

namespace flashmoe::gpu {

// How many elements of a row share a scale.
inline constexpr uint32_t kMxFp4Block = encoding_of(DType::kMxFp4).block_columns;

// The decoder to type D. multiply() gives the products of the halves of two words, rounded to nearest even, even if
// they are subnormal.
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

// Element types: what memory holds, what the tensor cores take, how fp32 results are rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flashmoe/spec/build.h"

namespace flashmoe::gpu {

// For 16 bytes of elements: spread() gives them as fp32, accumulate() adds the i-th to sum[i], round() packs sums.
template <class Dtype>
struct PackedPairs {
  static __device__ __forceinline__ void spread(float (&to)[8], const uint4& piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Dtype::unpack(words[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ void accumulate(float (&sum)[8], const uint4& piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // without spread(), because with it ptxas spills
      const float2 pair = Dtype::unpack(words[i]);
      sum[2 * i] += pair.x;
      sum[2 * i + 1] += pair.y;
    }
  }
  static __device__ __forceinline__ uint4 round(const float (&sum)[8]) {
    return {Dtype::pack(sum[0], sum[1]), Dtype::pack(sum[2], sum[3]), Dtype::pack(sum[4], sum[5]),
            Dtype::pack(sum[6], sum[7])};
  }
};

struct Bf16 : PackedPairs<Bf16> {
  static constexpr bool kTensorCores = true;
  using Element = __nv_bfloat16;
  static constexpr uint32_t kBytes = sizeof(Element);

  static __device__ __forceinline__ float widen(Element v) { return __bfloat162float(v); }
  static __device__ __forceinline__ Element narrow(float v) { return __float2bfloat16_rn(v); }
  // Two values rounded to nearest even, `low` in the low half.
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
  }
};

struct Fp16 : PackedPairs<Fp16> {
  static constexpr bool kTensorCores = true;
  using Element = __half;
  static constexpr uint32_t kBytes = sizeof(Element);

  static __device__ __forceinline__ float widen(Element v) { return __half2float(v); }
  static __device__ __forceinline__ Element narrow(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return __half22float2(reinterpret_cast<const __half2&>(v));
  }
};

// fp32 in memory; the tensor cores ignore the 13 low bits of each operand's mantissa.
struct Tf32 {
  static constexpr bool kTensorCores = true;
  using Element = float;
  static constexpr uint32_t kBytes = sizeof(Element);

  static __device__ __forceinline__ float widen(Element v) { return v; }
  static __device__ __forceinline__ Element narrow(float v) { return v; }
  static __device__ __forceinline__ void spread(float (&to)[4], const uint4& piece) {
    to[0] = __uint_as_float(piece.x), to[1] = __uint_as_float(piece.y);
    to[2] = __uint_as_float(piece.z), to[3] = __uint_as_float(piece.w);
  }
  static __device__ __forceinline__ void accumulate(float (&sum)[4], const uint4& piece) {
    float v[4];
    spread(v, piece);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += v[i];
  }
  static __device__ __forceinline__ uint4 round(const float (&sum)[4]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
  }
};

// fp32 multiplied as fp32, by FFMA: 67 TFLOP/s at best, against TF32's 495 (H100 datasheet).
struct ExactFp32 : Tf32 {
  static constexpr bool kTensorCores = false;
};

// The type of experts' matrices and of rows in FP8 (spec/rows.h), as the tensor cores take them.
struct E4M3 {
  static constexpr bool kTensorCores = true;
  static constexpr uint32_t kBytes = 1;
};
// The type of a layer whose experts, and the rows that they multiply, are in e4m3; everything else is in D.
template <class D>
struct Quantised : D {};
template <class Dtype>
inline constexpr bool kQuantised = false;
template <class D>
inline constexpr bool kQuantised<Quantised<D>> = true;

// The type of a layer whose experts' matrices are in mxfp4; everything else is in D.
template <class D>
struct MxFp4 : D {};
template <class Dtype>
inline constexpr bool kMxFp4 = false;
template <class D>
inline constexpr bool kMxFp4<MxFp4<D>> = true;

// The type of experts' matrices, and of the rows that these multiply.
template <class Dtype>
struct Factors {
  using Type = Dtype;
};
template <class D>
struct Factors<Quantised<D>> {
  using Type = E4M3;
};
template <class D>
struct Factors<MxFp4<D>> {
  using Type = D;  // matrices are converted to D before they are multiplied
};

// The type in which the router's logits are computed. It is exact fp32 in place of TF32, because TF32 ignores 13 bits
// of its operands, and these bits may decide which experts a token gets.
template <class Dtype>
struct Scores {
  using Type = Dtype;
};
template <>
struct Scores<Tf32> {
  using Type = ExactFp32;
};
template <class D>
struct Scores<Quantised<D>> : Scores<D> {};
template <class D>
struct Scores<MxFp4<D>> : Scores<D> {};

// The i-th pair of elements in an array of kWords words.
template <class Dtype, uint32_t kWords>
__device__ __forceinline__ float2 pair_of(const uint32_t (&word)[kWords], uint32_t i) {
  if constexpr (Dtype::kBytes == 2) {
    return Dtype::unpack(word[i]);
  } else {
    return {__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1])};
  }
}

// Element i of a bias; 0 where there is none, or outside of it.
template <class Dtype>
__device__ __forceinline__ float bias_at(const void* bias, uint32_t i, bool inside) {
  return bias != nullptr && inside ? Dtype::widen(static_cast<const typename Dtype::Element*>(bias)[i]) : 0.0f;
}

// 16 bytes of a row that nobody computes: NaN, or zeros.
template <class Dtype>
__device__ __forceinline__ uint4 filled_chunk(bool bad) {
  float values[16 / Dtype::kBytes];
#pragma unroll
  for (float& v : values) v = bad ? NAN : 0.0f;
  return Dtype::round(values);
}

}  // namespace flashmoe::gpu

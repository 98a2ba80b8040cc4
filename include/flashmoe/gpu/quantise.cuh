// Quantises rows to e4m3 (spec/rows.h). Every step is an IEEE operation in fp32, so the bits are those of the CPU
// engine.
#pragma once

#include <cstdint>

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/spec/rows.h"

namespace flashmoe::gpu {

// The larger one of `a` and the magnitude of `b`. A NaN is ignored.
__device__ __forceinline__ float larger(float a, float b) {
  return fmaxf(a, fabsf(b));
}
// The scale of elements whose largest magnitude this is.
__device__ __forceinline__ float scale_of(float largest) {
  const float quotient = __fdiv_rn(largest, kLargestE4M3);
  return quotient > kLeastScale ? quotient : kLeastScale;
}
// The same scale, and its reciprocal, without a branch, so that several can be computed at the same time. The scale
// has the bits of scale_of() for every largest magnitude that exists (all were compared). If the scale is finite, the
// reciprocal is rounded as IEEE says. If the scale is infinite, the reciprocal is NaN, like the elements of such a
// block.
struct BlockScale {
  float scale, inverse;

  explicit __device__ __forceinline__ BlockScale(float largest) {
    constexpr float kInverse = 1.0f / kLargestE4M3;
    const float first = __fmul_rn(largest, kInverse);
    const float quotient = fmaf(fmaf(-kLargestE4M3, first, largest), kInverse, first);
    scale = largest > kLargestFloat ? largest : fmaxf(quotient, kLeastScale);
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
    inverse = fmaf(near, -fmaf(near, scale, -1.0f), near);
  }

 private:
  static constexpr float kLargestFloat = 0x1.fffffep127f;
};
// Two values times `inverse`, rounded to nearest even, with `low` in the low byte.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high, float inverse) {
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(v)
      : "f"(__fmul_rn(high, inverse)), "f"(__fmul_rn(low, inverse)));
  return v;
}

// Converts four numbers in e4m3 to fp16, which has them exactly: the first two to `first`, the others to `second`.
__device__ __forceinline__ void widen_e4m3(uint32_t four, uint32_t& first, uint32_t& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(four));
}

// Quantises a row of `elements`, a multiple of 16, from `from` to `to`. One warp.
template <class Dtype>
__device__ __forceinline__ void quantise_row(const uint8_t* from, uint8_t* to, uint32_t elements) {
  using P = Platform;
  static_assert(Dtype::kBytes == 2);
  constexpr uint32_t kPiece = 16 / Dtype::kBytes, kScaleLanes = kScaleBlock / kPiece;
  constexpr uint32_t kAtOnce = 4;  // loads of a lane on their way
  auto* const scales = reinterpret_cast<float*>(to + scales_offset(elements));
#pragma unroll 1
  for (uint32_t base = P::lane() * kPiece; base - P::lane() * kPiece < elements; base += kAtOnce * 32 * kPiece) {
    uint4 piece[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = base + i * 32 * kPiece;
      piece[i] = {};
      if (at < elements) piece[i] = load_once(from + at * Dtype::kBytes);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = base + i * 32 * kPiece;
      float v[kPiece], largest = 0.0f;
      Dtype::spread(v, piece[i]);
#pragma unroll
      for (uint32_t j = 0; j < kPiece; ++j) largest = larger(largest, v[j]);
#pragma unroll
      for (uint32_t apart = kScaleLanes / 2; apart != 0; apart /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, apart));
      }
      const float scale = scale_of(largest), inverse = __frcp_rn(scale);
      uint2 packed;
      packed.x = pack_e4m3(v[0], v[1], inverse) | pack_e4m3(v[2], v[3], inverse) << 16;
      packed.y = pack_e4m3(v[4], v[5], inverse) | pack_e4m3(v[6], v[7], inverse) << 16;
      if (at >= elements) continue;
      *reinterpret_cast<uint2*>(to + at) = packed;
      if (at % kScaleBlock == 0) scales[at / kScaleBlock] = scale;
    }
  }
}

// Copies a row that is in e4m3 already, and its scales, to where quantise_row() would write them. One warp.
__device__ __forceinline__ void copy_quantised_row(const uint8_t* from, const float* scales, uint8_t* to,
                                                   uint32_t elements) {
  using P = Platform;
#pragma unroll 1
  for (uint32_t at = P::lane() * 16; at < elements; at += P::kLanes * 16) {
    *reinterpret_cast<uint4*>(to + at) = load_once(from + at);
  }
  auto* const scales_to = reinterpret_cast<float*>(to + scales_offset(elements));
#pragma unroll 1
  for (uint32_t i = P::lane(); i < scale_blocks(elements); i += P::kLanes) scales_to[i] = scales[i];
}

}  // namespace flashmoe::gpu

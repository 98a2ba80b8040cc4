// Activations on fp32 accumulators.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/spec/enums.h"

namespace flashmoe::gpu {

namespace detail {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace detail

// The functions below take few instructions each: an epilogue is straight-line code that one warp per scheduler runs,
// so its number of instructions decides its time.

// x / (1 + exp(-alpha x)). The relative error is below 2^-20 where |alpha x| < 20. Beyond that it is larger, because
// exp's argument is rounded.
__device__ __forceinline__ float silu(float x, float alpha = 1.0f) {
  constexpr float kLog2E = 1.44269504f;
  return x * detail::reciprocal_approx(1.0f + detail::exp2_approx(x * (-kLog2E * alpha)));
}

// x (1 + tanh(y / 2)) / 2 = x / (1 + exp(-y)), y = 2 sqrt(2 / pi) (x + 0.044715 x^3). It is computed like silu, but
// exp's argument is off by up to four roundings, which are 2^-22 of it. gelu_tanh_exponent() is -y / ln 2, for square
// = x^2.
__device__ __forceinline__ float gelu_tanh_exponent(float x, float square) {
  return x * fmaf(square, -0.10294324f, -2.3022082f);
}
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * detail::reciprocal_approx(1.0f + detail::exp2_approx(gelu_tanh_exponent(x, x * x)));
}

// x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| h, with h = erfc(|x| / sqrt 2) / 2. The polynomial q is log2(h), so
// that the special function unit, which does 4 operations a clock and scheduler, is used once (exp2); other formulas
// use it twice. q is a minimax polynomial for |x| <= 5.75, where the relative error of h is 5.4e-6; beyond that, the
// absolute error is below 1e-12. normal_tail() is h, for u = |x|.
__device__ __forceinline__ float normal_tail(float u) {
  float q = fmaf(u, -1.8255128e-06f, 6.1440482e-05f);
  q = fmaf(u, q, -9.2949249e-04f);
  q = fmaf(u, q, 8.5046170e-03f);
  q = fmaf(u, q, -5.3954883e-02f);
  q = fmaf(u, q, -4.5846818e-01f);
  q = fmaf(u, q, -1.1512501f);
  q = fmaf(u, q, -9.9999533e-01f);
  return detail::exp2_approx(q);
}
__device__ __forceinline__ float gelu(float x) {
  const float u = fabsf(x);
  return fmaf(-u, normal_tail(u), detail::max_or_nan(x, 0.0f));
}

// The same for results of 8 significant bits (bf16). q is a minimax polynomial for the same range. The relative error
// of h is 3.1e-4, while half a unit in a result's last place is 2e-3 to 4e-3. It takes two of 11 instructions less,
// both multiplications, which saves 1.4 us of an epilogue's 4.2 us.
__device__ __forceinline__ float short_gelu(float x) {
  const float u = fabsf(x);
  float q = fmaf(u, -2.1686355e-04f, 4.6652417e-03f);
  q = fmaf(u, q, -4.3719252e-02f);
  q = fmaf(u, q, -4.7119531e-01f);
  q = fmaf(u, q, -1.145372f);
  q = fmaf(u, q, -1.0004399f);
  return fmaf(-u, detail::exp2_approx(q), detail::max_or_nan(x, 0.0f));
}

// The same h, with erfc by Abramowitz and Stegun 7.1.26, which is within 1.5e-7 of erfc.
__device__ __forceinline__ float exact_normal_tail(float x) {
  constexpr float kP = 0.3275911f * 0.707106781f, kHalfLog2E = 0.72134752f;
  const float t = detail::reciprocal_approx(fmaf(kP, fabsf(x), 1.0f));
  float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
  p = fmaf(t, p, 0.5f * 1.421413741f);
  p = fmaf(t, p, 0.5f * -0.284496736f);
  p = fmaf(t, p, 0.5f * 0.254829592f);
  return p * t * detail::exp2_approx(x * x * -kHalfLog2E);
}
__device__ __forceinline__ float exact_gelu(float x) {
  const float tail = fabsf(x) * exact_normal_tail(x);  // |x| erfc(|x| / sqrt 2) / 2
  return detail::max_or_nan(x, 0.0f) - tail;
}

// Activates two values in place. With a gated activation, these are gates, and the caller multiplies the results by
// shaped_up().
template <class Dtype, Activation A>
__device__ __forceinline__ void activate_pair(float& a, float& b, const ClampedShape& shape) {
  if constexpr (A == Activation::kRelu || A == Activation::kRelu2) {
    a = detail::max_or_nan(a, 0.0f);
    b = detail::max_or_nan(b, 0.0f);
    if constexpr (A == Activation::kRelu2) a *= a, b *= b;
  } else if constexpr (A == Activation::kClampedSwiGlu) {
    a = silu(detail::min_or_nan(a, shape.limit), shape.alpha);
    b = silu(detail::min_or_nan(b, shape.limit), shape.alpha);
  } else if constexpr (A == Activation::kGelu || A == Activation::kGeGlu) {
    if constexpr (std::is_same_v<Dtype, Bf16>) {
      a = short_gelu(a);
      b = short_gelu(b);
    } else {
      a = Dtype::kTensorCores ? gelu(a) : exact_gelu(a);
      b = Dtype::kTensorCores ? gelu(b) : exact_gelu(b);
    }
  } else if constexpr (A == Activation::kGeluTanh || A == Activation::kGeGluTanh) {
    a = gelu_tanh(a);
    b = gelu_tanh(b);
  } else {
    a = silu(a);
    b = silu(b);
  }
}

// What an activated gate is multiplied by.
template <Activation A>
__device__ __forceinline__ float shaped_up(float up, const ClampedShape& shape) {
  if constexpr (A == Activation::kClampedSwiGlu) {
    up = detail::max_or_nan(detail::min_or_nan(up, shape.limit), -shape.limit) + shape.up_offset;
  }
  return up;
}

}  // namespace flashmoe::gpu

// What a backward pass computes from pre-activations: the activations once more, and their derivatives.
#pragma once

#include "flashmoe/gpu/activate.cuh"

namespace flashmoe::gpu {

// The value of an activation at one number, and its slope there.
struct ValueAndSlope {
  float value, slope;
};

namespace detail {

__device__ __forceinline__ ValueAndSlope silu_and_slope(float x, float alpha = 1.0f) {
  constexpr float kLog2E = 1.44269504f;
  const float s = reciprocal_approx(1.0f + exp2_approx(x * (-kLog2E * alpha))), value = x * s;
  return {value, fmaf(alpha * value, 1.0f - s, s)};
}

// The slope is the normal distribution's cumulative function, plus x times the density.
template <bool kExact>
__device__ __forceinline__ ValueAndSlope gelu_and_slope(float x) {
  constexpr float kHalfLog2E = 0.72134752f, kDensityAt0 = 0.39894228f;
  const float u = fabsf(x), tail = kExact ? exact_normal_tail(x) : normal_tail(u);
  const float density = kDensityAt0 * exp2_approx(x * x * -kHalfLog2E);
  return {fmaf(-u, tail, max_or_nan(x, 0.0f)), fmaf(x, density, x < 0.0f ? tail : 1.0f - tail)};
}

// The slope is s + x s (1 - s) y', for s = 1 / (1 + exp(-y)) and the y of gelu_tanh(). s and 1 - s are computed from
// exp(-|y|), which never overflows, and without a difference that could cancel. If x^2 is above 128, exp(-|y|) is 0,
// so y' is multiplied by 0. The bound of x^2 keeps y' finite there.
__device__ __forceinline__ ValueAndSlope gelu_tanh_and_slope(float x) {
  constexpr float kLinear = 1.5957691f, kThreeCubic = 0.21406445f;
  const float square = min_or_nan(x * x, 128.0f);
  const float e = exp2_approx(gelu_tanh_exponent(fabsf(x), square)), r = reciprocal_approx(1.0f + e), tail = e * r;
  const float s = x < 0.0f ? tail : r;
  return {x * s, fmaf(x * tail * r, fmaf(square, kThreeCubic, kLinear), s)};
}

}  // namespace detail

// With a gated activation: the activated gate, and its slope. Without a gate: the activation, and its slope. At
// points without a derivative, the slope is PyTorch's: relu's is 0 at 0, and at a limit it is the slope inside the
// limit. kExact: gelu as exact fp32 layers have it (they multiply without tensor cores).
template <Activation A, bool kExact = false>
__device__ __forceinline__ ValueAndSlope differentiate(float x, const ClampedShape& shape) {
  if constexpr (A == Activation::kRelu || A == Activation::kRelu2) {
    const float value = detail::max_or_nan(x, 0.0f);
    if constexpr (A == Activation::kRelu2) return {value * value, 2.0f * value};
    return {value, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (A == Activation::kClampedSwiGlu) {
    ValueAndSlope s = detail::silu_and_slope(detail::min_or_nan(x, shape.limit), shape.alpha);
    if (x > shape.limit) s.slope = 0.0f;
    return s;
  } else if constexpr (A == Activation::kGelu || A == Activation::kGeGlu) {
    return detail::gelu_and_slope<kExact>(x);
  } else if constexpr (A == Activation::kGeluTanh || A == Activation::kGeGluTanh) {
    return detail::gelu_tanh_and_slope(x);
  } else {
    return detail::silu_and_slope(x);
  }
}

// What an activated gate is multiplied by, and its slope.
template <Activation A>
__device__ __forceinline__ ValueAndSlope differentiate_up(float up, const ClampedShape& shape) {
  const bool inside = A != Activation::kClampedSwiGlu || (up >= -shape.limit && up <= shape.limit);
  return {shaped_up<A>(up, shape), inside ? 1.0f : 0.0f};
}

}  // namespace flashmoe::gpu

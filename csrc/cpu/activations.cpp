#include "cpu/activations.h"

#include <bit>
#include <cmath>

namespace flashmoe::cpu {
namespace {

// e^x, to within 1 ulp for x in [-87, 88]. It replaces the C library's function, which would be a call for each
// element. The compiler vectorises this one, and its bits are the same on every machine and at every place of a row,
// whereas a library's vector and scalar versions may differ. Argument reduction and coefficients are those of expf in
// Cephes.
inline float exponential(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it to a number leaves the nearest integer in the last bits
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, with ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));  // times 2^n
}

// x[i] = x[i] / (1 + e^-y(x[i])), for a function y that grows with x and is 0 where x is 0. The exponent -y is clamped
// to [-87, 88]. Below this range the result no longer depends on it. Above, the clamped result is about x / 2^127,
// which is nearly 0 unless x is very far below zero; where y is below -2^30, x is therefore replaced by -0. The clamp
// has a loop of its own, because in a common loop the compiler computes both sides of each comparison, divisions too,
// and the loop takes three times as long.
template <class Function>
void times_sigmoid(float* x, uint64_t n, Function y) {
  constexpr uint64_t kChunk = 64;
  constexpr float kVanished = -0x1p30f;  // at y = x = kVanished the clamped result would be -2^-97
  float exponent[kChunk];
  for (uint64_t first = 0; first < n; first += kChunk) {
    float* v = x + first;
    const uint64_t count = n - first < kChunk ? n - first : kChunk;
    for (uint64_t i = 0; i < count; ++i) {
      const float from = -y(v[i]), e = from > -87.0f ? from : -87.0f;  // a NaN is clamped; its result is still NaN
      exponent[i] = e < 88.0f ? e : 88.0f;
      v[i] = from > -kVanished ? -0.0f : v[i];
    }
    for (uint64_t i = 0; i < count; ++i) v[i] = v[i] / (1.0f + exponential(exponent[i]));
  }
}

void silu(float* x, uint64_t n, float alpha = 1.0f) {
  times_sigmoid(x, n, [alpha](float v) { return alpha * v; });
}

// (1 + tanh(y / 2)) / 2 is the sigmoid of y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kLinear = 1.5957691216057308f, kCubic = 0.07135481627260025f;
void gelu_tanh(float* x, uint64_t n) {
  times_sigmoid(x, n, [](float v) { return v * (kLinear + kCubic * (v * v)); });
}

// Compares in such a way that NaN stays NaN.
void relu(float* x, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) x[i] = x[i] > 0.0f ? x[i] : (x[i] < 0.0f ? 0.0f : x[i]);
}
float clamped(float v, float low, float high) {
  return v < low ? low : (v > high ? high : v);
}

void gelu(float* x, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) x[i] = 0.5f * x[i] * std::erfc(x[i] * -0.70710678118654752f);
}

// The value and the slope of an activation at one number.
struct Point {
  float value, slope;
};

Point silu(float v, float alpha) {
  const float s = 1.0f / (1.0f + std::exp(-alpha * v));
  return {v * s, s * (1.0f + alpha * v * (1.0f - s))};
}

Point gelu(float v) {
  const float phi = 0.5f * std::erfc(v * -0.70710678118654752f);
  return {v * phi, phi + v * std::exp(-0.5f * v * v) * 0.39894228040143268f};
}

// The slope is s + v s (1 - s) y', where y is that of gelu_tanh() above and s = 1 / (1 + e^-y). Both s and 1 - s are
// computed from e^-|y|, which never overflows, so that neither is a difference of nearly equal numbers. Where v^2 is
// above 128, e^-|y| is 0, and so is the factor of y'. The bound on v^2 keeps y' finite there, because 0 times infinity
// would be NaN.
Point gelu_tanh(float v) {
  const float square = v * v < 128.0f ? v * v : 128.0f, e = std::exp(-std::fabs(v) * (kLinear + kCubic * square));
  const float r = 1.0f / (1.0f + e), tail = e * r, s = v < 0.0f ? tail : r;
  return {v * s, s + v * tail * r * (kLinear + 3.0f * kCubic * square)};
}

// The activation's value and slope at `v`, the pre-activation of the gate, or without a gate the only pre-activation.
Point activated(float v, const AgreedLayer& layer) {
  switch (layer.activation) {
    case Activation::kRelu: return {v, v > 0.0f ? 1.0f : 0.0f};
    case Activation::kRelu2: return {v * v, v > 0.0f ? 2.0f * v : 0.0f};
    case Activation::kGelu:
    case Activation::kGeGlu: return gelu(v);
    case Activation::kGeluTanh:
    case Activation::kGeGluTanh: return gelu_tanh(v);
    case Activation::kSilu:
    case Activation::kSwiGlu: return silu(v, 1.0f);
    case Activation::kClampedSwiGlu: {
      const bool inside = v <= layer.limit;
      const Point p = silu(inside ? v : layer.limit, layer.alpha);
      return {p.value, inside ? p.slope : 0.0f};
    }
  }
  return {};
}

}  // namespace

void activate(float* x, const float* up, const AgreedLayer& layer, uint64_t n) {
  switch (layer.activation) {
    case Activation::kRelu: relu(x, n); break;
    case Activation::kGelu:
    case Activation::kGeGlu: gelu(x, n); break;
    case Activation::kGeluTanh:
    case Activation::kGeGluTanh: gelu_tanh(x, n); break;
    case Activation::kSilu:
    case Activation::kSwiGlu: silu(x, n); break;
    case Activation::kRelu2:
      relu(x, n);
      for (uint64_t i = 0; i < n; ++i) x[i] *= x[i];
      break;
    case Activation::kClampedSwiGlu:
      for (uint64_t i = 0; i < n; ++i) x[i] = x[i] > layer.limit ? layer.limit : x[i];
      silu(x, n, layer.alpha);
      for (uint64_t i = 0; i < n; ++i) x[i] *= clamped(up[i], -layer.limit, layer.limit) + layer.up_offset;
      return;
  }
  if (is_gated(layer.activation)) {
    for (uint64_t i = 0; i < n; ++i) x[i] *= up[i];
  }
}

void activate_backward(const ActivationGradients& to, const float* gate, const float* up, const float* grad,
                       const AgreedLayer& layer, float scale, uint32_t n) {
  const bool clamped = layer.activation == Activation::kClampedSwiGlu;
  for (uint32_t i = 0; i < n; ++i) {
    const Point p = activated(gate[i], layer);
    const float g = scale * grad[i];
    if (up == nullptr) {
      to.gate[uint64_t{i} * to.step] = g * p.slope;
      continue;
    }
    float other = up[i];
    bool inside = true;
    if (clamped) {
      inside = other >= -layer.limit && other <= layer.limit;
      other = (other < -layer.limit ? -layer.limit : other > layer.limit ? layer.limit : other) + layer.up_offset;
    }
    to.gate[uint64_t{i} * to.step] = g * p.slope * other;
    to.up[uint64_t{i} * to.step] = inside ? g * p.value : 0.0f;
  }
}

}  // namespace flashmoe::cpu

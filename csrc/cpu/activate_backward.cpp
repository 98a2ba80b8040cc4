#include "cpu/activate_backward.h"

#include <cmath>

namespace flashmoe::cpu {
namespace {

// Of an activation of one number: its value and its slope.
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

// `v` is the gate, or all there is.
Point activated(float v, const AgreedLayer& layer) {
  switch (layer.activation) {
    case Activation::kRelu: return {v, v > 0.0f ? 1.0f : 0.0f};
    case Activation::kRelu2: return {v * v, v > 0.0f ? 2.0f * v : 0.0f};
    case Activation::kGelu:
    case Activation::kGeGlu: return gelu(v);
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

// What is between an expert's two products: activations, and their derivatives.
#pragma once

#include <cstdint>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// x[i] = activation(x[i]), times up[i] with a gate. up may be null otherwise. (In place: with a separate output, the
// compiler's check for overlap would choose the scalar loop.)
void activate(float* x, const float* up, const AgreedLayer& layer, uint64_t n);

// Pre-activations and their gradients: n gates, and n ups where there is a gate, `step` elements apart in the gradients.
struct ActivationGradients {
  float *gate, *up;
  uint32_t step;
};

// to = scale * act'(z)^T grad, of n columns, for grad [n] of the activated ones. Where act has no derivative, it is that
// of PyTorch: 0 of relu at 0, the inside's at a limit. up: null without a gate.
void activate_backward(const ActivationGradients& to, const float* gate, const float* up, const float* grad,
                       const AgreedLayer& layer, float scale, uint32_t n);

}  // namespace flashmoe::cpu

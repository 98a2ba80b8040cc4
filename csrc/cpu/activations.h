// What is computed between an expert's two products: activations, and their derivatives.
#pragma once

#include <cstdint>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// x[i] = activation(x[i]), and if the activation has a gate, this times up[i]; if it has none, `up` may be null.
// (Computed in place: with a separate output, the compiler's check for overlap would choose the scalar loop.)
void activate(float* x, const float* up, const AgreedLayer& layer, uint64_t n);

// Where the gradients of a row's pre-activations go. The n gradients of gates go to `gate`, the n gradients of ups to
// `up`. If the activation has no gate, all n gradients go to `gate`. Consecutive gradients are `step` elements apart.
struct ActivationGradients {
  float *gate, *up;
  uint32_t step;
};

// to = scale * act'(z)^T grad, for n columns, where z are the pre-activations: `gate` and `up` (null without a gate).
// grad [n] are the gradients of the activated values. Where act has no derivative, the result is PyTorch's: 0 for relu
// at 0, and at a limit the derivative inside the limit.
void activate_backward(const ActivationGradients& to, const float* gate, const float* up, const float* grad,
                       const AgreedLayer& layer, float scale, uint32_t n);

}  // namespace flashmoe::cpu

// What is computed between an expert's two products: activations, and their derivatives.
#pragma once

#include <cstdint>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// x[i] = activation(x[i]), times up[i] with a gate; without one, up may be null. (Computed in place: with a separate
// output, the compiler's check for overlap would choose the scalar loop.)
void activate(float* x, const float* up, const AgreedLayer& layer, uint64_t n);

// Where the gradients of pre-activations go: n gates and, if there is a gate, n ups. Neighbours are `step` elements
// apart.
struct ActivationGradients {
  float *gate, *up;
  uint32_t step;
};

// to = scale * act'(z)^T grad, for n columns. grad [n] are the gradients of the activated values. Where act has no
// derivative, the result is PyTorch's: 0 for relu at 0, and the derivative from inside at a limit. up: null without a
// gate.
void activate_backward(const ActivationGradients& to, const float* gate, const float* up, const float* grad,
                       const AgreedLayer& layer, float scale, uint32_t n);

}  // namespace flashmoe::cpu

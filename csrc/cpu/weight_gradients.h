// The gradients of weights and biases: sums over rows in canonical order, when a backward pass has computed all of them.
#pragma once

#include "cpu/gradients.h"

namespace flashmoe::cpu {

// Buffers of a processor, grown as needed: two operands, a sum, and rows of other types.
struct WeightBuffers {
  std::vector<float> left, right, sum, row;
  std::vector<double> bias;
};

// Takes parts (some columns of one expert's matrix each) until none is left. Each is computed by one processor, by calls of
// the BLAS that only sizes and rows decide on: its bits do not depend on who takes it, nor when.
void weight_gradients(Backward& pass, WeightBuffers& buffers);

}  // namespace flashmoe::cpu

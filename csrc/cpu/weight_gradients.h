// Computes the gradients of weights and biases: sums over rows in canonical order, once a backward pass has computed
// all rows.
#pragma once

#include "cpu/gradients.h"

namespace flashmoe::cpu {

// Buffers of a processor, which grow as needed: two operands, a sum, and rows of other types.
struct WeightBuffers {
  std::vector<float> left, right, sum, row;
  std::vector<double> bias;
};

// Takes parts (some columns of one expert's matrix each) until none is left. One processor computes each part. Only
// sizes and rows decide on its calls of the BLAS. So the bits of a part do not depend on who takes it, or when.
void weight_gradients(Backward& pass, WeightBuffers& buffers);

}  // namespace flashmoe::cpu

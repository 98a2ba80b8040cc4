// Computes the gradients of weights and biases: sums over rows in canonical order, once a backward pass has computed
// all rows.
#pragma once

#include "cpu/gradients.h"

namespace flashmoe::cpu {

// Buffers of a processor, which grow as needed: two operands, a sum, a row that is converted, and the gradient of a
// bias.
struct WeightBuffers {
  std::vector<float> left, right, sum, row;
  std::vector<double> bias;
};

// Takes parts until none is left. A part is up to 256 features of one matrix: rows of an expert's gate_up_proj, columns
// of its down_proj, or experts of the router. (The shared expert's gate is one part.) Each part is computed by one
// processor, with calls of the BLAS that depend only on the sizes and the rows. So the bits of a part do not depend on
// who takes it, or when.
void weight_gradients(Backward& pass, WeightBuffers& buffers);

}  // namespace flashmoe::cpu

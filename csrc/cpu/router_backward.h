// Computes the gradients of a token's router logits from the gradients of its weights.
#pragma once

#include <cstdint>
#include <vector>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// Adds to `grad` [E] what the token's K weights contribute. `of_weights` [K]: gradients of the weights, 0 where a
// choice was dropped. (The score of a dropped choice is still part of the sum by which all chosen scores are divided.)
// `ids` [K]: the chosen experts, dropped or not. Computes in double.
void add_logit_gradients(const LayerSpec& layer, const float* logits, const int32_t* ids, const double* of_weights,
                         float* grad, std::vector<double>& buffer);

}  // namespace flashmoe::cpu

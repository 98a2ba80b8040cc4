// From the gradients of a token's weights to those of its router logits.
#pragma once

#include <cstdint>
#include <vector>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// Adds to `grad` [E] what a token's K weights have, for `of_weights` [K], their gradients (0 where a choice was dropped:
// its score still is in the sum that divides the others). `ids` [K]: the chosen experts, dropped or not. In double.
void add_logit_gradients(const LayerSpec& layer, const float* logits, const int32_t* ids, const double* of_weights,
                         float* grad, std::vector<double>& buffer);

}  // namespace flashmoe::cpu

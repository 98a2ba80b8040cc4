// From a token's router logits to its experts and their weights (FlashDMoE, equation 5.1, and the routers that came since).
#pragma once

#include <cstdint>
#include <vector>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// Buffers of a caller of choose_experts(), grown as needed.
struct RouterBuffers {
  std::vector<float> scores, choice, group;
  std::vector<uint8_t> may, may_group;  // 1: may be chosen
};

// The experts of one token, from its logits [E], rounded where the layer rounds them: the K largest (ties: the lower
// expert), of those of the best groups, in falling order. `choice_bias`: [E]; null: none. What is -inf is chosen where nothing
// else is left. False if none can be made: a logit, or a score with its bias, is NaN or +inf, or all logits are -inf.
bool choose_experts(const LayerSpec& layer, const float* choice_bias, const float* logits, int32_t* ids, float* weights,
                    RouterBuffers& buffers);

}  // namespace flashmoe::cpu

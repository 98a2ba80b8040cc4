// Chooses a token's experts and their weights from its router logits (FlashDMoE, equation 5.1, and later routers).
#pragma once

#include <cstdint>
#include <vector>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// Buffers of a caller of choose_experts(). They grow as needed.
struct RouterBuffers {
  std::vector<float> scores, choice, group;
  std::vector<uint8_t> may, may_group;  // 1: may be chosen
};

// Chooses the experts of one token from its logits [E], which are already rounded if the layer rounds them. Of the
// experts of the best groups, these are the K with the largest logits, in falling order. If there are biases or several
// groups, they are those with the largest scores plus biases. (Of equal ones, the lower expert.) `choice_bias`: [E];
// null: none. An expert whose logit is -inf is chosen only if no other is left.
// Returns false if there is no choice: a logit, or a score with its bias, is NaN or +inf, or all logits are -inf.
bool choose_experts(const LayerSpec& layer, const float* choice_bias, const float* logits, int32_t* ids, float* weights,
                    RouterBuffers& buffers);

}  // namespace flashmoe::cpu

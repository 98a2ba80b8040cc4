#include "cpu/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/types.h"

namespace flashmoe::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

bool is_finite_or_never(float v) {
  return v < std::numeric_limits<float>::infinity();  // false for NaN
}

// Returns the index of the largest value among those that `may` allows; of equal ones, the first. Sets its element of
// `may` to 0, so that the next call takes another. `may` must allow at least one value.
uint32_t take_largest(const std::vector<float>& values, std::vector<uint8_t>& may) {
  auto best = static_cast<size_t>(std::find(may.begin(), may.end(), 1) - may.begin());
  for (size_t i = best + 1; i < values.size(); ++i) {
    if (may[i] != 0 && values[i] > values[best]) best = i;
  }
  may[best] = 0;
  return static_cast<uint32_t>(best);
}

// Replaces logits by scores, from which weights are made.
void score(const LayerSpec& layer, std::vector<float>& v) {
  if (layer.routing == Routing::kSigmoid) {
    for (float& l : v) l = 1.0f / (1.0f + std::exp(-l));
    return;
  }
  const float largest = *std::max_element(v.begin(), v.end());
  float sum = 0.0f;
  for (float& l : v) sum += l = std::exp(l - largest);
  for (float& l : v) l /= sum;
}

// Leaves in `may` only the experts of the best groups. A group is as good as the sum of its two best experts.
void leave_best_groups(const LayerSpec& layer, RouterBuffers& buffers) {
  const std::vector<float>& choice = buffers.choice;
  std::vector<float>& group = buffers.group;
  const uint32_t each = layer.experts / layer.groups;
  group.resize(layer.groups);
  for (uint32_t g = 0; g < layer.groups; ++g) {
    float best = kNever, second = kNever;
    for (uint32_t e = g * each; e < (g + 1) * each; ++e) {
      second = std::max(second, std::min(best, choice[e]));
      best = std::max(best, choice[e]);
    }
    group[g] = each == 1 ? best : best + second;
  }
  buffers.may_group.assign(layer.groups, 1);
  for (uint32_t n = 0; n < layer.groups; ++n) {
    const uint32_t best = take_largest(group, buffers.may_group);
    if (n >= layer.top_groups) std::fill_n(buffers.may.begin() + best * each, each, uint8_t{0});
  }
}

}  // namespace

bool choose_experts(const LayerSpec& layer, const float* choice_bias, const float* logits, int32_t* ids, float* weights,
                    RouterBuffers& buffers) {
  const uint32_t experts = layer.experts;
  std::vector<float>&choice = buffers.choice, &scores = buffers.scores;
  choice.assign(logits, logits + experts);
  if (!std::all_of(choice.begin(), choice.end(), is_finite_or_never)) return false;
  if (*std::max_element(choice.begin(), choice.end()) == kNever) return false;
  scores = choice;
  score(layer, scores);
  // By default experts are chosen by logits: scores grow with logits, so logits give the same order, and they
  // distinguish more experts. But if there are biases or groups, experts are chosen by scores, because biases are added
  // to scores and a group's sum is one of scores.
  for (uint32_t e = 0; (choice_bias != nullptr || layer.groups > 1) && e < experts; ++e) {
    const float value = scores[e] + (choice_bias != nullptr ? choice_bias[e] : 0.0f);
    if (!is_finite_or_never(value)) return false;
    choice[e] = logits[e] == kNever ? kNever : value;
  }
  buffers.may.assign(experts, 1);
  if (layer.groups > 1) leave_best_groups(layer, buffers);

  // With a softmax and no choice_bias, a score near the largest one is among the chosen, so the sum of these is not 0.
  float sum = layer.routing == Routing::kSigmoid ? kLeastSum : 0.0f;
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    ids[k] = static_cast<int32_t>(take_largest(choice, buffers.may));
    weights[k] = scores[static_cast<size_t>(ids[k])];
    sum += weights[k];
  }
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    if (layer.renormalize) weights[k] /= sum;
    weights[k] *= layer.routed_scale;
  }
  return true;
}

}  // namespace flashmoe::cpu

#include "cpu/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/types.h"

namespace flashmoe::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// What the weights are made of.
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

// Leaves to `choice` the experts of the best groups: those whose two best experts have the largest sum.
void leave_best_groups(const LayerSpec& layer, std::vector<float>& choice, std::vector<float>& group) {
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
  for (uint32_t n = 0; n < layer.groups; ++n) {
    const auto best = std::max_element(group.begin(), group.end());  // the first of equals
    const auto first = choice.begin() + static_cast<uint32_t>(best - group.begin()) * each;
    if (n >= layer.top_groups) std::fill_n(first, each, kNever);
    *best = kNever;
  }
}

}  // namespace

bool choose_experts(const LayerSpec& layer, const float* choice_bias, const float* logits, int32_t* ids, float* weights,
                    RouterBuffers& buffers) {
  const uint32_t experts = layer.experts;
  std::vector<float>&choice = buffers.choice, &scores = buffers.scores;
  choice.assign(logits, logits + experts);
  if (!std::all_of(choice.begin(), choice.end(), [](float v) { return std::isfinite(v); })) return false;
  scores = choice;
  score(layer, scores);
  // Scores grow with logits, which tell apart more experts. But biases are of scores, and so are groups' sums.
  if (choice_bias != nullptr || layer.groups > 1) choice = scores;
  for (uint32_t e = 0; choice_bias != nullptr && e < experts; ++e) {
    choice[e] += choice_bias[e];
    if (!std::isfinite(choice[e])) return false;
  }
  if (layer.groups > 1) leave_best_groups(layer, choice, buffers.group);

  float sum = layer.routing == Routing::kSigmoid ? kLeastSum : 0.0f;  // scores of a softmax are not all 0
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    const auto best = std::max_element(choice.begin(), choice.end());  // the first of equals
    ids[k] = static_cast<int32_t>(best - choice.begin());
    weights[k] = scores[static_cast<size_t>(ids[k])];
    sum += weights[k];
    *best = kNever;
  }
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    if (layer.renormalize) weights[k] /= sum;
    weights[k] *= layer.routed_scale;
  }
  return true;
}

}  // namespace flashmoe::cpu

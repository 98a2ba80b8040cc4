#include "cpu/router_backward.h"

#include <algorithm>
#include <cmath>

namespace flashmoe::cpu {

void add_logit_gradients(const LayerSpec& layer, const float* logits, const int32_t* ids, const double* of_weights,
                         float* grad, std::vector<double>& scores) {
  const bool sigmoid = layer.routing == Routing::kSigmoid;
  const double largest = *std::max_element(logits, logits + layer.experts);
  double all = 0.0;
  scores.resize(layer.experts);
  for (uint32_t e = 0; e < layer.experts; ++e) {
    scores[e] = sigmoid ? 1.0 / (1.0 + std::exp(-double{logits[e]})) : std::exp(logits[e] - largest);
    all += scores[e];
  }
  for (double& s : scores) s /= sigmoid ? 1.0 : all;

  double sum = sigmoid ? double{kLeastSum} : 0.0, weighted = 0.0;  // of the chosen scores; of these times of_weights
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    const double score = scores[static_cast<size_t>(ids[k])];
    sum += score;
    weighted += score * of_weights[k];
  }
  // The gradient of a chosen score is (of_weights - common) / divisor. With a softmax each logit moves all scores; but
  // where the chosen ones are divided by their sum, what they lose together cancels.
  const double divisor = layer.renormalize ? sum : 1.0, common = layer.renormalize ? weighted / sum : 0.0;
  const double moved = sigmoid || layer.renormalize ? 0.0 : weighted;
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    const auto e = static_cast<size_t>(ids[k]);
    const double slope = sigmoid ? scores[e] * (1.0 - scores[e]) : scores[e];
    grad[e] += static_cast<float>(layer.routed_scale * slope * (of_weights[k] - common) / divisor);
  }
  for (uint32_t e = 0; moved != 0.0 && e < layer.experts; ++e) {
    grad[e] -= static_cast<float>(layer.routed_scale * scores[e] * moved);
  }
}

}  // namespace flashmoe::cpu

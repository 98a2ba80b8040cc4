#include "cpu/router_backward.h"

#include <algorithm>
#include <cmath>

namespace flashmoe::cpu {

void add_logit_gradients(const LayerSpec& layer, const float* logits, const int32_t* ids, const double* of_weights,
                         float* grad, std::vector<double>& buffer) {
  const bool sigmoid = layer.routing == Routing::kSigmoid;
  const double largest = *std::max_element(logits, logits + layer.experts);
  double all = 0.0;
  buffer.resize(2 * size_t{layer.experts});
  double *const scores = buffer.data(), *const sums = scores + layer.experts;
  for (uint32_t e = 0; e < layer.experts; ++e) {
    scores[e] = sigmoid ? 1.0 / (1.0 + std::exp(-double{logits[e]})) : std::exp(logits[e] - largest);
    all += scores[e];
  }
  for (uint32_t e = 0; e < layer.experts; ++e) scores[e] /= sigmoid ? 1.0 : all;

  double sum = sigmoid ? double{kLeastSum} : 0.0, weighted = 0.0;  // over the chosen experts: sum of scores; sum of
                                                                   // score times of_weights
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    const double score = scores[static_cast<size_t>(ids[k])];
    sum += score;
    weighted += score * of_weights[k];
  }
  // The gradient of a chosen score is (of_weights - common) / divisor. With a softmax each logit also moves all other
  // scores, which adds -score * moved. But if the chosen scores are divided by their sum, their common change cancels,
  // so `moved` is 0.
  const double divisor = layer.renormalize ? sum : 1.0, common = layer.renormalize ? weighted / sum : 0.0;
  const double moved = sigmoid || layer.renormalize ? 0.0 : weighted;
  for (uint32_t e = 0; e < layer.experts; ++e) sums[e] = -scores[e] * moved;
  for (uint32_t k = 0; k < layer.top_k; ++k) {
    const auto e = static_cast<size_t>(ids[k]);
    const double slope = sigmoid ? scores[e] * (1.0 - scores[e]) : scores[e];
    sums[e] += slope * (of_weights[k] - common) / divisor;  // if a score is near 1, the two terms may nearly cancel
  }
  for (uint32_t e = 0; e < layer.experts; ++e) grad[e] += static_cast<float>(layer.routed_scale * sums[e]);
}

}  // namespace flashmoe::cpu

// The operator in fp64, written as plainly as possible. The CPU engine's outputs are compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/types.h"

namespace flashmoe::test {

struct Matrix {
  uint32_t columns = 0;
  std::vector<double> values;
  const double* row(uint64_t r) const { return &values[r * columns]; }
};

// The experts of all ranks, and the router.
struct ReferenceLayer {
  uint32_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  Activation activation = Activation::kSwiGlu;
  bool renormalize = true;
  Matrix gate_up;  // [E * 2I, H] with a gate, else [E * I, H]
  Matrix down;     // [E * H, I]
  Matrix router;   // [E, H]; empty: routing is given
};

inline double dot(const double* a, const double* b, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

inline double activate(Activation a, double gate, double up) {
  switch (a) {
    case Activation::kRelu: return std::max(gate, 0.0);
    case Activation::kGelu: return 0.5 * gate * std::erfc(-gate * M_SQRT1_2);
    case Activation::kSilu: return gate / (1 + std::exp(-gate));
    case Activation::kSwiGlu: return activate(Activation::kSilu, gate, up) * up;
    case Activation::kGeGlu: return activate(Activation::kGelu, gate, up) * up;
    case Activation::kGeluTanh: {
      const double t = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
      return gate / (1 + std::exp(-2 * t));  // = gate (1 + tanh(t)) / 2, without its cancellation
    }
    case Activation::kGeGluTanh: return activate(Activation::kGeluTanh, gate, up) * up;
    case Activation::kRelu2: return gate > 0 ? gate * gate : 0;
    case Activation::kClampedSwiGlu: break;  // tests do not draw it, because it has parameters
  }
  return NAN;
}

// Adds weight * expert(x) to out, and the sum of the magnitudes of its terms to scale. Rounding errors are compared
// with scale.
inline void add_expert(const ReferenceLayer& l, uint32_t expert, double weight, const double* x, double* out,
                       double* scale) {
  const bool gated = is_gated(l.activation);
  const uint64_t first = uint64_t{expert} * l.intermediate * (gated ? 2 : 1);
  std::vector<double> hidden(l.intermediate);
  for (uint32_t i = 0; i < l.intermediate; ++i) {
    const double up = gated ? dot(l.gate_up.row(first + l.intermediate + i), x, l.hidden) : 0;
    hidden[i] = activate(l.activation, dot(l.gate_up.row(first + i), x, l.hidden), up);
  }
  for (uint32_t h = 0; h < l.hidden; ++h) {
    const double* row = l.down.row(uint64_t{expert} * l.hidden + h);
    out[h] += weight * dot(row, hidden.data(), l.intermediate);
    for (uint32_t i = 0; i < l.intermediate; ++i) scale[h] += std::fabs(weight * row[i] * hidden[i]);
  }
}

// Softmax and top-k of one token. Returns false if two candidates are so close that rounding may decide between them.
inline bool route(const ReferenceLayer& l, const double* x, int32_t* ids, double* weights) {
  std::vector<double> logits(l.experts);
  for (uint32_t e = 0; e < l.experts; ++e) logits[e] = dot(l.router.row(e), x, l.hidden);
  std::vector<uint32_t> order(l.experts);
  for (uint32_t e = 0; e < l.experts; ++e) order[e] = e;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
  double all = 0, chosen = 0;
  for (uint32_t e = 0; e < l.experts; ++e) {
    const double score = std::exp(logits[order[e]] - logits[order[0]]);
    all += score;
    if (e < l.top_k) {
      ids[e] = static_cast<int32_t>(order[e]);
      weights[e] = score;
      chosen += score;
    }
    if (e != 0 && e <= l.top_k && logits[order[e - 1]] - logits[order[e]] < 1e-5) return false;
  }
  for (uint32_t k = 0; k < l.top_k; ++k) weights[k] /= l.renormalize ? chosen : all;
  return true;
}

}  // namespace flashmoe::test

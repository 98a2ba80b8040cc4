// Random calls of the CPU engine on four ranks, with changing shapes and options, and their reference in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "check.h"
#include "cpu/context.h"
#include "flashmoe/spec/enums.h"
#include "limits.h"
#include "reference.h"

namespace flashmoe::test {

inline constexpr uint32_t kRanks = 4;
inline constexpr uint32_t kMaxTokens = 40;

inline Limits call_limits() {
  return in_fp32({.ranks = kRanks,
                  .max_tokens = kMaxTokens,
                  .hidden = 24,
                  .experts = 12,
                  .max_local_experts = 12,
                  .top_k = 4,
                  .intermediate = 24});
}

// Random numbers of an element type: as they lie in memory, and as doubles of the same values.
struct Tensor {
  Tensor() = default;
  template <class Random>
  Tensor(uint64_t rows, uint32_t columns, DType t, Random& random) {
    if (rows == 0) return;
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float> values(rows * columns);
    for (float& v : values) v = uniform(random);
    bytes.resize(values.size() * element_bytes(t));
    cpu::narrow(bytes.data(), values.data(), t, values.size());
    cpu::widen(values.data(), bytes.data(), t, values.size());
    matrix = {columns, {values.begin(), values.end()}};
  }
  std::vector<uint8_t> bytes;
  Matrix matrix;
};

// One call on all ranks. It is drawn from its number, each rank computes it on a thread of its own, and the results
// are compared with the reference.
struct Work {
  Work(uint64_t number, const Limits& l) {
    std::mt19937_64 random(number);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    dtype = static_cast<DType>(below(3));
    layer.hidden = 4 * (1 + below(l.hidden / 4));
    layer.intermediate = 4 * (1 + below(l.intermediate / 4));
    layer.experts = 1 + below(l.experts);
    layer.top_k = 1 + below(min_of(l.top_k, layer.experts));
    do {
      layer.activation = static_cast<Activation>(below(kValues<Activation>));
    } while (layer.activation == Activation::kClampedSwiGlu);  // its parameters are not drawn
    layer.renormalize = below(2) == 0;
    const uint32_t halves = is_gated(layer.activation) ? 2 : 1;
    gate_up = Tensor(uint64_t{layer.experts} * layer.intermediate * halves, layer.hidden, dtype, random);
    down = Tensor(uint64_t{layer.experts} * layer.hidden, layer.intermediate, dtype, random);
    if (below(2) == 0) router = Tensor(layer.experts, layer.hidden, dtype, random);
    layer.gate_up = gate_up.matrix;
    layer.down = down.matrix;
    layer.router = router.matrix;

    spec.hidden = layer.hidden;
    spec.intermediate = layer.intermediate;
    spec.experts = layer.experts;
    spec.top_k = layer.top_k;
    spec.activation = layer.activation;
    spec.renormalize = layer.renormalize;
    spec.routing = routed() ? Routing::kSoftmax : Routing::kGiven;
    spec.set_types(dtype);
    spec.return_mode = below(2) == 0 ? ReturnMode::kDirect : ReturnMode::kReduced;
    spec.capacity_factor = below(3) == 0 ? 0.25f * static_cast<float>(1 + below(6)) : 0.0f;
    options.groups = 1 + below(kMaxGroups);
    options.order = {.gemm1_lag = 4 * below(3),
                     .raster = 1 + below(4),
                     .window = below(4),
                     .gemm1_lists = 1 + below(kMaxGemm1Lists),
                     .own_first = 1 + below(3),
                     .link_clusters = below(l.processors)};
    options.perturbation = below(4) == 0 ? random() | 1 : 0;
    // Experts of a rank need not be neighbours, and a rank may have none.
    for (uint32_t e = 0; e < layer.experts; ++e) {
      options.placement.expert(number % 3 == 0 ? below(kRanks) : e % kRanks);
      // Some experts have a copy on a second rank.
      const uint32_t first = options.placement.of(e)[0];
      if (number % 4 == 0 && below(2) == 0) options.placement.copy((first + 1 + below(kRanks - 1)) % kRanks);
    }
    for (uint32_t p = 0; p < kRanks; ++p) {
      std::vector<uint8_t>& g = local_gate_up[p];
      std::vector<uint8_t>& d = local_down[p];
      const size_t g_bytes = gate_up.bytes.size() / layer.experts, d_bytes = down.bytes.size() / layer.experts;
      for (uint32_t e = 0; e < layer.experts; ++e) {
        const auto holders = options.placement.of(e);
        if (std::find(holders.begin(), holders.end(), p) == holders.end()) continue;
        g.insert(g.end(), &gate_up.bytes[e * g_bytes], &gate_up.bytes[e * g_bytes] + g_bytes);
        d.insert(d.end(), &down.bytes[e * d_bytes], &down.bytes[e * d_bytes] + d_bytes);
      }
      tokens[p] = below(4) == 0 ? below(2) : below(kMaxTokens + 1);
      x[p] = Tensor(tokens[p], layer.hidden, dtype, random);
      out[p].assign(x[p].bytes.size(), 0xff);  // NaN, so that a row that is not written shows
      std::vector<int32_t> all(layer.experts);
      std::iota(all.begin(), all.end(), 0);
      for (uint32_t t = 0; t < tokens[p]; ++t) {
        std::shuffle(all.begin(), all.end(), random);
        ids[p].insert(ids[p].end(), all.begin(), all.begin() + layer.top_k);
        for (uint32_t k = 0; k < layer.top_k; ++k) weights[p].push_back(static_cast<float>(1 + below(8)) / 8.0f);
      }
    }
  }

  bool routed() const { return !router.bytes.empty(); }

  void run(uint32_t p, cpu::Context& context) {
    cpu::Layer l;
    l.spec = spec;
    l.x = x[p].bytes.data();
    l.gate_up = local_gate_up[p].data();
    l.down = local_down[p].data();
    if (routed()) {
      l.router = router.bytes.data();
    } else {
      l.topk_ids = ids[p].data();
      l.topk_weights = weights[p].data();
    }
    l.out = out[p].data();
    cpu::CallOptions o = options;
    o.tokens = tokens[p];
    context.call(l, o);
  }

  // Compares the result of rank p. Returns false if this is not possible, because a rounding error may decide which
  // experts the router chooses.
  bool verify(uint32_t p) const {
    if (tokens[p] == 0) return true;
    const uint32_t k = layer.top_k, h = layer.hidden;
    std::vector<int32_t> chosen = ids[p];
    std::vector<double> weight(weights[p].begin(), weights[p].end());
    for (uint32_t t = 0; t < tokens[p] && routed(); ++t) {
      if (!route(layer, x[p].matrix.row(t), &chosen[t * k], &weight[t * k])) return false;
    }
    drop(p, chosen);
    std::vector<float> got(uint64_t{tokens[p]} * h);
    cpu::widen(got.data(), out[p].data(), dtype, got.size());
    // On its way a value is rounded to the type four times, each time by a relative error of at most 2^-8 (bf16).
    // Sums are accumulated in fp32.
    const double tolerance = dtype == DType::kBFloat16 ? 0.02 : dtype == DType::kFloat16 ? 0.0025 : 1e-5;
    for (uint32_t t = 0; t < tokens[p]; ++t) {
      std::vector<double> expected(h), scale(h);
      for (uint32_t i = t * k; i < (t + 1) * k; ++i) {
        if (chosen[i] < 0) continue;
        add_expert(layer, static_cast<uint32_t>(chosen[i]), weight[i], x[p].matrix.row(t), expected.data(),
                   scale.data());
      }
      for (uint32_t j = 0; j < h; ++j) {
        CHECK(std::fabs(got[t * h + j] - expected[j]) <= tolerance * scale[j] + 1e-6);
      }
    }
    return true;
  }

  // GShard's capacity: of a rank's choices of an expert, the first stay, in the order of tokens.
  void drop(uint32_t p, std::vector<int32_t>& chosen) const {
    if (spec.capacity_factor == 0.0f) return;
    const double share = static_cast<double>(spec.capacity_factor) * tokens[p] * layer.top_k / layer.experts;
    std::vector<double> used(layer.experts);
    for (int32_t& id : chosen) {
      if (used[static_cast<size_t>(id)]++ >= std::ceil(share)) id = -1;
    }
  }

  DType dtype;
  ReferenceLayer layer;
  Tensor gate_up, down, router;
  LayerSpec spec;
  cpu::CallOptions options;
  uint32_t tokens[kRanks];
  Tensor x[kRanks];
  std::vector<uint8_t> local_gate_up[kRanks], local_down[kRanks], out[kRanks];
  std::vector<int32_t> ids[kRanks];
  std::vector<float> weights[kRanks];
};

}  // namespace flashmoe::test

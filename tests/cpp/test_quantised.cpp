// A layer in FP8 on the CPU engine. Rows are quantised once, and multiplied in blocks of 128 elements. So with
// `direct`, ranks, schedule and tiles do not change a bit of the result. (tests/test_quantised.py checks that the
// result is right.)
#include <cmath>
#include <random>
#include <thread>

#include "check.h"
#include "cpu/context.h"
#include "limits.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;

// Neither H nor I is a multiple of 128, so the last scale of a row is for fewer elements.
constexpr uint32_t kTokens = 60, kHidden = 200, kIntermediate = 136, kExperts = 8, kTopK = 3;
constexpr uint32_t kUpBlocks = 2 * scale_blocks(kIntermediate) * scale_blocks(kHidden);
constexpr uint32_t kDownBlocks = scale_blocks(kHidden) * scale_blocks(kIntermediate);

Limits limits(uint32_t ranks) {
  Limits l = in_fp32({.ranks = ranks,
                      .max_tokens = kTokens,
                      .hidden = kHidden,
                      .experts = kExperts,
                      .max_local_experts = kExperts / ranks,
                      .top_k = kTopK,
                      .intermediate = kIntermediate});
  l.x_bytes = l.intermediate_bytes = 1;
  return l;
}

// The tokens of all ranks, one behind the other, and the weights of all experts.
struct Work {
  Work()
      : x(kTokens * kHidden),
        gate_up(kExperts * 2 * kIntermediate * kHidden),
        down(kExperts * kHidden * kIntermediate) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f), positive(0.5e-3f, 1e-3f);
    for (float& v : x) v = uniform(random);
    for (uint8_t& e : gate_up) e = float_to_e4m3(448.0f * uniform(random));
    for (uint8_t& e : down) e = float_to_e4m3(448.0f * uniform(random));
    for (uint32_t i = 0; i < kExperts * kUpBlocks; ++i) gate_up_scale.push_back(positive(random));
    for (uint32_t i = 0; i < kExperts * kDownBlocks; ++i) down_scale.push_back(positive(random));
    for (uint32_t token = 0; token < kTokens; ++token) {
      for (uint32_t k = 0; k < kTopK; ++k) ids.push_back(static_cast<int32_t>((token * token + 3 * k) % kExperts));
    }
    weights.assign(ids.size(), 1.0f / kTopK);
  }

  std::vector<float> x;
  std::vector<uint8_t> gate_up, down;
  std::vector<float> gate_up_scale, down_scale, weights;
  std::vector<int32_t> ids;
};

// Runs `calls` calls on `ranks` ranks, and returns y [T, H] of each call. The experts of a rank have successive
// numbers. The schedule of all calls but the first is perturbed.
std::vector<std::vector<float>> run(const Work& work, uint32_t ranks, uint32_t tile_rows, uint32_t columns,
                                    ReturnMode mode, uint32_t calls) {
  const Limits l = limits(ranks);
  std::vector<std::unique_ptr<host::Group>> groups = host::make_thread_groups(ranks, member_heap_bytes(l));
  std::vector<std::vector<float>> all(calls, std::vector<float>(kTokens * kHidden, NAN));
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < ranks; ++p) {
    threads.emplace_back([&, p] {
      Context context(std::move(groups[p]), p, l, 120'000'000'000);
      context.set_tile(tile_rows, columns);
      const uint32_t first = kTokens * p / ranks, expert = kExperts / ranks * p;
      Layer layer;
      layer.spec.hidden = kHidden;
      layer.spec.intermediate = kIntermediate;
      layer.spec.experts = kExperts;
      layer.spec.top_k = kTopK;
      layer.spec.return_mode = mode;
      layer.spec.set_types(DType::kFloat32);
      layer.spec.token_type = layer.spec.weight_type = layer.spec.intermediate_type = DType::kFloat8E4M3;
      layer.spec.weight_scales = WeightScales::kBlock;
      layer.spec.routing = Routing::kGiven;
      layer.x = &work.x[first * kHidden];
      layer.gate_up = &work.gate_up[expert * 2 * kIntermediate * kHidden];
      layer.down = &work.down[expert * kHidden * kIntermediate];
      layer.gate_up_scale = &work.gate_up_scale[expert * kUpBlocks];
      layer.down_scale = &work.down_scale[expert * kDownBlocks];
      layer.topk_ids = &work.ids[first * kTopK];
      layer.topk_weights = &work.weights[first * kTopK];
      CallOptions o;
      o.tokens = kTokens * (p + 1) / ranks - first;
      o.order = {.gemm1_lag = 3, .raster = 2, .window = 1};
      for (uint32_t e = 0; e < kExperts; ++e) o.placement.expert(e / (kExperts / ranks));
      for (uint32_t i = 0; i < calls; ++i) {
        o.perturbation = i;
        layer.out = &all[i][first * kHidden];
        context.call(layer, o);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return all;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using flashmoe::ReturnMode;
  const Work work;
  const std::vector<float> first = run(work, 1, 1024, 256, ReturnMode::kDirect, 1)[0];
  float largest = 0.0f;
  for (const float v : first) {
    CHECK(std::isfinite(v));
    largest = std::fmax(largest, std::fabs(v));
  }
  CHECK(largest > 0.0f);
  uint32_t calls = 0;
  for (const uint32_t ranks : {1u, 2u, 4u}) {
    for (const uint32_t tile_rows : {1u, 5u, 1024u}) {
      for (const ReturnMode mode : {ReturnMode::kDirect, ReturnMode::kReduced}) {
        for (const std::vector<float>& y : run(work, ranks, tile_rows, 256, mode, 6)) {
          CHECK(mode == ReturnMode::kReduced || y == first);
          for (size_t i = 0; i < y.size(); ++i) CHECK(std::fabs(y[i] - first[i]) <= 1e-5f * largest);
          ++calls;
        }
      }
    }
  }
  std::printf("%u calls, rows of the same bits\n", calls);
}

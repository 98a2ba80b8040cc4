// What docs/extending.md says, done: the CPU engine with the program kForwardAndOuter, whose product kOuter keeps hidden^T x of
// each local expert's rows. Compared with a reference in fp64; the same bits whatever the ranks, the schedule and the tiles.
#include <cmath>
#include <random>
#include <thread>

#include "check.h"
#include "cpu/context.h"
#include "limits.h"
#include "reference.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;

static_assert(kProducts == 3 && kExpertProducts == 1 && kRowCopies == 2);

constexpr uint32_t kTokens = 60, kHidden = 20, kIntermediate = 12, kExperts = 8, kTopK = 3;
constexpr uint32_t kChosen = kExperts - 1;  // nobody chooses the last one, whose matrix is zero

Limits limits(uint32_t ranks) {
  return in_fp32({.ranks = ranks,
                  .max_tokens = kTokens,
                  .hidden = kHidden,
                  .experts = kExperts,
                  .max_local_experts = kExperts / ranks,
                  .top_k = kTopK,
                  .intermediate = kIntermediate});
}

// Random numbers of a type, in its memory, and as what they are.
struct Values {
  Values(size_t n, DType t, std::mt19937_64& random) : bytes(n * element_bytes(t)), floats(n) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (float& v : floats) v = uniform(random);
    narrow(bytes.data(), floats.data(), t, n);
    widen(floats.data(), bytes.data(), t, n);
  }
  std::vector<uint8_t> bytes;
  std::vector<float> floats;
};

// All ranks' tokens, one behind the other, and all experts'.
struct Work {
  explicit Work(DType t)
      : dtype(t),
        x(kTokens * kHidden, t, random),
        gate_up(kExperts * 2 * kIntermediate * kHidden, t, random),
        down(kExperts * kHidden * kIntermediate, t, random) {
    std::vector<int32_t> experts(kChosen);
    for (uint32_t e = 0; e < kChosen; ++e) experts[e] = static_cast<int32_t>(e);
    for (uint32_t token = 0; token < kTokens; ++token) {
      std::shuffle(experts.begin(), experts.end(), random);
      ids.insert(ids.end(), experts.begin(), experts.begin() + kTopK);
      weights.insert(weights.end(), kTopK, 1.0f / kTopK);
    }
  }

  // kept[e][i][h] as it should be, and the sum of what it is a sum of.
  void reference(std::vector<double>& kept, std::vector<double>& scale) const {
    kept.assign(kExperts * kIntermediate * kHidden, 0.0);
    scale = kept;
    for (uint32_t choice = 0; choice < kTokens * kTopK; ++choice) {
      const float* row = &x.floats[choice / kTopK * kHidden];
      const auto expert = static_cast<uint32_t>(ids[choice]);
      const float* gates = &gate_up.floats[expert * 2 * kIntermediate * kHidden];
      for (uint32_t i = 0; i < kIntermediate; ++i) {
        double gate = 0, up = 0;
        for (uint32_t h = 0; h < kHidden; ++h) {
          gate += double{gates[i * kHidden + h]} * row[h];
          up += double{gates[(kIntermediate + i) * kHidden + h]} * row[h];
        }
        const double hidden = test::activate(Activation::kSwiGlu, gate, up);
        for (uint32_t h = 0; h < kHidden; ++h) {
          const uint32_t at = (expert * kIntermediate + i) * kHidden + h;
          kept[at] += hidden * row[h];
          scale[at] += std::fabs(hidden * row[h]);
        }
      }
    }
  }

  std::mt19937_64 random{7};
  DType dtype;
  Values x, gate_up, down;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

struct Results {
  std::vector<float> kept;   // [E, I, H]
  std::vector<uint8_t> out;  // [T, H]
  bool operator==(const Results&) const = default;
};

// So many calls, all of the same work, on so many ranks, whose experts are neighbours; the schedule is perturbed in all but the
// first. Ranks run ahead of one another. The results of all calls.
std::vector<Results> run(const Work& work, uint32_t ranks, uint32_t tile_rows, uint32_t columns, ReturnMode mode,
                         uint32_t calls) {
  const Limits l = limits(ranks);
  std::vector<std::unique_ptr<host::Group>> groups = host::make_thread_groups(ranks, member_heap_bytes(l));
  std::vector<Results> all(calls, {std::vector<float>(kExperts * kIntermediate * kHidden, NAN),
                                   std::vector<uint8_t>(work.x.bytes.size(), 0xff)});
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < ranks; ++p) {
    threads.emplace_back([&, p] {
      Context context(std::move(groups[p]), p, l, 120'000'000'000);
      context.set_tile(tile_rows, columns);
      const uint32_t first = kTokens * p / ranks, expert = kExperts / ranks * p;
      const size_t bytes = element_bytes(work.dtype);
      Layer layer;
      layer.spec = {
          {.hidden = kHidden, .intermediate = kIntermediate, .experts = kExperts, .top_k = kTopK, .return_mode = mode}};
      layer.spec.set_types(work.dtype);
      layer.spec.routing = Routing::kGiven;
      layer.x = &work.x.bytes[first * kHidden * bytes];
      layer.gate_up = &work.gate_up.bytes[expert * 2 * kIntermediate * kHidden * bytes];
      layer.down = &work.down.bytes[expert * kHidden * kIntermediate * bytes];
      layer.topk_ids = &work.ids[first * kTopK];
      layer.topk_weights = &work.weights[first * kTopK];
      CallOptions o;
      o.tokens = kTokens * (p + 1) / ranks - first;
      o.order = {.gemm1_lag = 3, .raster = 2, .window = 1};
      for (uint32_t e = 0; e < kExperts; ++e) o.placement.expert(e / (kExperts / ranks));
      for (uint32_t i = 0; i < calls; ++i) {
        o.perturbation = i;
        layer.out = &all[i].out[first * kHidden * bytes];
        layer.kept = &all[i].kept[expert * kIntermediate * kHidden];
        context.call(layer, o);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return all;
}

void check(DType dtype) {
  const Work work(dtype);
  std::vector<double> expected, scale;
  work.reference(expected, scale);
  const Results first = run(work, 1, 1024, 256, ReturnMode::kDirect, 1)[0];
  // Intermediate rows are rounded once to the type.
  const double tolerance = dtype == DType::kBFloat16 ? 0.004 : dtype == DType::kFloat16 ? 0.0005 : 1e-6;
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(std::fabs(first.kept[i] - expected[i]) <= tolerance * scale[i]);
  }
  uint32_t calls = 0;
  for (const uint32_t ranks : {1u, 2u, 4u}) {
    for (const uint32_t tile_rows : {1u, 5u, 1024u}) {
      for (const ReturnMode mode : {ReturnMode::kDirect, ReturnMode::kReduced}) {
        for (const Results& r : run(work, ranks, tile_rows, 8, mode, 8)) {
          CHECK(r.kept == first.kept);
          CHECK(mode == ReturnMode::kReduced || r.out == first.out);
          ++calls;
        }
      }
    }
  }
  std::printf("type %u: %u calls, kept matrices of the same bits\n", static_cast<uint32_t>(dtype), calls);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  for (const auto dtype : {flashmoe::DType::kFloat32, flashmoe::DType::kBFloat16, flashmoe::DType::kFloat16}) {
    flashmoe::test::check(dtype);
  }
}

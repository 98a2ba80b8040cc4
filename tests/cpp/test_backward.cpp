// Backward passes of the CPU engine on three ranks of two processors each, in changing shapes. Each pair of calls is
// run three times: two forward calls, then their gradients, those of the second call first. All bits must be the same
// in the three runs. The second and the third run have a perturbed schedule, and the third has tiles of fewer rows.
// The runs of a pair alternate between keeping x and dispatching it again. The test is for the sanitizers; Python's
// tests check that gradients are right.
//
// All runs have tasks of the same number of columns, because on processors without AVX-512, OpenBLAS rounds a column
// of a product differently if the call has another width. The engine only makes rows independent of their place
// (cpu/gemm.h).
//
//   test_backward [pairs of calls]
#include <cstdlib>
#include <random>
#include <thread>

#include "check.h"
#include "cpu/context.h"
#include "limits.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;

constexpr uint32_t kRanks = 3, kMaxTokens = 30, kRuns = 3, kTileColumns = 4;
using Floats = std::vector<float>;

Limits limits() {
  return in_fp32({.ranks = kRanks,
                  .max_tokens = kMaxTokens,
                  .hidden = 20,
                  .experts = 9,
                  .max_local_experts = 9,
                  .top_k = 4,
                  .shared = 2,
                  .redispatch = 1,
                  .intermediate = 12});
}

// One call as one rank makes it; every rank draws the same layer.
struct Work {
  Work(uint64_t number, uint32_t rank, const Limits& l) : random_(number) {
    spec.hidden = 1 + below(l.hidden);
    spec.intermediate = 1 + below(l.intermediate);
    spec.experts = 1 + below(l.experts);
    spec.top_k = 1 + below(min_of(l.top_k, spec.experts));
    spec.activation = static_cast<Activation>(below(kValues<Activation>));
    spec.routing = below(2) == 0 ? Routing::kSoftmax : Routing::kSigmoid;
    spec.return_mode = static_cast<ReturnMode>(below(2));
    spec.capacity_factor = below(3) == 0 ? 0.5 : 0.0;
    spec.weights_on_input = below(3) == 0;
    spec.transposed = below(2) == 0;
    spec.shared = below(3);
    spec.shared_gate = spec.shared != 0 && !spec.weights_on_input;
    spec.limit = 1.0f;
    spec.set_types(DType::kFloat32);
    accumulates = below(2) == 0;
    for (uint32_t e = 0; e < spec.experts; ++e) {
      const uint32_t first = below(kRanks);
      options.placement.expert(first);
      if (below(4) == 0) options.placement.copy((first + 1) % kRanks);
    }
    uint32_t local = 0;
    for (uint32_t e = 0; e < spec.experts; ++e) {
      for (const uint32_t q : options.placement.of(e)) local += q == rank ? 1 : 0;
    }
    random_.seed(number * kRanks + rank);
    options.tokens = below(4) == 0 ? below(2) : below(kMaxTokens + 1);
    const uint32_t h = spec.hidden, matrix = spec.gate_up_rows() * h;
    x = draw(options.tokens * h);
    y = draw(options.tokens * h);
    gate_up = draw(local * matrix);
    down = draw(local * h * spec.intermediate);
    router = draw(spec.experts * h);
    shared_gate_up = draw(spec.shared * matrix);
    shared_down = draw(spec.shared * h * spec.intermediate);
    shared_gate = draw(h);
  }

  Layer layer() {
    Layer l;
    l.spec = spec;
    l.x = x.data();
    l.gate_up = gate_up.data();
    l.down = down.data();
    l.router = router.data();
    l.shared_gate_up = shared_gate_up.data();
    l.shared_down = shared_down.data();
    l.shared_gate = shared_gate.data();
    return l;
  }
  void forward(Context& context, bool redispatch) {
    kept = std::make_unique<Kept>();
    kept->redispatch = redispatch;
    kept->spec = spec;
    kept->placement = options.placement;
    kept->logits.resize(uint64_t{options.tokens} * spec.experts);
    out.assign(x.size(), NAN);
    Layer l = layer();
    l.out = out.data();
    l.router_logits = kept->logits.data();
    l.kept = kept.get();
    context.call(l, options);
  }
  // Returns all gradients, one behind the other.
  Floats backward(Context& context) {
    const float was = accumulates ? 0.0f : NAN;
    Floats of_x(x.size(), NAN), of_up(gate_up.size(), was), of_down(down.size(), was), of_router(router.size(), was);
    Floats of_shared_up(shared_gate_up.size(), was), of_shared_down(shared_down.size(), was);
    Gradients g{.layer = layer(), .y = y.data(), .accumulates = accumulates};
    g.x = of_x.data(), g.gate_up = of_up.data(), g.down = of_down.data(), g.router = of_router.data();
    g.shared_gate_up = of_shared_up.data(), g.shared_down = of_shared_down.data();
    context.backward(*kept, g, options);
    Floats all;
    for (const Floats* each : {&of_x, &of_up, &of_down, &of_router, &of_shared_up, &of_shared_down}) {
      all.insert(all.end(), each->begin(), each->end());
    }
    return all;
  }

  LayerSpec spec;
  CallOptions options;
  bool accumulates;
  Floats x, y, gate_up, down, router, shared_gate_up, shared_down, shared_gate, out;
  std::unique_ptr<Kept> kept;

 private:
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  Floats draw(uint32_t n) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    Floats values(n);
    for (float& v : values) v = uniform(random_);
    return values;
  }

  std::mt19937_64 random_;
};

void run_rank(uint32_t rank, std::unique_ptr<host::Group> group, uint32_t pairs) {
  const Limits l = limits();
  Context context(std::move(group), rank, l, 120'000'000'000);
  context.set_tile(128, kTileColumns);
  std::vector<Floats> first(2 * pairs);
  for (uint32_t run = 0; run < kRuns; ++run) {
    if (run == 2) context.set_tile(5, kTileColumns);
    for (uint32_t i = 0; i < pairs; ++i) {
      Work works[] = {{2 * i, rank, l}, {2 * i + 1, rank, l}};
      for (Work& w : works) {
        w.options.perturbation = run == 0 ? 0 : 100 * run + i + 1;
        w.forward(context, (run + i) % 2 == 1);
      }
      for (const uint32_t n : {1u, 0u}) {
        const Floats found = works[n].backward(context);
        for (const float v : found) CHECK(std::isfinite(v));
        if (run == 0) first[2 * i + n] = found;
        CHECK(found == first[2 * i + n]);
      }
    }
  }
}

}  // namespace
}  // namespace flashmoe::test

int main(int argc, char** argv) {
  using namespace flashmoe;
  using namespace flashmoe::test;
  const uint32_t pairs = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 60;
  auto groups = host::make_thread_groups(kRanks, member_heap_bytes(limits()));
  std::vector<std::thread> ranks;
  for (uint32_t p = 0; p < kRanks; ++p) ranks.emplace_back(run_rank, p, std::move(groups[p]), pairs);
  for (std::thread& t : ranks) t.join();
  std::printf("%u backward passes on %u ranks, each %u times\n", 2 * pairs, kRanks, kRuns);
}

// OrderPolicy::own_first: which experts' tiles are computed while the rank waits for another rank's rows.
#include <thread>

#include "compiled_once.h"

namespace flashmoe::test {
namespace {

constexpr uint32_t kTokens = 10, kExperts = 4, kTileRows = 2, kColumns = 2;
constexpr uint64_t kMs = 1'000'000;
// The timeout of the call, by which the call ends: long after everything that can be computed has been computed.
constexpr uint64_t kPatience = 1500 * kMs;

Limits limits() {
  Limits l;
  l.ranks = 3;
  l.processors = 1;
  l.max_tokens = kTokens;
  l.hidden = l.intermediate = 2 * kColumns;
  l.experts = l.max_local_experts = l.top_k = l.return_slots = kExperts;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.tile_rows = kTileRows;
  l.columns_per_task = each_product(2);
  return l;
}

// Rank 0 has all experts, and it alone has tokens. Each token goes to every expert.
Problem own_rows(uint32_t own_first) {
  Problem x;
  x.epoch = 1;
  x.hidden = x.intermediate = 2 * kColumns;
  x.experts = x.top_k = kExperts;
  x.place({0, 0, 0, 0}, 3);
  for (uint32_t p = 0; p < 3; ++p) {
    Problem::OfRank r;
    r.tokens = p == 0 ? kTokens : 0;
    r.order.own_first = own_first;
    for (uint32_t t = 0; t < r.tokens; ++t) r.ids.insert(r.ids.end(), {0, 1, 2, 3});
    r.weights.assign(r.ids.size(), 1.0f);
    x.of.push_back(r);
    x.drop(p);
  }
  return x;
}

// Runs the call on ranks 0 to present - 1; the other ranks are missing. Returns for how many of rank 0's experts
// GEMM0 is done before the call ends. These must be the first experts, and GEMM0 must not have begun for the others.
uint32_t experts_computed(uint32_t own_first, uint32_t present, uint32_t formers) {
  AbstractGroup<cpu::CpuPlatform> group(limits(), {.formers = formers});
  const std::vector<Problem> problems{own_rows(own_first)};
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < present; ++p) {
    group.rank(p).call.policy.timeout_ns = kPatience;
    threads.emplace_back([&, p] { CHECK_EQ(group.rank(p).run(problems), 0u); });
  }
  for (std::thread& t : threads) t.join();

  const Call& c = group.rank(0).call;
  uint32_t tiles[kExperts] = {};
  CHECK_EQ(c.control()->tiles.value, kExperts * kTokens / kTileRows);
  for (uint32_t tile = 0; tile < kExperts * kTokens / kTileRows; ++tile) {
    if (group.ledger(0).activated.whole(tile, kColumns)) {
      ++tiles[c.tile(tile)->shape.expert];
    } else {
      CHECK(group.ledger(0).activated.whole(tile, 0));
    }
  }
  uint32_t experts = 0;
  while (experts < kExperts && tiles[experts] == kTokens / kTileRows) ++experts;
  for (uint32_t e = experts; e < kExperts; ++e) CHECK_EQ(tiles[e], 0u);
  return experts;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  struct Case {
    uint32_t own_first, present, expected;
  };
  constexpr Case kCases[] = {
      // No other rank is here. Tiles of own rows are computed, except those of the experts that wait.
      {1, 1, 4},
      {2, 1, 2},
      {3, 1, 2},
      {1024, 1, 1},
      // All packets of one other rank are here, those of the third are not. So no expert waits any more.
      {2, 2, 4},
  };
  std::vector<std::thread> threads;  // each of them mostly waits
  for (const uint32_t formers : {0u, 2u}) {
    for (const Case& x : kCases) {
      threads.emplace_back([=] { CHECK_EQ(experts_computed(x.own_first, x.present, formers), x.expected); });
    }
  }
  for (std::thread& t : threads) t.join();
}

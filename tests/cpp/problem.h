// What the ranks of a group compute in one call, and what the results must be. Sizes, placement and routing are
// random. The test knows all of them, so it can check every word that arrives anywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "flashmoe/protocol/call.h"
#include "host/placement.h"

namespace flashmoe::test {

inline uint64_t mix(uint64_t h) {
  return h;
}

// A hash of all its arguments.
template <class... Rest>
uint64_t mix(uint64_t h, uint64_t v, Rest... rest) {
  h = (h ^ v) + 0x9e3779b97f4a7c15u;  // a round of splitmix64
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return mix(h ^ (h >> 31), rest...);
}

struct Problem {
  struct OfRank {
    uint32_t tokens = 0;
    uint32_t log2_block = 3;
    uint32_t capacity = 0;
    OrderPolicy order;
    std::vector<int32_t> ids;     // [T, K]
    std::vector<float> weights;   // [T, K]
    std::vector<int32_t> routed;  // [T, K] ids, -1 where capacity drops the choice
  };

  Epoch epoch = 0;
  uint64_t belief = 0;  // ranks that run problems of different beliefs disagree about the call
  uint32_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  uint32_t slices = 1;  // of an expert; `experts`, `top_k` and ids count slices, the gate chooses whole experts
  uint32_t groups = 1;  // return groups; fewer if there are fewer blocks of columns
  ReturnMode return_mode = ReturnMode::kDirect;
  std::vector<host::PlacementTables> placement;  // the tables of each rank
  std::vector<OfRank> of;

  // The rank that computes choice (token, k) of rank p; ~0u if the choice was dropped.
  uint32_t owner_of(uint32_t p, uint32_t token, uint32_t k) const {
    const int32_t expert = of[p].routed[token * top_k + k];
    return expert < 0 ? ~0u : placement[p].owner[expert];
  }
  // How many of the token's first k choices rank q computes.
  uint32_t entries(uint32_t p, uint32_t token, uint32_t q, uint32_t k) const {
    uint32_t n = 0;
    for (uint32_t j = 0; j < k; ++j) n += owner_of(p, token, j) == q;
    return n;
  }

  // Word i of a token's row, of its intermediate row for choice k, and of what choice k contributes to its result.
  uint64_t row_word(uint32_t p, uint32_t token, uint32_t i) const { return mix(1, epoch, p, token, i); }
  uint64_t hidden_word(uint32_t p, uint32_t token, uint32_t k, uint32_t i) const {
    return mix(2, epoch, p, token, k, of[p].routed[token * top_k + k], i);
  }
  uint64_t contribution(uint32_t p, uint32_t token, uint32_t k, float weight, uint32_t i) const {
    return mix(3, epoch, p, token, k, std::bit_cast<uint32_t>(weight), i);
  }

  void place(const host::Holders& holders, uint32_t ranks) {
    Limits limits;
    limits.ranks = ranks;
    limits.max_local_experts = holders.experts();
    placement.clear();
    for (uint32_t p = 0; p < ranks; ++p) placement.push_back(placement_tables(holders, limits, p, 0));
  }
  void place(const std::vector<uint32_t>& owners, uint32_t ranks) {
    host::Holders holders;
    for (const uint32_t q : owners) holders.expert(q);
    place(holders, ranks);
  }

  // Sets `routed` of rank p: of the rank's choices of an expert, the first `capacity` stay, in the order of tokens.
  void drop(uint32_t p) {
    OfRank& r = of[p];
    r.routed = r.ids;
    std::vector<uint32_t> used(experts);
    for (int32_t& id : r.routed) {
      if (r.capacity != 0 && used[id]++ >= r.capacity) id = -1;
    }
  }
};

// Draws the calls of a test at random. The limits bound every size; everything else varies from call to call. Any
// rank may get all experts, so max_local_experts must be E.
class Problems {
 public:
  Problems(const Limits& limits, uint64_t seed) : l_(limits), random_(seed) {
    CHECK_EQ(limits.max_local_experts, limits.experts);
  }

  std::vector<Problem> draw(uint32_t calls) {
    std::vector<Problem> all;
    for (uint32_t i = 0; i < calls; ++i) all.push_back(draw_one(i + 1));
    return all;
  }

 private:
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<uint32_t>(list.size()))];
  }

  Problem draw_one(Epoch epoch) {
    Problem x;
    x.epoch = epoch;
    x.hidden = 1 + below(l_.hidden);
    x.intermediate = 1 + below(l_.intermediate);
    if (l_.top_k > 1 && below(3) == 0) x.slices = 2 + below(min_of(l_.top_k, 3u) - 1);
    x.experts = l_.experts - l_.experts % x.slices;
    x.top_k = x.slices * (1 + below(l_.top_k / x.slices));
    x.groups = 1 + below(kMaxGroups);
    x.return_mode = one_of({ReturnMode::kDirect, ReturnMode::kReduced});
    if (l_.rdma != 0) x.groups = 1;  // by puts, rows come home reduced, in one return group
    if (l_.rdma != 0 || x.slices != 1) x.return_mode = ReturnMode::kReduced;
    const bool uneven = below(3) == 0;  // then a rank may have no expert
    const bool copies = below(3) == 0;
    host::Holders holders;
    for (uint32_t e = 0; e < x.experts; ++e) {
      const uint32_t first = uneven ? below(l_.ranks) : e % l_.ranks;
      holders.expert(first);
      const uint32_t more = copies ? below(l_.ranks) : 0;
      for (uint32_t i = 1; i <= more; ++i) holders.copy((first + i) % l_.ranks);
    }
    x.place(holders, l_.ranks);
    // In a third of the calls, all tokens choose the same experts.
    const uint32_t popular = (below(3) == 0 ? x.top_k : x.experts) / x.slices;
    const bool capacity = below(3) == 0;
    for (uint32_t p = 0; p < l_.ranks; ++p) {
      Problem::OfRank r;
      r.tokens = one_of({0u, 1u, l_.max_tokens, below(l_.max_tokens + 1), below(l_.max_tokens + 1)});
      r.log2_block = 3 + below(5);  // blocks of more than 32 tokens are sent in parts
      r.capacity = capacity ? 1 + below(l_.max_tokens) : 0;
      r.order = {.gemm1_lag = one_of({0u, 3u, 1000u}),
                 .raster = one_of({1u, 2u, kMaxRaster}),
                 .window = one_of({0u, 1u, 9u}),
                 .gemm1_lists = one_of({1u, kMaxGemm1Lists}),
                 .own_first = one_of({1u, 2u, 3u}),
                 .link_clusters = below(l_.processors)};
      std::vector<int32_t> choice(popular);
      std::iota(choice.begin(), choice.end(), 0);
      for (uint32_t t = 0; t < r.tokens; ++t) {
        std::shuffle(choice.begin(), choice.end(), random_);
        for (uint32_t k = 0; k < x.top_k / x.slices; ++k) {
          const float weight = static_cast<float>(1 + below(1000)) / 1000.0f;
          r.weights.insert(r.weights.end(), x.slices, weight);
          for (uint32_t n = 0; n < x.slices; ++n)
            r.ids.push_back(choice[k] * static_cast<int32_t>(x.slices) + static_cast<int32_t>(n));
        }
      }
      x.of.push_back(std::move(r));
      x.drop(p);
    }
    return x;
  }

  const Limits l_;
  std::mt19937_64 random_;
};

}  // namespace flashmoe::test

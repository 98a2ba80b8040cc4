// Compares bands of ready tiles with a plain algorithm: the tiles of an expert are taken together, experts in the
// order of their first tiles, and the tiles that are left keep their order.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "check.h"
#include "flashmoe/protocol/tile_band.h"
#include "warp_platform.h"

namespace flashmoe::test {
namespace {

using Words = std::vector<uint64_t>;
using Band = std::vector<TileIndex>;

Words random_tiles(std::mt19937_64& random, uint32_t n, uint32_t experts) {
  Words ready;
  for (uint32_t i = 0; i < n; ++i) {
    const auto expert = static_cast<uint32_t>(random() % experts), remote = static_cast<uint32_t>(random() % 2);
    const TileIndex tile{static_cast<uint32_t>(random())};
    ready.push_back(Ready::of_tile(Product<kFirst>::kKind, tile, expert, remote).pack());
  }
  return ready;
}

uint32_t expert_of(uint64_t word) {
  return Ready::unpack(word).expert();
}

// Returns the band that should be taken from the first `sight` ready tiles. `ready` becomes what the list should be
// then: first the tiles that are taken, then those that are left.
Band by_expert(Words& ready, uint32_t most, uint32_t sight) {
  const auto seen = ready.begin() + std::min<std::ptrdiff_t>(sight, std::ssize(ready));
  Words taken;
  for (auto first = ready.begin(); first != seen; ++first) {
    if (std::find(taken.begin(), taken.end(), *first) != taken.end()) continue;  // words differ, since indices do
    std::copy_if(first, seen, std::back_inserter(taken),
                 [&](uint64_t word) { return expert_of(word) == expert_of(*first); });
  }
  taken.resize(most);
  std::stable_partition(ready.begin(), seen,
                        [&](uint64_t word) { return std::find(taken.begin(), taken.end(), word) != taken.end(); });
  std::copy(taken.begin(), taken.end(), ready.begin());
  Band band;
  for (const uint64_t word : taken) band.push_back(Ready::unpack(word).tile());
  return band;
}

template <class P>
void run(const char* name, uint32_t rounds) {
  const uint32_t sight = P::kLanes * std::max(4u, kMaxRaster / P::kLanes);
  std::mt19937_64 random(P::kLanes);
  for (uint32_t round = 0; round < rounds; ++round) {
    const auto n = static_cast<uint32_t>(1 + random() % (2 * sight));
    const uint32_t most = std::min(n, static_cast<uint32_t>(1 + random() % kMaxRaster));
    Words ready = random_tiles(random, n, 1 + static_cast<uint32_t>(random() % n)), expected_list = ready;
    Band in_order(most), grouped(most);
    P::run_warp([&] { take_in_order<P>(in_order.data(), most, ready.data()); });
    for (uint32_t i = 0; i < most; ++i) CHECK(in_order[i] == Ready::unpack(ready[i]).tile());

    const Band expected = by_expert(expected_list, most, sight);
    P::run_warp([&] { take_by_expert<P>(grouped.data(), most, n, ready.data()); });
    CHECK(grouped == expected);
    CHECK(ready == expected_list);
  }
  std::printf("%s: %u bands\n", name, rounds);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  run<WarpPlatform<1>>("1 lane", 300);
  run<WarpPlatform<4>>("4 lanes", 100);
  run<WarpPlatform<32>>("32 lanes", 20);
}

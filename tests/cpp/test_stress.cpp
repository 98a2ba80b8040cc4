// The CPU engine under stress: 10,000 calls on four ranks of two processors each, with changing shapes and options. A
// quarter of the calls have a perturbed schedule. Every twentieth is compared with a reference in fp64, on every
// rank.
//
//   test_stress [calls]
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "random_calls.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;

constexpr uint32_t kCallsPerGroup = 500;
constexpr uint32_t kVerifyEvery = 20;

struct Counts {
  std::atomic<uint32_t> calls = 0, verified = 0, undecided = 0;
};

// Makes calls [first, first + n) on a new group, with tiles of one size. Ranks run as far ahead of one another as the
// protocol lets them; only the comparison of every twentieth call delays them.
void run_group(uint32_t first, uint32_t n, uint32_t tile_rows, uint32_t tile_columns, Counts& counts) {
  const Limits l = call_limits();
  std::vector<std::unique_ptr<host::Group>> groups = host::make_thread_groups(kRanks, member_heap_bytes(l));
  std::vector<std::thread> ranks;
  for (uint32_t p = 0; p < kRanks; ++p) {
    ranks.emplace_back([&, p] {
      Context context(std::move(groups[p]), p, l, 120'000'000'000);
      context.set_tile(tile_rows, tile_columns);
      for (uint32_t i = first; i < first + n; ++i) {
        Work work(i, l);  // each rank draws the same call for itself
        work.run(p, context);
        if (p == 0) ++counts.calls;
        if (i % kVerifyEvery == 0) ++(work.verify(p) ? counts.verified : counts.undecided);
      }
    });
  }
  for (std::thread& t : ranks) t.join();
}

}  // namespace
}  // namespace flashmoe::test

int main(int argc, char** argv) {
  using namespace flashmoe::test;
  const uint32_t calls = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 10'000;
  struct Tile {
    uint32_t rows, columns;
  };
  constexpr Tile kTiles[] = {{4, 8}, {1, 24}, {7, 5}, {128, 256}};
  Counts counts;
  for (uint32_t first = 0, i = 0; first < calls; first += kCallsPerGroup, ++i) {
    const Tile t = kTiles[i % std::size(kTiles)];
    run_group(first, std::min(kCallsPerGroup, calls - first), t.rows, t.columns, counts);
  }
  std::printf("%u calls on %u ranks; outputs verified: %u, left undecided by near ties of the router: %u\n",
              counts.calls.load(), kRanks, counts.verified.load(), counts.undecided.load());
  CHECK_EQ(counts.calls.load(), calls);
  CHECK(counts.verified.load() > counts.undecided.load());
}

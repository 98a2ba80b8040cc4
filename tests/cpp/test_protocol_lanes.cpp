// Whole calls of the protocol with warps of 1 to 32 lanes, teams of 1 to 3 warps, and tiles formed by the OS actor or
// by formers. They have random routing, changing sizes, both return modes, capacities, and order policies of all
// kinds. abstract_group.h has what is checked in each call; ThreadSanitizer also finds races between lanes and warps.
#include "compiled_once.h"
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

// These sizes are so small that the ready queue and the ready list have fewer slots than a warp has lanes.
Limits smallest() {
  Limits l = limits(1, 1);
  l.max_tokens = l.hidden = l.intermediate = l.experts = l.max_local_experts = l.top_k = l.return_slots = 1;
  return l;
}

// More ready tiles than a band takes, of experts that alternate. The tiles that a band passes over must not be lost
// to later return groups.
Limits many_tiles() {
  Limits l = limits(1, 2);
  l.max_tokens = 200;
  l.hidden = 60;  // so that return groups are wide: bands of narrow groups take more tiles
  l.intermediate = 1;
  l.experts = l.max_local_experts = 16;
  l.top_k = l.return_slots = 4;
  return l;
}

// A rank alone, whose tokens have at most two rows. Its calls with `direct` and without a capacity are joined: two
// ninths of the calls. They have so many late rows that the queue of these fills, and goes round.
Limits joined(uint32_t processors) {
  Limits l = limits(1, processors);
  l.max_tokens = 400;
  l.tile_rows = 32;
  l.top_k = l.return_slots = 2;
  return l;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    run_calls<flashmoe::cpu::CpuPlatform>("1 lane", limits(4, 3), 50, seed);
    run_calls<flashmoe::cpu::CpuPlatform>("1 lane", wide(), 50, seed);
    run_calls<WarpPlatform<4>>("4 lanes", limits(2, 2), 10, seed);
    run_calls<WarpPlatform<8>>("8 lanes", limits(2, 1), 10, seed);
    // As on a GPU: formers beside the OS actor form tiles, and several warps build packets. The formers have unequal
    // shares of the 7 experts.
    run_calls<flashmoe::cpu::CpuPlatform>("1 lane", limits(3, 2), 50, seed, {.formers = 3});
    run_calls<WarpPlatform<2, 3>>("3 warps of 2 lanes", limits(2, 1), 10, seed, {.formers = 2});
  }
  run_calls<WarpPlatform<4, 2>>("2 warps of 4 lanes", limits(2, 2), 10, 9,
                                {.formers = 8});  // more formers than experts
  run_calls<WarpPlatform<4>>("4 lanes", limits(3, 1), 15, 5);
  run_calls<WarpPlatform<4>>("4 lanes", wide(), 10, 6);
  run_calls<WarpPlatform<4>>("4 lanes", dense(), 8, 9, {.formers = 1});
  run_calls<WarpPlatform<8>>("8 lanes", dense(), 8, 10, {.formers = 2});
  run_calls<WarpPlatform<8>>("8 lanes", dense(), 8, 11);
  run_calls<flashmoe::cpu::CpuPlatform>("1 lane", many_tiles(), 30, 12, {.formers = 2});
  run_calls<WarpPlatform<4>>("4 lanes", many_tiles(), 10, 13, {.formers = 1});
  run_calls<WarpPlatform<8>>("8 lanes", smallest(), 30, 7);
  run_calls<WarpPlatform<8>>("8 lanes", smallest(), 30, 8);
  run_calls<flashmoe::cpu::CpuPlatform>("1 lane, joined", joined(1), 40, 14);
  run_calls<flashmoe::cpu::CpuPlatform>("1 lane, joined", joined(3), 40, 14);
  run_calls<flashmoe::cpu::CpuPlatform>("1 lane, joined", joined(2), 40, 15, {.formers = 2});
  run_calls<WarpPlatform<4>>("4 lanes, joined", joined(2), 8, 16);
  run_calls<WarpPlatform<8>>("8 lanes, joined", joined(2), 6, 17);
  // As many lanes as a GPU's warps have: a call takes seconds.
  run_calls<WarpPlatform<32>>("32 lanes", narrow(2), 3, 18);
  run_calls<WarpPlatform<32>>("32 lanes, joined", narrow(1), 4, 21);
}

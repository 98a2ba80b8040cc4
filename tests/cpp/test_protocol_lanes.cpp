// Whole calls of the protocol with warps of 1 to 8 lanes, teams of 1 to 3 warps, and tiles formed by the OS actor or by
// formers: random routing, changing sizes, both return modes, capacity, every order policy. What is checked is in
// abstract_group.h; under ThreadSanitizer, races between lanes and warps too.
#include "abstract_group.h"

namespace flashmoe::test {
namespace {

template <class P>
void run(const char* name, Limits limits, uint32_t calls, uint64_t seed, uint32_t formers = 0) {
  AbstractGroup<P> group(limits, formers);
  for (uint32_t p = 0; p < limits.ranks; ++p) group.rank(p).perturbation = seed % 2 == 0 ? seed + p : 0;
  group.run(Problems(limits, seed).draw(calls));
  std::printf("%s: %u ranks, %u processors, %u formers, %u calls\n", name, limits.ranks, limits.processors, formers,
              calls);
  std::fflush(stdout);
}

Limits limits(uint32_t ranks, uint32_t processors) {
  Limits l;
  l.ranks = ranks;
  l.processors = processors;
  l.max_tokens = 40;
  l.hidden = 9;
  l.intermediate = 4;
  l.experts = 7;
  l.max_local_experts = 7;
  l.top_k = 3;
  l.x_bytes = l.hidden_bytes = l.return_bytes = 8;
  l.return_slots = max_of(ranks, l.top_k);
  l.staging = 1;
  l.tile_rows = 6;
  l.columns_per_task = each_product(2);
  return l;
}

// So small that queue and ready list have fewer slots than a warp has lanes.
Limits smallest() {
  Limits l = limits(1, 1);
  l.max_tokens = l.hidden = l.intermediate = l.experts = l.max_local_experts = l.top_k = l.return_slots = 1;
  return l;
}

// More experts than lanes, more ranks than lanes.
Limits wide() {
  Limits l = limits(5, 1);
  l.max_tokens = 20;
  l.experts = l.max_local_experts = 19;
  l.top_k = 6;
  l.return_slots = 6;
  return l;
}

// Few experts, many tokens: packets with more entries of an expert than a warp has lanes, in more slices than one, which
// fill more tiles than wait for one another.
Limits dense() {
  Limits l = limits(2, 1);
  l.max_tokens = 200;
  l.hidden = l.intermediate = 3;
  l.experts = l.max_local_experts = l.top_k = l.return_slots = 2;
  return l;
}

// More tiles, of experts whose rows alternate, than a window takes: what it passes over is not lost to later return groups.
Limits many_tiles() {
  Limits l = limits(1, 2);
  l.max_tokens = 200;
  l.hidden = 60;  // wide groups: narrow ones have windows of more tiles
  l.intermediate = 1;
  l.experts = l.max_local_experts = 16;
  l.top_k = l.return_slots = 4;
  return l;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    run<flashmoe::cpu::CpuPlatform>("1 lane", limits(4, 3), 50, seed);
    run<flashmoe::cpu::CpuPlatform>("1 lane", wide(), 50, seed);
    run<WarpPlatform<4>>("4 lanes", limits(2, 2), 10, seed);
    run<WarpPlatform<8>>("8 lanes", limits(2, 1), 10, seed);
    // As on a GPU: tiles formed beside the OS actor, packets built by several warps. 7 experts do not divide evenly.
    run<flashmoe::cpu::CpuPlatform>("1 lane", limits(3, 2), 50, seed, 3);
    run<WarpPlatform<2, 3>>("3 warps of 2 lanes", limits(2, 1), 10, seed, 2);
  }
  run<WarpPlatform<4, 2>>("2 warps of 4 lanes", limits(2, 2), 10, 9, 8);  // more formers than experts
  run<WarpPlatform<4>>("4 lanes", limits(3, 1), 15, 5);
  run<WarpPlatform<4>>("4 lanes", wide(), 10, 6);
  run<WarpPlatform<4>>("4 lanes", dense(), 8, 9, 1);
  run<WarpPlatform<8>>("8 lanes", dense(), 8, 10, 2);
  run<WarpPlatform<8>>("8 lanes", dense(), 8, 11);
  run<flashmoe::cpu::CpuPlatform>("1 lane", many_tiles(), 30, 12, 2);
  run<WarpPlatform<4>>("4 lanes", many_tiles(), 10, 13, 1);
  run<WarpPlatform<8>>("8 lanes", smallest(), 30, 7);
  run<WarpPlatform<8>>("8 lanes", smallest(), 30, 8);
}

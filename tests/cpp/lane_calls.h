// Whole calls of random problems, and limits for these problems. abstract_group.h has what is checked in each call.
#pragma once

#include "abstract_group.h"

namespace flashmoe::test {

template <class P>
void run_calls(const char* name, Limits limits, uint32_t calls, uint64_t seed, const Helpers& helpers = {}) {
  if (!helpers.machines.empty()) host::MachineTables(helpers.machines, limits.ranks, 0).set(limits);
  AbstractGroup<P> group(limits, helpers);
  for (uint32_t p = 0; p < limits.ranks; ++p) group.rank(p).perturbation = seed % 2 == 0 ? seed + p : 0;
  group.run(Problems(limits, seed).draw(calls));
  std::printf("%s: %u ranks, %u processors, %u formers, %u senders, %u calls\n", name, limits.ranks, limits.processors,
              helpers.formers, helpers.senders, calls);
  std::fflush(stdout);
}

inline Limits limits(uint32_t ranks, uint32_t processors) {
  Limits l;
  l.ranks = ranks;
  l.processors = processors;
  l.max_tokens = 40;
  l.hidden = 9;
  l.intermediate = 4;
  l.experts = 7;
  l.max_local_experts = 7;
  l.top_k = 3;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.return_slots = max_of(ranks, l.top_k);
  l.staging = 1;
  l.tile_rows = 6;
  l.columns_per_task = each_product(2);
  return l;
}

// More experts and more ranks than a warp of 4 lanes has lanes.
inline Limits wide() {
  Limits l = limits(5, 1);
  l.max_tokens = 20;
  l.experts = l.max_local_experts = 19;
  l.top_k = 6;
  l.return_slots = 6;
  return l;
}

// Few experts, many tokens. So a packet has more entries of an expert than a warp has lanes, an expert's packets take
// more than one slice (of a former), and an expert has more tiles than a former holds back.
inline Limits dense() {
  Limits l = limits(2, 1);
  l.max_tokens = 200;
  l.hidden = l.intermediate = 3;
  l.experts = l.max_local_experts = l.top_k = l.return_slots = 2;
  return l;
}

// For warps of 32 lanes. Each meeting of such a warp takes 32 switches of threads, so all sizes are small.
inline Limits narrow(uint32_t ranks) {
  Limits l = limits(ranks, 1);
  l.max_tokens = 40;
  l.hidden = l.intermediate = 2;
  l.experts = l.max_local_experts = 3;
  l.top_k = l.return_slots = 2;
  return l;
}

}  // namespace flashmoe::test

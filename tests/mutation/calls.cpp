// Short calls of the protocol with lanes that are threads, for tools/mutate.py: compiled with ThreadSanitizer from sources
// that lack one release or acquire, it is to fail. What whole calls are checked for is in tests/cpp/abstract_group.h.
#include "../cpp/abstract_group.h"

namespace flashmoe::test {
namespace {

Limits limits(uint32_t ranks, uint32_t processors) {
  Limits l;
  l.ranks = ranks;
  l.processors = processors;
  l.max_tokens = 72;  // a block of 64 is sent in two parts
  l.hidden = 5;
  l.intermediate = 4;
  l.experts = l.max_local_experts = 5;
  l.top_k = 3;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.return_slots = max_of(ranks, l.top_k);
  l.staging = 1;
  l.tile_rows = 6;
  l.columns_per_task = each_product(2);
  return l;
}

template <class P>
void run(Limits limits, uint32_t calls, uint64_t seed, const Helpers& helpers) {
  limits.rdma = P::kPeersMapped ? 0 : 1;
  if (!helpers.machines.empty()) host::MachineTables(helpers.machines, limits.ranks, 0).set(limits);
  AbstractGroup<P> group(limits, helpers);
  for (uint32_t p = 0; p < limits.ranks; ++p) group.rank(p).perturbation = seed + p;
  group.run(Problems(limits, seed).draw(calls));
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using flashmoe::SpreadPlatform;
  for (uint64_t seed = 2; seed < 8; seed += 2) {
    run<WarpPlatform<4>>(limits(2, 2), 10, seed, {.formers = 5});
    run<WarpPlatform<2>>(limits(3, 1), 10, seed, {});
    run<WarpPlatform<2, 2>>(limits(2, 2), 10, seed, {.formers = 1});
    // std::barrier, in which teams meet, orders more than it promises: teams that are one thread each do without.
    run<flashmoe::cpu::CpuPlatform>(limits(2, 3), 30, seed, {.formers = 1});
    run<PutPlatform<WarpPlatform<2>>>(limits(3, 1), 10, seed, {.senders = 2});
    run<SpreadPlatform<WarpPlatform<2>>>(limits(3, 2), 10, seed, {.machines = {0, 1, 1}});
    run<SpreadPlatform<WarpPlatform<2>, true>>(limits(3, 1), 10, seed, {.relays = 2, .machines = {0, 1, 1}});
    auto alone = limits(1, 2);  // joined, with two experts a token
    alone.top_k = alone.return_slots = 2;
    run<WarpPlatform<2>>(alone, 10, seed, {});
  }
}

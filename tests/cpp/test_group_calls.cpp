// Ten thousand calls of small groups, one after the other, with a thread for every actor. So each call finds in
// memory what the call before has left there, and now and then ranks are one call apart. Peers are mapped, or reached
// only by puts. The schedule of every other group is perturbed. The test is above all for ThreadSanitizer.
// abstract_group.h has what is checked in each call.
//
//   test_group_calls [calls]
#include <cstdlib>

#include "compiled_once.h"
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

Limits tiny(uint32_t ranks) {
  Limits l = limits(ranks, 1);
  l.max_tokens = 18;
  l.hidden = 4;
  l.intermediate = 2;
  l.experts = l.max_local_experts = 4;
  l.top_k = 2;
  l.return_slots = max_of(ranks, l.top_k);
  l.tile_rows = 5;
  return l;
}

template <class P>
void run(const char* name, uint32_t calls, const Helpers& helpers) {
  for (const uint32_t ranks : {2u, 3u}) {
    Limits l = tiny(ranks);
    l.rdma = P::kPeersMapped ? 0 : 1;
    for (uint64_t seed = 1; seed <= 2; ++seed) run_calls<P>(name, l, calls, seed, helpers);
  }
}

}  // namespace
}  // namespace flashmoe::test

int main(int argc, char** argv) {
  using namespace flashmoe::test;
  using flashmoe::cpu::CpuPlatform;
  const uint32_t calls = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 10'000;
  run<CpuPlatform>("mapped", calls * 3 / 20, {});
  run<CpuPlatform>("mapped", calls / 20, {.formers = 1});
  run<PutPlatform<CpuPlatform>>("puts", calls / 20, {.senders = 2});
}

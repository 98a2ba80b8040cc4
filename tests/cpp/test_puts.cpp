// Whole calls of ranks that reach one another only by puts, over a network that is late and out of order
// (put_platform.h). They run with warps of 1, 4, 8 and 32 lanes, with tiles formed by the OS actor or by formers, and
// with 1 to 3 senders.
#include "compiled_once.h"
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

Limits by_puts(Limits l) {
  l.rdma = 1;
  return l;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using One = PutPlatform<flashmoe::cpu::CpuPlatform>;
  using Four = PutPlatform<WarpPlatform<4>>;
  using Eight = PutPlatform<WarpPlatform<8>>;
  for (const uint64_t seed : {1, 2}) {
    run_calls<One>("1 lane, puts", by_puts(limits(4, 2)), 40, seed, {.senders = 1});
    run_calls<One>("1 lane, puts", by_puts(limits(3, 2)), 40, seed, {.formers = 2, .senders = 3});
    run_calls<One>("1 lane, puts", by_puts(wide()), 40, seed, {.senders = 2});
    run_calls<Four>("4 lanes, puts", by_puts(limits(2, 1)), 8, seed, {.senders = 2});
    run_calls<Eight>("8 lanes, puts", by_puts(limits(2, 1)), 6, seed, {.senders = 2});
  }
  run_calls<Four>("4 lanes, puts", by_puts(limits(3, 1)), 6, 3, {.formers = 1, .senders = 2});
  run_calls<Eight>("8 lanes, puts", by_puts(dense()), 4, 4, {.senders = 2});
  run_calls<PutPlatform<WarpPlatform<32>>>("32 lanes, puts", by_puts(narrow(2)), 2, 5, {.senders = 1});
}

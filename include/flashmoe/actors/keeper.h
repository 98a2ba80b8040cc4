// Keeper: copies the rows of other ranks' tokens from the heap to memory of the pass, as the rows arrive. Keepers run
// where passes train among several GPUs. A forward pass keeps these rows for its gradients (unless x is dispatched
// again). A backward pass needs them after its last return. But the source overwrites them in the heap in the next
// call, which it begins when it has all its returns.
//
// So a source must not get its last return before keepers have copied its rows. For this, each keeper counts as one
// more expert, without rows, in the counter of Pending. No further signal is needed.
#pragma once

#include "flashmoe/protocol/arrivals.h"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// Runs the keeper with number `first`. It calls copy(p, token) for the rows that each other rank p has sent, of
// tokens first, first + c.policy.keepers, ... It runs until all packets are here; false if the call was aborted. All
// lanes. sources: [R] in shared memory, uninitialised.
template <class P, class Copy>
FLASHMOE_FN bool run_keeper(const Call& c, Source* sources, uint32_t first, Copy&& copy) {
  constexpr uint32_t kLooks = 8;
  const uint32_t step = c.policy.keepers;
  Arrivals<P, kPacketsOfLane, kLooks> arrivals(c, sources);
  const auto consume = [&](uint32_t p, uint32_t b, uint32_t n) {
    if (p == c.rank) return;
    const uint32_t begin = c.packet_first_token(p, b), end = min_of(c.packet_first_token(p, b + n), c.tokens_of(p));
    for (uint32_t t = begin + (first + step - begin % step) % step; t < end; t += step) {
      if (*c.packet_counts(c.rank, p, t) != 0) copy(p, t);
    }
  };
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        const bool moved = arrivals.step(consume, [&](uint32_t p) {
          P::sync();  // all lanes' copies before the count
          close_source<P>(c, p, 1);
        });
        if (arrivals.complete()) return Step::kDone;
        return moved ? Step::kProgress : Step::kIdle;
      },
      OsLiveness<P>{c});
  return end == WaitEnd::kDone;
}

}  // namespace flashmoe

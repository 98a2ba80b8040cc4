// In a backward pass: waits until all rows of dX are here. All gradients of combine weights are then here, too.
#pragma once

#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe::sm90 {

// Waits until every rank has returned every return group to this rank. False if the call is aborted or the wait
// expires. Run by one warp.
__device__ __forceinline__ bool wait_for_returns(const Call& c) {
  using P = Platform;
  const auto is_here = [&](uint32_t g) {
    bool all = true;
    for (uint32_t q = P::lane(); q < c.shape.ranks; q += P::kLanes) {
      all &= Signal::epoch(P::load_acquire(c.return_signal(c.rank, q, g), kSystem)) == c.epoch;
    }
    return P::ballot(!all) == 0;
  };
  uint32_t here = c.shape.tokens == 0 ? c.policy.groups : 0;  // nobody returns rows to a rank without tokens
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        while (here < c.policy.groups && is_here(here)) ++here;
        if (here == c.policy.groups) return Step::kDone;
        P::rest();  // because all blocks look at the same words
        return Step::kIdle;
      },
      OsLiveness<P>{c});
  P::sync();  // every lane may now read what one lane has acquired
  return end == WaitEnd::kDone;
}

}  // namespace flashmoe::sm90

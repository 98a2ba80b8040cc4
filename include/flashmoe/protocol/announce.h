// How a rank tells the other ranks, and its own actors, that it has begun a call, and how it has configured the call.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// Announces the call to this rank's own actors. All lanes of the OS actor call it, before they do anything else.
template <class P>
FLASHMOE_FN void announce_own(const Call& c) {
  if (P::lane() != 0) return;
  P::store_release(&c.status(c.rank)->entered, c.epoch, kSystem);
  *c.call_config(c.rank, c.rank) = c.config;
  P::store_release(c.call_signal(c.rank, c.rank), call_word(c), kDevice);
}

// Zeroes the counters from which the next call takes tickets. All lanes of one warp call it, in every call, whichever
// kernel computes the call.
template <class P>
FLASHMOE_FN void clear_tickets(const Call& c) {
  if (P::lane() != 0) return;
  const uint32_t next = c.parity() ^ 1;
  P::store_relaxed(&c.control()->reduces[next].value, uint64_t{0});
  P::store_relaxed(&c.control()->sends[next].value, uint64_t{0});
}

// Announces the call to the other ranks. All lanes of the first sender call it.
template <class P>
FLASHMOE_FN void announce_to_peers(const Call& c) {
  for (uint32_t i = 1 + P::lane(); i < c.shape.ranks; i += P::kLanes) {
    const uint32_t q = (c.rank + i) % c.shape.ranks;
    *c.call_config(q, c.rank) = c.config;
    P::store_release(c.call_signal(q, c.rank), call_word(c), kSystem);
  }
}

}  // namespace flashmoe

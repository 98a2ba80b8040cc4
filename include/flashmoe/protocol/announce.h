// How a rank tells that it has begun a call, and what it believes the call to be.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// Tells this rank's own actors. All lanes of the OS actor, before anything else.
template <class P>
FLASHMOE_FN void announce_own(const Call& c) {
  if (P::lane() != 0) return;
  P::store_release(&c.status(c.rank)->entered, c.epoch, kSystem);
  *c.call_config(c.rank, c.rank) = c.config;
  P::store_release(c.call_signal(c.rank, c.rank), call_word(c), kDevice);
}

// Tells the other ranks. All lanes of the first sender.
template <class P>
FLASHMOE_FN void announce_to_peers(const Call& c) {
  for (uint32_t i = 1 + P::lane(); i < c.shape.ranks; i += P::kLanes) {
    const uint32_t q = (c.rank + i) % c.shape.ranks;
    *c.call_config(q, c.rank) = c.config;
    P::store_release(c.call_signal(q, c.rank), call_word(c), kSystem);
  }
}

}  // namespace flashmoe

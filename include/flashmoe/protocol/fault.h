// Ends a call that cannot succeed: the actor of a rank that is the first to find a fault records the fault, tells
// every rank, and makes every actor of its own rank leave. A context that had a fault is not used again.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// Called by one lane. Records only the first fault of a rank, because later faults may follow from the first and
// would hide it. If peers are not mapped, a sender puts the record to them when this rank's actors leave
// (tell_fault).
template <class P>
FLASHMOE_FN void post_fault(const Call& c, Fault fault) {
  if (P::fetch_add(&c.control()->fault_claim.value, uint64_t{1}) == 0) {
    fault.rank = c.rank;
    fault.epoch = c.epoch;
    for (uint32_t i = 0; i < (P::kPeersMapped ? c.shape.ranks : 1); ++i) {
      const uint32_t q = (c.rank + i) % c.shape.ranks;  // own heap first: the host reads it there
      FaultRecord* to = c.fault(q, c.rank);
      to->fault = fault;
      P::store_release(&to->posted, FaultRecord::kFailed, kSystem);
    }
  } else if constexpr (!P::kPeersMapped) {
    return;  // another actor records its fault, and no actor may leave before that record is written
  }
  P::store_release(&c.control()->abort.value, uint64_t{1}, kDevice);
}

// The last call that rank p has begun, as far as this rank knows: from p's status, or, if p is not mapped, from the
// call signals of p that are here.
template <class P>
FLASHMOE_FN Epoch entered_by(const Call& c, uint32_t p) {
  if constexpr (!P::kPeersMapped) {
    if (p != c.rank) {
      const uint64_t* other = c.heap<uint64_t>(c.rank, HeapField::kCallSignal, c.parity() ^ 1, p);
      return max_of(Signal::epoch(P::load_acquire(c.call_signal(c.rank, p), kSystem)),
                    Signal::epoch(P::load_acquire(other, kSystem)));
    }
  }
  return P::load_acquire(&c.status(p)->entered, kSystem);
}

// The lowest rank that has refused the call, as far as this rank knows; if none has, a number that is no rank's.
template <class P>
FLASHMOE_FN uint32_t refuser(const Call& c) {
  uint32_t p = 0;
  while (p < c.shape.ranks && P::load_acquire(&c.fault(c.rank, p)->posted, kSystem) != c.epoch) ++p;
  return p;
}

// Returns whether any rank has posted a fault, or has refused the call. If so, makes every actor of this rank leave.
// All lanes.
template <class P>
FLASHMOE_FN bool peer_faulted(const Call& c) {
  bool found = false;
  for (uint32_t p = P::lane(); p < c.shape.ranks; p += P::kLanes) {
    found |= FaultRecord::is_news(P::poll(&c.fault(c.rank, p)->posted, kSystem), c.epoch);
  }
  const bool any = P::ballot(found) != 0;
  if (any && P::lane() == 0) P::store_release(&c.control()->abort.value, uint64_t{1}, kDevice);
  return any;
}

}  // namespace flashmoe

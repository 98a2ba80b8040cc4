// Which ranks of a group make progress. The wait of an OS actor (protocol/wait.h) asks this before it expires, and then
// asks which rank holds the group up.
#pragma once

#include "flashmoe/protocol/fault.h"

namespace flashmoe {

// Whether any peer makes progress, and who holds the group up.
template <class P>
class GroupLiveness {
 public:
  FLASHMOE_FN GroupLiveness(const Call& call, Status* seen) : c_(call), seen_(seen) {}

  FLASHMOE_FN void sample() {
    for (uint32_t p = P::lane(); p < c_.shape.ranks; p += P::kLanes) seen_[p] = read(p);
    P::sync();
  }

  FLASHMOE_FN bool moved() const {
    bool any = false;
    for (uint32_t p = P::lane(); p < c_.shape.ranks; p += P::kLanes) {
      any |= p != c_.rank && read(p).progress != seen_[p].progress;
    }
    return P::ballot(any) != 0;
  }

  // The rank that holds the group up: a rank that has not begun the call, else a rank whose OS actor stands still
  // although its call is not over, else the rank that was awaited. (On a CPU, a rank that has not begun the call and
  // whose OS actor stands still comes first, because the other ranks that have not begun may wait for it in the call
  // before.) One lane.
  FLASHMOE_FN uint32_t culprit(uint32_t awaited) const {
    if constexpr (P::kSleeps) {
      for (uint32_t p = 0; p < c_.shape.ranks; ++p) {
        const Status now = read(p);
        if (p != c_.rank && now.entered < c_.epoch && now.heartbeat == seen_[p].heartbeat) return p;
      }
    }
    for (uint32_t p = 0; p < c_.shape.ranks; ++p) {
      if (read(p).entered < c_.epoch) return p;
    }
    for (uint32_t p = 0; p < c_.shape.ranks; ++p) {
      const Status now = read(p);
      if (p != c_.rank && now.left < c_.epoch && now.heartbeat == seen_[p].heartbeat) return p;
    }
    return awaited;
  }

 private:
  FLASHMOE_FN Status read(uint32_t p) const {
    if constexpr (!P::kPeersMapped) {
      // It cannot be seen whether the peer stands still. So the peer counts as having left the call, and culprit()
      // does not blame it for standing still.
      if (p != c_.rank) return {entered_by<P>(c_, p), c_.epoch, 0, 0};
    }
    const Status* s = c_.status(p);
    return {P::load_acquire(&s->entered, kSystem), P::load_acquire(&s->left, kSystem), P::poll(&s->heartbeat, kSystem),
            P::poll(&s->progress, kSystem)};
  }

  const Call& c_;
  Status* seen_;
};

}  // namespace flashmoe

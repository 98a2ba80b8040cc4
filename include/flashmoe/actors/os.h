// The OS actor of a rank: announces the call, then runs subscriber and scheduler until every task is published and
// everything this rank awaits has been returned.
//
// One warp (the CPU engine: one thread, which where ranks are on several machines is its rank's relay, too). It never
// computes. The rank's other actors watch whether it steps (OsLiveness), and it watches the peers (GroupLiveness).
#pragma once

#include "flashmoe/actors/relay.h"
#include "flashmoe/actors/scheduler.h"
#include "flashmoe/protocol/announce.h"

namespace flashmoe {

// Memory of the OS actor: shared memory on a GPU. Uninitialised.
template <class P>
struct OsScratch {
  typename Subscriber<P>::Memory subscriber;
  typename Scheduler<P>::Memory* scheduler;
  Status* seen;  // [R] the peers' status when last sampled
};

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

  // The rank that holds the group up: one that has not begun the call, else one whose OS actor stands still although
  // its call is not over, else the one that was awaited. One lane. (On a CPU, of those that have not begun, rather one
  // whose OS actor stands still: the others may wait for it in the call before.)
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
      // Whether a peer moves cannot be seen: it counts as having left, so that culprit() does not blame it for that.
      if (p != c_.rank) return {entered_by<P>(c_, p), c_.epoch, 0, 0};
    }
    const Status* s = c_.status(p);
    return {P::load_acquire(&s->entered, kSystem), P::load_acquire(&s->left, kSystem), P::poll(&s->heartbeat, kSystem),
            P::poll(&s->progress, kSystem)};
  }

  const Call& c_;
  Status* seen_;
};

// Runs the call's OS actor to its end; false if the call was aborted or timed out. All lanes.
template <class P>
FLASHMOE_FN bool run_os(const Call& c, const OsScratch<P>& scratch) {
  announce_own<P>(c);
  if (P::lane() == 0) P::store_relaxed(&c.control()->reduces[c.parity() ^ 1].value, uint64_t{0});  // the next call's
  Subscriber<P> subscriber(c, scratch.subscriber);
  Scheduler<P> scheduler(c, subscriber, *scratch.scheduler);
  Relay<P> relay(c);
  GroupLiveness<P> group(c, scratch.seen);
  Status* own = c.status(c.rank);
  // Plain reads of own words: nobody else writes them.
  uint64_t heartbeat = own->heartbeat, progress = own->progress;
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        scheduler.look();
        const bool passed_on = relay.step();
        const bool arrived = subscriber.step() || passed_on;
        Step s = scheduler.step([&] { return relay.complete(); });
        if (s == Step::kIdle && arrived) s = Step::kProgress;
        if (P::lane() == 0) {
          P::store_relaxed(&own->heartbeat, ++heartbeat, kSystem);
          if (s != Step::kIdle) P::store_relaxed(&own->progress, ++progress, kSystem);
        }
        if (s == Step::kIdle) peer_faulted<P>(c);
        return s;
      },
      group);
  if (end == WaitEnd::kExpired && P::lane() == 0) {
    Fault fault = subscriber.missing();
    relay.explain(fault);
    fault.culprit = group.culprit(fault.awaited);
    post_fault<P>(c, fault);
  }
  return end == WaitEnd::kDone;
}

}  // namespace flashmoe

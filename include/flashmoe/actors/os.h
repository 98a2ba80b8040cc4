// The OS actor of a rank: announces the call, then runs subscriber and scheduler until every task is published and
// everything this rank awaits has been returned.
//
// It is one warp, or one thread of the CPU engine. (If ranks are on several machines, this thread also does the work
// of a relay.) It never computes. The rank's other actors watch whether it takes steps (OsLiveness), and it watches
// the peers (GroupLiveness).
#pragma once

#include "flashmoe/actors/group_liveness.h"
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

// Runs the call's OS actor to its end; false if the call was aborted or timed out. All lanes.
template <class P>
FLASHMOE_FN bool run_os(const Call& c, const OsScratch<P>& scratch) {
  announce_own<P>(c);
  clear_tickets<P>(c);
  Subscriber<P> subscriber(c, scratch.subscriber);
  Scheduler<P> scheduler(c, subscriber, *scratch.scheduler);
  Relay<P> relay(c);
  GroupLiveness<P> group(c, scratch.seen);
  Status* own = c.status(c.rank);
  // Plain loads, because during a call nobody else writes these words.
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

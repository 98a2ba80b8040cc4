// How a thread block of the kernel for a few tokens waits for other ranks of its group (sm90/decode/group.cuh).
//
// Block 0 does the work of the rank's OS actor while it waits: it counts the rank's heartbeat, watches the other ranks,
// and if a wait expires, names the rank that holds the call up.
//
// Warp 0 runs it. It polls signals in the own heap. In block 0 it also stores to the own Status and reads those of the
// peers, and posts a fault to all ranks. It keeps in shared memory what it has seen of the peers (BesideScratch::seen), and
// whether the call has failed.
#pragma once

#include "flashmoe/actors/group_liveness.h"
#include "flashmoe/sm90/decode/block.cuh"

namespace flashmoe::sm90::few {

// Keeps a wait from expiring while others make progress: in block 0 the peers, in other blocks block 0, which works as
// the OS actor.
class RanksLiveness {
 public:
  __device__ __forceinline__ explicit RanksLiveness(const Block& b) : os_{b.c}, group_(b.c, b.s.peers.seen) {}
  __device__ __forceinline__ void sample() { blockIdx.x == 0 ? group_.sample() : os_.sample(); }
  __device__ __forceinline__ bool moved() const { return blockIdx.x == 0 ? group_.moved() : os_.moved(); }
  __device__ __forceinline__ uint32_t culprit(uint32_t awaited) const { return group_.culprit(awaited); }

 private:
  OsLiveness<P> os_;
  GroupLiveness<P> group_;
};

// What the OS actor does at each of its steps: it counts heartbeat and progress, and from time to time looks whether a
// peer has posted a fault. One warp of block 0.
class OsSteps {
 public:
  __device__ __forceinline__ explicit OsSteps(const Call& c) : c_(c), own_(c.status(c.rank)) {
    if (blockIdx.x != 0) return;
    heartbeat_ = own_->heartbeat;  // nobody else writes them
    progress_ = own_->progress;
  }
  __device__ __forceinline__ void count(Step s) {
    if (P::lane() == 0) {
      P::store_relaxed(&own_->heartbeat, ++heartbeat_, kSystem);
      if (s != Step::kIdle) P::store_relaxed(&own_->progress, ++progress_, kSystem);
    }
    // Not at each step, because a look is a round trip, which would delay the wait.
    if (s == Step::kIdle && ++idle_ % 16 == 0) peer_faulted<P>(c_);
  }

 private:
  const Call& c_;
  Status* own_;
  uint64_t heartbeat_ = 0, progress_ = 0;
  uint32_t idle_ = 0;
};

// The signal that a lane awaits, null if none; and how a fault names it.
struct AwaitedSignal {
  const uint64_t* signal;
  FaultKind kind;
  uint32_t from, index;
};

// Warp 0: waits until the signals of all lanes that await one have the call's epoch. Each lane gets the payload of its
// own signal. A lane whose signal is here asks believes(); if that says no, the signal counts as not here. Returns
// false, to all lanes, if the call is over. After the block's next barrier, all its threads may read what was written
// before these signals.
template <class Believes>
__device__ __forceinline__ bool await_signals(const Block& b, const AwaitedSignal& awaited, uint32_t& payload,
                                              Believes&& believes) {
  constexpr uint32_t kUnwatched = 64;  // steps before wait_until() looks at the clock
  const Call& c = b.c;
  RanksLiveness live(b);
  OsSteps os(c);
  bool here = awaited.signal == nullptr;
  uint32_t steps = 0;
  auto step = [&] {
    bool news = false;
    if (!here) {
      // Every poll acquires. Otherwise a signal that has come would be loaded again, with acquire: another round trip.
      const uint64_t word = P::load_acquire(awaited.signal, kSystem);
      payload = Signal::payload(word);
      news = here = Signal::epoch(word) == b.epoch && believes();
    }
    const Step s = P::ballot(!here) == 0 ? Step::kDone : P::ballot(news) != 0 ? Step::kProgress : Step::kIdle;
    if (blockIdx.x == 0) os.count(s);
    // If a step reports progress, wait_until() looks at the clock at the next idle step. The first kUnwatched steps
    // report kIdle instead, because a look is not needed so early.
    return ++steps < kUnwatched && s == Step::kProgress ? Step::kIdle : s;
  };
  const WaitEnd end = wait_until<P>(c, step, live, 1);
  if (end == WaitEnd::kDone) return true;
  const bool names = end == WaitEnd::kExpired && blockIdx.x == 0;
  const uint32_t first = lowest_bit<P>(P::ballot(!here));
  if (names && P::lane() == first) {
    post_fault<P>(c, {.kind = awaited.kind,
                      .actor = Actor::kOs,
                      .awaited = awaited.from,
                      .culprit = live.culprit(awaited.from),
                      .index = awaited.index,
                      .expected = b.epoch,
                      .seen = Signal::epoch(P::load_relaxed(awaited.signal))});
  }
  if (P::lane() == 0) {
    fail(b, {.kind = end == WaitEnd::kExpired && !names ? FaultKind::kLocal : FaultKind::kNone});
  }
  return false;
}
__device__ __forceinline__ bool await_signals(const Block& b, const AwaitedSignal& awaited, uint32_t& payload) {
  return await_signals(b, awaited, payload, [] { return true; });
}

}  // namespace flashmoe::sm90::few

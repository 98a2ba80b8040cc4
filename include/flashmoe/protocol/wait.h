// The wait for what other actors or ranks do. It ends when its condition holds, when the call is aborted, or when
// nothing has progressed for the call's timeout. (Warps of a thread block wait for one another elsewhere, without a
// bound. Such a wait ends when the block's clerk, which waits in this loop, passes on a task or a stop word.)
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

enum class Step : uint32_t { kIdle, kProgress, kDone };
enum class WaitEnd : uint32_t { kDone, kAborted, kExpired };

// Repeats `step` until it returns kDone. After half a timeout without progress here (5 s of 10 s), `live.sample()`
// notes how far the others are. Half a timeout later (at 10 s), `live.moved()` says whether they have gone on since.
// If so, the time begins anew; if not, the wait expires. All lanes call this; `step` and `moved` return the same
// value in every lane. The first look at the abort word (a round trip to memory) and at the clock follows the first
// idle step, or, if `unwatched` is 1, the 64th.
template <class P, class StepFn, class Liveness>
FLASHMOE_FN WaitEnd wait_until(const Call& c, StepFn&& step, Liveness&& live, uint32_t unwatched = 0) {
  // A clock read costs more than a poll, and aborts and timeouts are rare: look every 64th idle step.
  constexpr uint32_t kLookEvery = 64;
  uint64_t armed = 0;    // when the current stretch of idle steps began; 0: not idle
  uint64_t sampled = 0;  // when the others were sampled in it; 0: not yet
  uint32_t idle = unwatched;
  while (true) {
    const Step s = step();
    if (s == Step::kDone) return WaitEnd::kDone;
    if (s == Step::kProgress) {
      armed = 0;
      idle = 0;
      continue;
    }
    if (idle++ % kLookEvery == 0 || P::kSleeps) {
      if (P::ballot(P::load_relaxed(&c.control()->abort.value) != 0)) return WaitEnd::kAborted;
      const uint64_t now = P::broadcast(P::now_ns(), 0);
      const uint64_t half = c.policy.timeout_ns / 2;
      if (armed == 0) {
        armed = now;
        sampled = 0;
      }
      if (half == 0) {
        // No timeout.
      } else if (sampled == 0) {
        if (now - armed > half) {
          live.sample();
          sampled = now;
        }
      } else if (now - sampled > half) {
        // Half a timeout since the sample, not since `armed`: this thread itself may have been stopped for long.
        if (!live.moved()) return WaitEnd::kExpired;
        armed = now;
        sampled = 0;
      }
    }
    P::backoff(idle);
  }
}

// What all actors but the OS actor watch while they wait: whether this rank's OS actor still takes steps. (The OS
// actor itself watches the peers.)
template <class P>
struct OsLiveness {
  const Call& c;
  uint64_t heartbeat = 0;
  FLASHMOE_FN uint64_t read() const { return P::broadcast(P::load_relaxed(&c.status(c.rank)->heartbeat), 0); }
  FLASHMOE_FN void sample() { heartbeat = read(); }
  FLASHMOE_FN bool moved() const { return read() != heartbeat; }
};

}  // namespace flashmoe

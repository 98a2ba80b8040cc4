// A Platform whose lanes are threads. So ThreadSanitizer checks what the protocol does with a warp, without lockstep.
//
// The Platform promises no more than CUDA does, so that ThreadSanitizer reports code that relies on more. Lanes run
// at their own pace between collectives. Only sync() orders their memory accesses: ballot, broadcast and the scans
// exchange values by relaxed atomics. A poll is relaxed; what it saw is acquired by the polling lane's acquire() or
// next fence. (One thing is not modelled: a post should release only what came before the last release_fence, and
// here it is a release store.)
#pragma once

#include <array>
#include <atomic>
#include <barrier>
#include <thread>
#include <unordered_set>
#include <vector>

#include "check.h"
#include "cpu/platform.h"

namespace flashmoe::test {

template <uint32_t Lanes, uint32_t Workers = 1>
class WarpPlatform : public cpu::CpuMemory {
 public:
  static constexpr uint32_t kLanes = Lanes;

  // Run body() on every lane of a new warp, or of a new team of warps. They return when all lanes have ended.
  template <class Body>
  static void run_warp(Body&& body) {
    run<1>(body);
  }
  template <class Body>
  static void run_team(Body&& body) {
    run<Workers>(body);
  }

  static uint32_t lane() { return self().lane; }
  static uint32_t workers() { return Workers; }
  static uint32_t worker() { return self().worker; }
  static void team_sync() { self().team->arrive_and_wait(); }

  template <class Scope>
  static uint64_t poll(const uint64_t* p, Scope) {
    self().polled.insert(p);
    return load_relaxed(p);
  }
  template <class Scope>
  static void acquire(const uint64_t* p, Scope scope) {
    if (self().polled.erase(p) != 0) load_acquire(p, scope);
  }
  // ThreadSanitizer does not know fences, so every polled word is loaded once more, with acquire.
  template <class Scope>
  static void release_fence(Scope scope) {
    for (const uint64_t* p : self().polled) load_acquire(p, scope);
    self().polled.clear();
  }

  static void sync() { exchange(Op::kSync, 0, std::memory_order_release, std::memory_order_acquire); }

  static uint32_t ballot(bool predicate) {
    const auto all = exchange(Op::kBallot, predicate);
    uint32_t bits = 0;
    for (uint32_t i = 0; i < Lanes; ++i) bits |= all[i] << i;
    return bits;
  }

  static uint32_t broadcast(uint32_t v, uint32_t from) { return exchange(Op::kBroadcast, v)[from]; }
  static uint64_t broadcast(uint64_t v, uint32_t from) {
    const uint64_t high = broadcast(static_cast<uint32_t>(v >> 32), from);
    return high << 32 | broadcast(static_cast<uint32_t>(v), from);
  }

  static uint32_t exclusive_scan(uint32_t v, uint32_t& total) {
    const auto all = exchange(Op::kScan, v);
    uint32_t before = 0;
    total = 0;
    for (uint32_t i = 0; i < Lanes; ++i) {
      if (i == lane()) before = total;
      total += all[i];
    }
    return before;
  }

  static uint32_t rank_among_equal(uint32_t key, bool active, bool& last) {
    const uint32_t actives = ballot(active);
    const auto keys = exchange(Op::kMatch, key);
    uint32_t rank = 0;
    last = active;
    for (uint32_t i = 0; i < Lanes; ++i) {
      if (!(actives >> i & 1u) || keys[i] != key) continue;
      if (i < lane()) ++rank;
      if (i > lane()) last = false;
    }
    return rank;
  }

 private:
  enum class Op : uint32_t { kSync, kBallot, kBroadcast, kScan, kMatch };

  // A lane's word has the number of the meeting (24 bits), the op (8 bits) and the value (32 bits). One store writes
  // the value and announces it, so the store may be relaxed. There are two words, by the parity of the meeting: a
  // lane that writes the word of meeting n + 2 has met all lanes in meeting n + 1, so all lanes have left meeting n.
  struct alignas(64) Slot {
    std::atomic<uint64_t> word[2] = {};
  };
  using Warp = std::array<Slot, Lanes>;
  struct Self {
    Warp* warp = nullptr;
    std::barrier<>* team = nullptr;
    uint32_t lane = 0, worker = 0;
    uint32_t meeting = 0;
    std::unordered_set<const uint64_t*> polled{};  // since the last fence
  };
  static Self& self() {
    thread_local Self me;
    return me;
  }

  template <uint32_t Warps, class Body>
  static void run(Body&& body) {
    std::array<Warp, Warps> warps;
    std::barrier<> team(Warps * Lanes);
    std::vector<std::thread> lanes;
    for (uint32_t i = 0; i < Warps * Lanes; ++i) {
      lanes.emplace_back([&, i] {
        self() = {.warp = &warps[i / Lanes], .team = &team, .lane = i % Lanes, .worker = i / Lanes};
        body();
      });
    }
    for (std::thread& t : lanes) t.join();
  }

  static std::array<uint32_t, Lanes> exchange(Op op, uint32_t value,
                                              std::memory_order store = std::memory_order_relaxed,
                                              std::memory_order load = std::memory_order_relaxed) {
    Self& me = self();
    me.meeting = (me.meeting + 1) & 0xffffffu;
    Warp& warp = *me.warp;
    const uint64_t mine = uint64_t{me.meeting} << 40 | static_cast<uint64_t>(op) << 32 | value;
    warp[me.lane].word[me.meeting & 1].store(mine, store);
    std::array<uint32_t, Lanes> all;
    for (uint32_t i = 0; i < Lanes; ++i) {
      const std::atomic<uint64_t>& theirs = warp[i].word[me.meeting & 1];
      uint64_t word = theirs.load(load);
      const uint64_t patience = word >> 40 == me.meeting ? 0 : cpu::monotonic_ns() + 60'000'000'000;
      for (; word >> 40 != me.meeting; word = theirs.load(load)) {
        CHECK(cpu::monotonic_ns() < patience);  // lane i never came: not every lane calls this collective
        std::this_thread::yield();
      }
      CHECK_EQ(word >> 32 & 0xffu, static_cast<uint32_t>(op));  // lanes met in different collectives
      all[i] = static_cast<uint32_t>(word);
    }
    return all;
  }
};
static_assert(RunsProtocol<WarpPlatform<4>>);

// Runs body() on all lanes of a warp. If the Platform has no run_warp(), its warps have one lane: the calling thread.
template <class P, class Body>
void run_warp(Body&& body) {
  if constexpr (requires { P::run_warp(body); }) {
    P::run_warp(body);
  } else {
    body();
  }
}

template <class P, class Body>
void run_team(Body&& body) {
  if constexpr (requires { P::run_team(body); }) {
    P::run_team(body);
  } else {
    run_warp<P>(body);
  }
}

}  // namespace flashmoe::test

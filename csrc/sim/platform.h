// The simulation's Platform (flashmoe/protocol/platform.h). Each operation costs what it was measured to cost on a
// GPU.
//
// A lane waits for the answers of its loads only when its warp meets. So several loads are under way at the same
// time, as on a GPU. What a lane stores for others becomes visible later, at the time that is given to
// World::write_at. Counters change at once.
#pragma once

#include <algorithm>
#include <bit>

#include "flashmoe/protocol/machines.h"
#include "flashmoe/protocol/one_lane.h"
#include "flashmoe/protocol/platform.h"
#include "sim/group.h"

namespace flashmoe::sim {

// Memory operations, for any number of lanes.
struct Memory {
  static World& world() { return World::of_lane(); }
  static const Costs& costs() { return Group::of_lane().machine().costs; }
  static void answer_after(Time takes) {
    Lane& lane = World::lane();
    lane.pending = std::max(lane.pending, lane.at + takes);
  }

  template <class T>
  static T load_relaxed(const T* p) {
    if constexpr (sizeof(T) == sizeof(uint64_t)) world().look(p);
    answer_after(costs().load);
    return *p;
  }
  template <class T, class Scope>
  static T load_acquire(const T* p, Scope) {
    return load_relaxed(p);
  }
  template <class T, class Scope>
  static T poll(const T* p, Scope) {
    return load_relaxed(p);
  }
  template <class T>
  static void store_relaxed(T* p, T v) {
    *p = v;
  }
  template <class T, class Scope>
  static void store_relaxed(T* p, T v, Scope) {
    *p = v;
  }
  template <class Scope>
  static void store_release(uint64_t* p, uint64_t v, Scope) {
    World::lane().at = released();
    Group::of_lane().signal(World::warp().rank, p, v, World::lane().at);
  }
  static void post(uint64_t* p, uint64_t v) { world().write_at(World::lane().at + costs().store, p, v); }
  template <class Scope>
  static void acquire(const uint64_t*, Scope) {
    if (!World::warp().used_by_fence) begin_to_use();
    answer_after(costs().load);
  }
  template <class Scope>
  static void release_fence(Scope) {
    begin_to_use();
    World::lane().at = released();
  }
  template <class Scope>
  static void acquire_fence(Scope) {}
  template <class T>
  static T fetch_add(T* p, T v) {
    const T before = *p;
    *p = before + v;
    if constexpr (sizeof(T) == sizeof(uint64_t)) world().changed(p, World::lane().at + costs().atomic / 2);
    answer_after(costs().atomic);
    return before;
  }
  static void add(uint64_t* p, uint64_t v) { *p += v; }
  static void keep_largest(uint64_t* p, uint64_t v) { *p = std::max(*p, v); }
  template <class T>
  static T fetch_add_acq_rel(T* p, T v) {
    World::lane().at = released();
    return fetch_add(p, v);
  }
  template <class T>
  static T post_add(T* p, T v) {
    return fetch_add(p, v);
  }
  static uint32_t fetch_add_nearby(uint32_t* p, uint32_t v) {
    const uint32_t before = *p;
    *p += v;
    return before;
  }
  static uint32_t look_nearby(const uint32_t* p) { return *p; }
  static void set_nearby(uint32_t* p, uint32_t v) { *p = v; }
  static uint32_t compare_swap_nearby(uint32_t* p, uint32_t old, uint32_t v) {
    const uint32_t before = *p;
    if (before == old) *p = v;
    return before;
  }
  static void fence_nearby() {}
  static uint64_t now_ns() { return World::lane().at / kNanosecond + 1; }

  static uint32_t workers() { return 1; }
  static uint32_t worker() { return 0; }
  static void backoff(uint32_t) { world().wait(); }
  static void rest() {}
  static constexpr bool kSleeps = false;

  static uint32_t popcount(uint32_t v) { return static_cast<uint32_t>(std::popcount(v)); }
  static uint32_t nth_bit(uint32_t bits, uint32_t n) {
    for (; n != 0; --n) bits &= bits - 1;
    return static_cast<uint32_t>(std::countr_zero(bits));
  }

 private:
  // The time at which a release may happen: not before the rows that the warp has sent are at their destinations.
  static Time released() { return std::max(World::lane().at, World::warp().written); }
  static void begin_to_use() {
    Warp& warp = World::warp();
    World::lane().at = std::max(World::lane().at, warp.used_from);
    if (warp.first_use == 0) return;
    warp.used_from = World::lane().at + warp.first_use;
    warp.first_use = 0;
    World::lane().at = warp.used_from;
  }
};

// A warp of `Lanes` lanes. If it has one lane, a collective is a meeting of this lane with itself.
template <uint32_t Lanes>
struct Meetings : Memory {
  static constexpr uint32_t kLanes = Lanes;
  static uint32_t lane() { return World::lane().index; }
  static void sync() { world().meet(0, costs().meeting); }
  static void team_sync() { sync(); }
  static uint32_t ballot(bool predicate) {
    world().meet(predicate, costs().meeting);
    return world().ballot();
  }
  template <class T>
  static T broadcast(T v, uint32_t from) {
    world().meet(v, costs().meeting);
    return static_cast<T>(world().value(from));
  }
  static uint32_t exclusive_scan(uint32_t v, uint32_t& total) {
    world().meet(v, costs().meeting);
    uint32_t before = 0;
    total = 0;
    for (uint32_t i = 0; i < Lanes; ++i) {
      if (i == lane()) before = total;
      total += static_cast<uint32_t>(world().value(i));
    }
    return before;
  }
  static uint32_t rank_among_equal(uint32_t key, bool active, bool& last) {
    world().meet(active ? uint64_t{key} + 1 : 0, costs().meeting);
    uint32_t rank = 0;
    last = active;
    for (uint32_t i = 0; active && i < Lanes; ++i) {
      if (world().value(i) != uint64_t{key} + 1) continue;
      if (i < lane()) ++rank;
      if (i > lane()) last = false;
    }
    return rank;
  }
};

// For GPUs that have mapped one another's memory. Actors also store to the memory of other machines as if it were
// mapped, as on the CPU engine (csrc/network).
template <uint32_t Lanes>
struct MappedPlatform : Meetings<Lanes> {
  static constexpr bool kPeersMapped = true;
  static constexpr bool kSpansMachines = false;
};

// The same for ranks on several machines. Relays are warps of their own, as on a GPU.
template <uint32_t Lanes>
struct SpreadLanes : SpreadPlatform<MappedPlatform<Lanes>, true> {};
static_assert(RunsProtocol<MappedPlatform<32>> && RunsProtocol<SpreadLanes<1>>);

// For a relay, which is one lane here. A ballot takes no time, because here it looks at one of a packet's tokens, and
// on a GPU at 32 of them.
struct RelayThread : SpreadLanes<1> {
  static uint32_t ballot(bool predicate) { return predicate; }
};

// For the team that builds packets, which is one lane here. Its loads and collectives take no time, because
// Machine::packets is the time of the whole team.
struct UntimedPlatform : Memory, OneLane {
  static constexpr bool kPeersMapped = true;
  static constexpr bool kSpansMachines = false;
  template <class T>
  static T load_relaxed(const T* p) {
    return *p;
  }
};

}  // namespace flashmoe::sim

// What the protocol asks of the machine on which it runs. The GPU, the CPU engine, the tests and the simulation each
// have a Platform.
//
// A Platform is a type that has only static members. Protocol code is written for the kLanes lanes of one warp, which
// work side by side: every lane calls every function, lane() tells a lane which part of the work is its own, and lanes
// meet in the collective functions below. On a GPU kLanes is 32, on the CPU engine 1. Tests run 4 and 8 lanes as
// threads (tests/cpp), so ThreadSanitizer checks the code of lanes without lockstep. The concept RunsProtocol says what
// a Platform has. Each Platform is checked against it where the Platform is defined.
//
// poll and post are for code that looks often and publishes much. On a GPU, an acquire load holds up every load behind
// it, and a release store waits for every store before it. So code polls many words at once, without acquire, and then
// loads those words that had news once more, with acquire. A fence could replace this second load. But at system scope
// a fence also releases: it waits for writes to peers, which take 0.1 ms at the start of a call. On CPU platforms poll
// acquires and post releases, and so do the functions named `nearby`. There, acquire and the fences are empty, since
// ThreadSanitizer knows no fences.
#pragma once

#include <concepts>

#include "flashmoe/protocol/base.h"

namespace flashmoe {

// Scope tags. kDevice: between actors of one rank. kSystem: another rank may be the other side.
struct DeviceScope {};
struct SystemScope {};
inline constexpr DeviceScope kDevice{};
inline constexpr SystemScope kSystem{};

// What all lanes of a warp do together.
template <class P>
concept MeetsInWarps = requires(bool predicate, uint32_t v, uint32_t& v_out, uint64_t wide, bool& last) {
  { P::kLanes + 0u } -> std::same_as<uint32_t>;
  { P::lane() } -> std::same_as<uint32_t>;
  P::sync();                                           // orders the lanes' memory accesses
  { P::ballot(predicate) } -> std::same_as<uint32_t>;  // bit i: lane i's predicate
  { P::broadcast(v, v) } -> std::same_as<uint32_t>;    // (value, lane): each lane may name another source
  { P::broadcast(wide, v) } -> std::same_as<uint64_t>;
  { P::exclusive_scan(v, v_out) } -> std::same_as<uint32_t>;  // (value, total of all lanes)
  // (key, active, last): how many active lower lanes have the same key; last: this is the highest active lane with it.
  { P::rank_among_equal(v, predicate, last) } -> std::same_as<uint32_t>;
  { P::popcount(v) } -> std::same_as<uint32_t>;
  // (bits, n): index of the set bit with n set bits below it; any number if there is none. (0b1010, 1) is 3.
  { P::nth_bit(v, v) } -> std::same_as<uint32_t>;
  // The team: how many warps dispatch a token block, which of them this warp is, and a barrier for all their lanes,
  // which orders their memory accesses.
  { P::workers() } -> std::same_as<uint32_t>;
  { P::worker() } -> std::same_as<uint32_t>;
  P::team_sync();
};

// Memory that other actors, and other ranks, read and write.
template <class P>
concept HasMemory =
    requires(uint32_t* p, const uint32_t* from, uint32_t v, uint64_t* wide, const uint64_t* wide_from, uint64_t w) {
      { P::load_relaxed(from) } -> std::same_as<uint32_t>;
      { P::load_relaxed(wide_from) } -> std::same_as<uint64_t>;
      { P::load_acquire(from, kDevice) } -> std::same_as<uint32_t>;
      { P::load_acquire(wide_from, kSystem) } -> std::same_as<uint64_t>;
      P::store_relaxed(p, v);
      P::store_relaxed(wide, w);
      P::store_relaxed(wide, w, kSystem);  // words that peers poll
      P::store_release(wide, w, kDevice);
      P::store_release(wide, w, kSystem);
      // poll() is a relaxed load. What the lane's last poll of a word saw is acquired by acquire() of the word, or by a
      // fence.
      { P::poll(wide_from, kDevice) } -> std::same_as<uint64_t>;
      { P::poll(wide_from, kSystem) } -> std::same_as<uint64_t>;
      P::acquire(wide_from, kDevice);
      P::acquire(wide_from, kSystem);
      P::release_fence(kDevice);                         // also acquires what the lane has polled
      P::post(wide, w);                                  // a store that releases what is before the last release_fence
      { P::fetch_add(p, v) } -> std::same_as<uint32_t>;  // relaxed: tickets, claims
      { P::fetch_add(wide, w) } -> std::same_as<uint64_t>;
      P::add(wide, w);           // relaxed, to memory that no actor reads; returns nothing
      P::keep_largest(wide, w);  // likewise; the word becomes the larger of itself and w
      { P::fetch_add_acq_rel(p, v) } -> std::same_as<uint32_t>;  // at device scope: dependency counters
      { P::fetch_add_acq_rel(wide, w) } -> std::same_as<uint64_t>;
      P::acquire_fence(kDevice);                        // acquires what the lane's relaxed operations saw
      { P::post_add(p, v) } -> std::same_as<uint32_t>;  // relaxed, between a release_fence and an acquire_fence
      // Functions named `nearby` are for words that only the workers of one processor share. On a GPU they are
      // relaxed. compare_swap_nearby(p, old, v) returns the word's value; if that was `old`, the word is v now.
      // fence_nearby() orders these accesses and the lane's other accesses.
      { P::fetch_add_nearby(p, v) } -> std::same_as<uint32_t>;
      { P::look_nearby(p) } -> std::same_as<uint32_t>;
      P::set_nearby(p, v);
      { P::compare_swap_nearby(p, v, v) } -> std::same_as<uint32_t>;
      P::fence_nearby();
    };

// What a Platform needs if peers are not mapped. `to` and `signal` are addresses in this rank's own heap, and name
// the same places of the peer's heap, where the functions write. All lanes call them, but only one lane calls
// signal(). An actor that has seen a word that a peer put, and has acquired it at system scope, may read what the
// peer put before the word.
template <class P>
concept PutsToPeers =
    requires(void* to, const void* from, uint32_t bytes, uint32_t peer, uint64_t* signal, uint64_t word) {
      P::put(to, from, bytes, peer);  // sends what all lanes wrote to `from`, which must stay until quiet() returns
      P::put_signal(to, from, bytes, signal, word,
                    peer);  // put(), then the word; if a fence() came between, earlier puts arrive before the word, too
      P::fence();           // the warp's earlier puts arrive before its later ones to the same peer
      P::quiet();           // returns when the warp's earlier puts have arrived
      P::signal(signal, word,
                peer);  // arrives after the puts of a warp, if this lane has seen that the warp's quiet() returned
    };

template <class P>
concept RunsProtocol = MeetsInWarps<P> && HasMemory<P> && requires(uint32_t idle) {
  { P::now_ns() } -> std::same_as<uint64_t>;  // monotonic, never 0
  P::backoff(idle);                           // idle: consecutive idle steps of the one spin loop
  P::rest();                                  // a pause of a worker that polls for what is not urgent
  { !P::kSleeps } -> std::same_as<bool>;      // backoff gives the core away, so a step may take long
  // Whether a peer's heap can be loaded from and stored to. If not, only puts reach it, and only senders put
  // (actors/put_sender.h).
  { !P::kPeersMapped } -> std::same_as<bool>;
  { !P::kSpansMachines } -> std::same_as<bool>;  // ranks may be on several machines (protocol/machines.h)
} && (P::kPeersMapped || PutsToPeers<P>);

// How many lower lanes satisfy the predicate; total: how many lanes do.
template <class P>
FLASHMOE_FN uint32_t count_before(bool predicate, uint32_t& total) {
  const uint32_t lanes = P::ballot(predicate);
  total = P::popcount(lanes);
  return P::popcount(lanes & ((1u << P::lane()) - 1));
}

// Index of the lowest set bit; 32 if there is none.
template <class P>
FLASHMOE_FN uint32_t lowest_bit(uint32_t bits) {
  return P::popcount((bits & (0u - bits)) - 1u);
}

template <class P>
FLASHMOE_FN uint32_t count_lanes(bool predicate) {
  return P::popcount(P::ballot(predicate));
}

}  // namespace flashmoe

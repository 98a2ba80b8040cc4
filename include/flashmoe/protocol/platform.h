// What the protocol asks of the machine it runs on.
//
// A Platform is a type with only static members. Protocol code is written for the kLanes lanes of one warp working
// side by side: every lane calls every function, work is strided by lane(), and lanes meet in the collectives
// below. On a GPU kLanes is 32; the CPU engine has 1; the tests run 4 and 8 lanes as threads (tests/cpp), so that
// lane code is checked under ThreadSanitizer without lockstep.
//
//   static constexpr uint32_t kLanes;
//   uint32_t lane();
//   void     sync();                                    // all lanes; orders their memory accesses
//   uint32_t ballot(bool);                              // bit i: lane i's predicate
//   T        broadcast(T, uint32_t lane);               // uint32_t or uint64_t; each lane may name another source
//   uint32_t popcount(uint32_t);
//   uint32_t nth_bit(uint32_t bits, uint32_t n);        // index of the set bit with n set bits below it; any number if
//                                                       // there is none. (0b1010, 1) is 3
//   uint32_t exclusive_scan(uint32_t v, uint32_t& total);
//   uint32_t rank_among_equal(uint32_t key, bool active, bool& last);   // active lower lanes with the same key; last:
//                                                       // this is the highest active lane with that key
//   T        load_relaxed(const T*);                        // T: uint32_t or uint64_t
//   T        load_acquire(const T*, Scope);
//   void     store_relaxed(T*, T);                     with kSystem: for words that peers poll
//   void     store_release(T*, T, Scope);
//   T        poll(const T*, Scope);                      // relaxed; what it saw is acquired by acquire() or a fence
//   void     acquire(const T*, Scope);                  // what the lane saw in its last poll of the word
//   void     release_fence(Scope);                      // also acquires what was polled
//   void     post(T*, T);                               // a store that releases what is before the last release_fence
//   T        fetch_add(T*, T);                              // relaxed: tickets, claims
//   void     add(uint64_t*, uint64_t);                      // relaxed, of memory that no actor reads; nothing comes back
//   void     keep_largest(uint64_t*, uint64_t);             // the same: the larger of both stays
//   T        fetch_add_acq_rel(T*, T);                      // at device scope: dependency counters
//   void     acquire_fence(Scope);                      // of what the lane's relaxed operations saw
//   T        post_add(T*, T);                           // relaxed, between a release_fence and an acquire_fence
//   uint32_t fetch_add_nearby(uint32_t*, uint32_t);     // relaxed, as the next three: among the workers of one processor
//   uint32_t look_nearby(uint32_t*);                    // a load
//   void     set_nearby(uint32_t*, uint32_t);
//   uint32_t compare_swap_nearby(uint32_t*, uint32_t old, uint32_t v);   // what was there; if it was `old`, now it is v
//   void     fence_nearby();                            // orders what these saw or wrote, and the lane's other accesses
//   uint64_t now_ns();                                  // monotonic, never 0
//   uint32_t workers(), worker();                       // how many warps dispatch a token block, and which this is
//   void     team_sync();                               // all lanes of all of them; orders their memory accesses
//   void     backoff(uint32_t idle);                    // idle: consecutive idle steps of the one spin loop
//   void     rest();                                    // a pause of a worker that polls for what is not urgent
//   static constexpr bool kSleeps;                      // backoff gives the core away, so a step may take long
//   static constexpr bool kPeersMapped;                 // a peer's heap can be loaded from and stored to. Else only
//                                                       // puts reach it, and only senders put (actors/put_sender.h)
//
// Where peers are not mapped, also these. `to` and `signal` are addresses in the own heap; what is written is the same
// place of the peer's. All lanes call them; signal() one lane:
//   void     put(void* to, const void* from, uint32_t bytes, uint32_t peer);   // sends what all lanes wrote to `from`,
//                                                       // in heap or workspace; it must not change before quiet()
//   void     put_signal(to, from, bytes, uint64_t* signal, uint64_t word, peer);   // put(), then the word. An earlier
//                                                       // put arrives before it only if a fence() is in between
//   void     fence();                                   // the warp's earlier puts arrive before its later ones to the same peer
//   void     quiet();                                   // returns when the warp's earlier puts have arrived
//   void     signal(uint64_t* to, uint64_t word, uint32_t peer);   // arrives after puts of any warp that has been
//                                                       // through quiet(), if this lane knows that it has
// Who has seen a word that a peer put, and acquired it at system scope, may read what the peer put before the word.
//
// poll and post are for looking often and publishing much. On a GPU an acquire load holds up every load behind it, and
// a release store waits for every store before it; so words are polled, many at once, and those that had news are
// loaded once more, with acquire. A fence instead would, at system scope, also release, and wait for writes to peers,
// which at the start of a call take 0.1 ms. On CPU platforms poll acquires and post releases, likewise what is nearby;
// acquire and the fences are empty, since ThreadSanitizer knows no fences.
#pragma once

#include "flashmoe/protocol/base.h"

namespace flashmoe {

// Scope tags. kDevice: between actors of one rank. kSystem: another rank may be the other side.
struct DeviceScope {};
struct SystemScope {};
inline constexpr DeviceScope kDevice{};
inline constexpr SystemScope kSystem{};

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

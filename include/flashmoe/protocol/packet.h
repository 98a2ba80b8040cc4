// Packets: the (token, k) pairs of one token block, sorted by destination rank and local expert, written into the
// destinations' heaps.
//
// Run by one warp per token block, on routing that the gate left in shared memory; on a GPU the two passes over 62
// tokens x K = 8 (T = 8192 on 132 SMs) are then 16 steps of shared-memory work each.
#pragma once

#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// A (token, k) pair's expert and the rank that owns it, in one word.
struct Pair {
  static constexpr uint32_t kDropped = 0xffffffffu;
  FLASHMOE_HD static constexpr uint32_t make(uint32_t expert, uint32_t owner) { return owner << 16 | expert; }
  FLASHMOE_HD static constexpr uint32_t expert(uint32_t pair) { return pair & 0xffffu; }
  FLASHMOE_HD static constexpr uint32_t owner(uint32_t pair) { return pair >> 16; }
};

// Shared memory of the warp. The gate fills ids and weights; build_packets turns ids into pairs in place.
struct PacketScratch {
  union {
    int32_t* ids;     // [tokens of the block * K] chosen expert
    uint32_t* pairs;  // [tokens of the block * K]
  };
  float* weights;         // [tokens of the block * K]
  uint32_t* count;        // [E] pairs of the block routed to the expert
  uint32_t* start;        // [E] index of the expert's next entry within its packet
  uint32_t* entries;      // [R] entries of the packet for each rank
  const uint32_t* owner;  // [E] the call's, copied where it is quick to read
};

// Whether rank q needs the row of this token (its drops already marked).
FLASHMOE_HD bool goes_to(const Call& c, uint32_t token, uint32_t q) {
  const int32_t* ids = c.routing(token);
  for (uint32_t k = 0; k < c.top_k; ++k) {
    if (ids[k] >= 0 && c.owner[ids[k]] == q) return true;
  }
  return false;
}

// Calls visit(i, pair, place) for the pairs i = (token of block b) * K + k that are not dropped, lanes side by side,
// tokens ascending. place is the number of earlier pairs with the same expert, counted in `counter`, which the pass
// advances.
template <class P, class Visit>
FLASHMOE_FN void for_each_pair(const Call& c, uint32_t b, const uint32_t* pairs, uint32_t* counter, Visit&& visit) {
  const uint32_t n = c.tokens_in_block(b) * c.top_k;
  for (uint32_t base = 0; base < n; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    const uint32_t pair = i < n ? pairs[i] : Pair::kDropped;
    const bool active = pair != Pair::kDropped;
    bool last = false;
    const uint32_t rank = P::rank_among_equal(pair, active, last);
    const uint32_t place = active ? counter[Pair::expert(pair)] + rank : 0;
    P::sync();
    if (active && last) counter[Pair::expert(pair)] = place + 1;
    P::sync();
    if (active) visit(i, pair, place);
  }
}

template <class P>
FLASHMOE_FN void bad_routing(const Call& c, FaultKind kind, uint32_t token, int32_t expert) {
  post_fault<P>(c, {.kind = kind,
                    .actor = Actor::kProcessor,
                    .awaited = c.rank,
                    .culprit = c.rank,
                    .index = token,
                    .expected = c.experts,
                    .seen = static_cast<uint64_t>(static_cast<uint32_t>(expert))});
}

// Turns ids into pairs. Given routing is not trusted: an expert out of range, or twice in one token, would write outside
// its packet. False if there is one.
template <class P>
FLASHMOE_FN bool make_pairs(const Call& c, uint32_t b, const PacketScratch& s) {
  const uint32_t first = b << c.log2_block;
  const uint32_t n = c.tokens_in_block(b) * c.top_k;
  uint32_t bad = n;  // some pair out of range
  int32_t bad_id = 0;
  for (uint32_t i = P::lane(); i < n; i += P::kLanes) {
    const int32_t id = s.ids[i];
    const bool good = id >= 0 && static_cast<uint32_t>(id) < c.experts;
    if (!good) {
      bad = i;
      bad_id = id;
    }
    s.pairs[i] = good ? Pair::make(static_cast<uint32_t>(id), s.owner[id]) : Pair::kDropped;
  }
  P::sync();
  uint32_t twice = n;  // some pair whose expert the token already has
  for (uint32_t i = P::lane(); i < n; i += P::kLanes) {
    for (uint32_t j = i - i % c.top_k; j < i; ++j) twice = s.pairs[j] == s.pairs[i] ? i : twice;
  }
  if (bad < n) bad_routing<P>(c, FaultKind::kExpertRange, first + bad / c.top_k, bad_id);
  if (bad == n && twice < n) {
    bad_routing<P>(c, FaultKind::kDuplicateExpert, first + twice / c.top_k,
                   static_cast<int32_t>(Pair::expert(s.pairs[twice])));
  }
  return P::ballot(bad < n || twice < n) == 0;
}

// Capacity (GShard section 2.2): of the pairs this rank routes to an expert, the first `capacity` in token order stay.
// The count of earlier blocks is handed from block to block. False if the wait for it was aborted.
template <class P>
FLASHMOE_FN bool drop_over_capacity(const Call& c, uint32_t b, const PacketScratch& s) {
  const uint32_t* before = nullptr;
  if (b > 0) {
    const WaitEnd end = wait_until<P>(
        c,
        [&] {
          const uint64_t word = P::broadcast(P::load_acquire(c.capacity_signal(b - 1), kDevice), 0);
          return Signal::epoch(word) == c.epoch ? Step::kDone : Step::kIdle;
        },
        OsLiveness<P>{c});
    if (end != WaitEnd::kDone) return false;
    P::sync();
    before = c.capacity_prefix(b - 1);
  }
  for (uint32_t e = P::lane(); e < c.experts; e += P::kLanes) {
    c.capacity_prefix(b)[e] = s.count[e] + (before ? before[e] : 0);
    s.count[e] = 0;
  }
  P::sync();
  if (P::lane() == 0) P::store_release(c.capacity_signal(b), Signal::make(c.epoch, 0), kDevice);
  for_each_pair<P>(c, b, s.pairs, s.count, [&](uint32_t i, uint32_t pair, uint32_t place) {
    if ((before ? before[Pair::expert(pair)] : 0) + place >= c.capacity) s.pairs[i] = Pair::kDropped;
  });
  // What stayed is a prefix of the pairs in token order.
  for (uint32_t e = P::lane(); e < c.experts; e += P::kLanes) {
    const uint32_t earlier = before ? before[e] : 0;
    s.count[e] = min_of(s.count[e], c.capacity > earlier ? c.capacity - earlier : 0u);
  }
  P::sync();
  return true;
}

// Turns counts into the packets' sizes and offsets. (Those of a packet without entries are written too, and not read.)
template <class P>
FLASHMOE_FN void place_experts(const Call& c, uint32_t b, const PacketScratch& s) {
  for (uint32_t q = 0; q < c.ranks; ++q) {
    const uint32_t* experts = c.by_owner + c.owner_base[q];
    const uint32_t owned = c.owned(q);
    uint16_t* offsets = c.packet_offsets(q, c.rank, b);
    uint32_t entries = 0;
    for (uint32_t base = 0; base < owned; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      const uint32_t expert = l < owned ? experts[l] : 0;
      uint32_t total;
      const uint32_t start = entries + P::exclusive_scan(l < owned ? s.count[expert] : 0, total);
      if (l < owned) {
        s.start[expert] = start;
        offsets[l] = static_cast<uint16_t>(start);
      }
      entries += total;
    }
    if (P::lane() == 0) {
      offsets[owned] = static_cast<uint16_t>(entries);
      s.entries[q] = entries;
    }
  }
  P::sync();
}

// Keeps the block's routing for its combine and for the report.
template <class P>
FLASHMOE_FN void record_routing(const Call& c, uint32_t b, const PacketScratch& s) {
  const uint32_t first = b << c.log2_block;
  for (uint32_t i = P::lane(); i < c.tokens_in_block(b) * c.top_k; i += P::kLanes) {
    const uint32_t token = first + i / c.top_k, k = i % c.top_k;
    c.routing(token)[k] = s.pairs[i] == Pair::kDropped ? -1 : static_cast<int32_t>(Pair::expert(s.pairs[i]));
    c.weights(token)[k] = s.weights[i];
  }
}

// Writes the entries of every packet of block b, and for `reduced` how many each token has on each rank.
template <class P>
FLASHMOE_FN void write_entries(const Call& c, uint32_t b, const PacketScratch& s) {
  const uint32_t first = b << c.log2_block;
  for_each_pair<P>(c, b, s.pairs, s.start, [&](uint32_t i, uint32_t pair, uint32_t place) {
    const uint32_t token = first + i / c.top_k, k = i % c.top_k;
    uint32_t ordinal = 0;
    for (uint32_t j = c.reduced() ? i - k : i; j < i; ++j)
      ordinal += s.pairs[j] != Pair::kDropped && Pair::owner(s.pairs[j]) == Pair::owner(pair);
    c.packet_entries(Pair::owner(pair), c.rank, first)[place] = {token, static_cast<uint16_t>(k),
                                                                 static_cast<uint16_t>(ordinal), s.weights[i]};
  });
  if (!c.reduced()) return;
  for (uint32_t q = 0; q < c.ranks; ++q) {
    if (s.entries[q] == 0) continue;
    for (uint32_t t = P::lane(); t < c.tokens_in_block(b); t += P::kLanes) {
      const uint32_t* pairs = s.pairs + t * c.top_k;
      uint32_t n = 0;
      for (uint32_t k = 0; k < c.top_k; ++k) n += pairs[k] != Pair::kDropped && Pair::owner(pairs[k]) == q;
      c.packet_counts(q, c.rank, first)[t] = static_cast<uint16_t>(n);
    }
  }
}

// Everything of block b but the rows and the signals, from the ids and weights of its gate. False if the call is over (bad routing, abort).
template <class P>
FLASHMOE_FN bool build_packets(const Call& c, uint32_t b, const PacketScratch& s) {
  for (uint32_t e = P::lane(); e < c.experts; e += P::kLanes) s.count[e] = 0;
  if (!make_pairs<P>(c, b, s)) return false;
  for_each_pair<P>(c, b, s.pairs, s.count, [](uint32_t, uint32_t, uint32_t) {});
  if (c.capacity != 0 && !drop_over_capacity<P>(c, b, s)) return false;
  place_experts<P>(c, b, s);
  write_entries<P>(c, b, s);
  record_routing<P>(c, b, s);
  for (uint32_t w = P::lane(); w < ceil_div(c.ranks, 32u); w += P::kLanes) {
    uint32_t bits = 0;
    for (uint32_t q = w * 32; q < min_of(c.ranks, w * 32 + 32); ++q) bits |= (s.entries[q] != 0 ? 1u : 0u) << (q % 32);
    c.awaited(b)[w] = bits;
  }
  return true;
}

// After every agent's writes for block b: tells each destination, the others first, that its packet is complete.
template <class P>
FLASHMOE_FN void signal_packets(const Call& c, uint32_t b, const PacketScratch& s) {
  P::sync();
  for (uint32_t i = P::lane(); i < c.ranks; i += P::kLanes) {
    const uint32_t q = (c.rank + 1 + i) % c.ranks;
    P::store_release(c.packet_signal(q, c.rank, b), Signal::make(c.epoch, s.entries[q]), kSystem);
  }
}

}  // namespace flashmoe

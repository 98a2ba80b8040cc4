// Packets: the choices (token, k) of one token block, sorted by destination rank and local expert. A rank's packet for
// itself is written to its heap, where formers read it; those for other ranks to the outbox, from which senders take
// them (actors/sender.h).
//
// Run by a team of warps per token block (P::workers), on routing that the gate left in shared memory. Each worker has
// a range of consecutive tokens: it counts its choices per expert, a scan over workers and experts gives every choice its
// place, and each worker writes its own. Places are in token order, which a capacity factor relies on.
#pragma once

#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// A choice (token, k): its expert and the rank that is to compute it, in one word.
struct Choice {
  static constexpr uint32_t kDropped = 0xffffffffu;
  FLASHMOE_HD static constexpr uint32_t make(uint32_t expert, uint32_t owner) { return owner << 16 | expert; }
  FLASHMOE_HD static constexpr uint32_t expert(uint32_t choice) { return choice & 0xffffu; }
  FLASHMOE_HD static constexpr uint32_t owner(uint32_t choice) { return choice >> 16; }
};

// Shared memory of the team. The gate fills ids and weights; build_packets turns ids into choices in place.
struct PacketScratch {
  union {
    int32_t* ids;       // [tokens of the token block * K] chosen expert
    uint32_t* choices;  // [tokens of the token block * K]
  };
  float* weights;     // [tokens of the token block * K]
  uint16_t* place;    // [workers][E] a worker's choices of the expert; after scan_workers(), the place of its next one
  uint16_t* count;    // [E] choices of the token block that the expert keeps
  uint16_t* start;    // [E] place of the expert's first entry within its packet
  uint32_t* entries;  // [R] entries of the packet for each rank
  uint32_t* bad;      // non-zero: the routing is not valid
  const uint32_t* owner;  // [E] the call's, copied where it is quick to read
};

// The choices i = (token of token block b) * K + k of this worker.
struct ChoiceRange {
  uint32_t begin, end;
};

template <class P>
FLASHMOE_FN ChoiceRange own_choices(const Call& c, uint32_t b) {
  const uint32_t tokens = c.tokens_in_block(b);
  const uint32_t each = ceil_div(tokens, P::workers());
  const uint32_t first = min_of(P::worker() * each, tokens);
  return {first * c.shape.top_k, min_of(first + each, tokens) * c.shape.top_k};
}

// Calls visit(i, choice, place) for the worker's choices that are not dropped, lanes side by side, tokens ascending. place
// is what the expert's counter was plus the number of the worker's earlier choices of that expert; the counters go on.
template <class P, class Visit>
FLASHMOE_FN void for_each_choice(const ChoiceRange& range, const uint32_t* choices, uint16_t* counter, Visit&& visit) {
  FLASHMOE_NO_UNROLL
  for (uint32_t base = range.begin; base < range.end; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    const uint32_t choice = i < range.end ? choices[i] : Choice::kDropped;
    const bool active = choice != Choice::kDropped;
    bool last = false;
    const uint32_t rank = P::rank_among_equal(choice, active, last);
    const uint32_t place = active ? counter[Choice::expert(choice)] + rank : 0;
    P::sync();
    if (active && last) counter[Choice::expert(choice)] = static_cast<uint16_t>(place + 1);
    P::sync();
    if (active) visit(i, choice, place);
  }
}

template <class P>
FLASHMOE_FN void bad_routing(const Call& c, FaultKind kind, uint32_t token, int32_t expert) {
  post_fault<P>(c, {.kind = kind,
                    .actor = Actor::kProcessor,
                    .awaited = c.rank,
                    .culprit = c.rank,
                    .index = token,
                    .expected = c.shape.routed_experts() / c.shape.slices,
                    .seen = static_cast<uint64_t>(static_cast<uint32_t>(expert))});
}

// Turns the worker's ids into choices. Given routing is not trusted: an expert out of range, or twice in one token, would
// write outside its packet. Reports such a choice, and marks the token block as bad. (Behind a token's K ids is the shared
// expert's, which is out of range among the K.)
template <class P>
FLASHMOE_FN void make_choices(const Call& c, uint32_t b, const ChoiceRange& range, const PacketScratch& s) {
  const uint32_t first = b << c.policy.log2_block;
  const uint32_t none = range.end;
  uint32_t bad = none;  // some choice out of range
  int32_t bad_id = 0;
  for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
    const int32_t id = s.ids[i];
    bool good = id >= 0 && static_cast<uint32_t>(id) < c.shape.experts;
    if (good && static_cast<uint32_t>(id) >= c.shape.routed_experts()) {
      good = i % c.shape.top_k >= c.shape.routed_top_k();
    }
    if (!good) {
      bad = i;
      bad_id = id;
    }
    s.choices[i] = good ? Choice::make(static_cast<uint32_t>(id), s.owner[id]) : Choice::kDropped;
  }
  P::sync();
  uint32_t twice = none;  // some choice whose expert the token already has
  for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
    for (uint32_t j = i - i % c.shape.top_k; j < i; ++j) twice = s.choices[j] == s.choices[i] ? i : twice;
  }
  if (bad < none) {
    bad_routing<P>(c, FaultKind::kExpertRange, first + bad / c.shape.top_k, bad_id);
  } else if (twice < none) {
    bad_routing<P>(c, FaultKind::kDuplicateExpert, first + twice / c.shape.top_k,
                   static_cast<int32_t>(Choice::expert(s.choices[twice]) / c.shape.slices));
  }
  if (bad < none || twice < none) P::store_relaxed(s.bad, 1u);
}

// With a capacity: waits until token block b - 1 is counted, and returns for each expert how many choices of it token
// blocks 0 .. b - 1 have. Null for b = 0, and if the wait was aborted (then `aborted`).
template <class P>
FLASHMOE_FN const uint32_t* earlier_choices(const Call& c, uint32_t b, bool& aborted) {
  aborted = false;
  if (b == 0) return nullptr;
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        const uint64_t word = P::broadcast(P::load_acquire(c.capacity_signal(b - 1), kDevice), 0);
        return Signal::epoch(word) == c.epoch ? Step::kDone : Step::kIdle;
      },
      OsLiveness<P>{c});
  aborted = end != WaitEnd::kDone;
  P::sync();
  return c.capacity_prefix(b - 1);
}

// For each expert: turns the workers' counts into the places of their first choices among the token block's choices of
// the expert (counts 3, 0, 2: places 0, 3, 3), and their sum into how many the expert keeps. Capacity (GShard section
// 2.2): of the choices this rank routes to an expert, the first `capacity` in token order stay; token blocks hand on
// the count so far. All choices, kept or not, are added to `load` [E], unless that is null.
template <class P>
FLASHMOE_FN void scan_workers(const Call& c, uint32_t b, const PacketScratch& s, const uint32_t* before,
                              uint64_t* load) {
  for (uint32_t e = P::worker() * P::kLanes + P::lane(); e < c.shape.experts; e += P::workers() * P::kLanes) {
    uint32_t sum = 0;
    FLASHMOE_NO_UNROLL
    for (uint32_t w = 0; w < P::workers(); ++w) {
      uint16_t* place = &s.place[w * c.shape.experts + e];
      const uint32_t n = *place;
      *place = static_cast<uint16_t>(sum);
      sum += n;
    }
    // Of an expert in slices, once: all of them are chosen together.
    if (load != nullptr && sum != 0 && e < c.shape.routed_experts() && e % c.shape.slices == 0) {
      P::add(&load[e / c.shape.slices], uint64_t{sum});
    }
    uint32_t kept = sum;
    if (c.shape.capacity != 0 && e < c.shape.routed_experts()) {
      const uint32_t earlier = before ? before[e] : 0;
      c.capacity_prefix(b)[e] = earlier + sum;
      kept = min_of(sum, c.shape.capacity > earlier ? c.shape.capacity - earlier : 0u);
    }
    s.count[e] = static_cast<uint16_t>(kept);
  }
}

// Marks as dropped the worker's choices beyond what their experts keep: the last in token order, so places stay dense.
template <class P>
FLASHMOE_FN void drop_over_capacity(const Call& c, const ChoiceRange& range, const PacketScratch& s, uint16_t* place) {
  for_each_choice<P>(range, s.choices, place, [&](uint32_t i, uint32_t choice, uint32_t at) {
    if (at >= s.count[Choice::expert(choice)]) s.choices[i] = Choice::kDropped;
  });
  // The pass counted kept and dropped choices alike: take the kept ones off again, for the next pass.
  P::sync();
  for (uint32_t e = P::lane(); e < c.shape.experts; e += P::kLanes) place[e] = min_of<uint16_t>(place[e], s.count[e]);
  P::sync();
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (P::lane() == 0 && s.choices[i] != Choice::kDropped) --place[Choice::expert(s.choices[i])];
  }
  P::sync();
}

// Turns the experts' counts into the packets' sizes and offsets, a worker per destination. (A packet without entries
// has offsets too: formers look at every packet.)
template <class P>
FLASHMOE_FN void place_experts(const Call& c, uint32_t b, const PacketScratch& s) {
  for (uint32_t q = P::worker(); q < c.shape.ranks; q += P::workers()) {
    const uint32_t* experts = c.placement.by_owner + c.placement.owner_base[q];
    const uint32_t owned = c.owned(q);
    uint16_t* offsets = c.out_offsets(q, b);
    uint32_t entries = 0;
    constexpr uint32_t kAhead = 4;  // loads under way together
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < owned; base += kAhead * P::kLanes) {
      uint32_t expert[kAhead];
      FLASHMOE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t l = base + i * P::kLanes + P::lane();
        expert[i] = l < owned ? experts[l] : kElsewhere;
      }
      FLASHMOE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t l = base + i * P::kLanes + P::lane();
        uint32_t total;
        const bool here = expert[i] != kElsewhere;
        const uint32_t start = entries + P::exclusive_scan(here ? s.count[expert[i]] : 0u, total);
        if (here) s.start[expert[i]] = static_cast<uint16_t>(start);
        if (l < owned) offsets[l] = static_cast<uint16_t>(start);
        entries += total;
      }
    }
    if (P::lane() == 0) {
      offsets[owned] = static_cast<uint16_t>(entries);
      s.entries[q] = entries;
    }
  }
}

// Keeps the routing of the worker's tokens, for Combine and for the report.
template <class P>
FLASHMOE_FN void record_routing(const Call& c, uint32_t b, const ChoiceRange& range, const PacketScratch& s) {
  const uint32_t first = b << c.policy.log2_block;
  for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
    const uint32_t token = first + i / c.shape.top_k, k = i % c.shape.top_k;
    c.routing(token)[k] = s.choices[i] == Choice::kDropped ? -1 : static_cast<int32_t>(Choice::expert(s.choices[i]));
    c.weights(token)[k] = s.weights[i];
  }
}

// Writes the worker's entries, and how many of them each of its tokens has on each rank, for senders and for Reduce.
template <class P>
FLASHMOE_FN void write_entries(const Call& c, uint32_t b, const ChoiceRange& range, const PacketScratch& s,
                               uint16_t* place) {
  const uint32_t first = b << c.policy.log2_block;
  for_each_choice<P>(range, s.choices, place, [&](uint32_t i, uint32_t choice, uint32_t at) {
    const uint32_t token = first + i / c.shape.top_k, k = i % c.shape.top_k;
    uint32_t ordinal = 0;
    for (uint32_t j = c.reduced() ? i - k : i; j < i; ++j)
      ordinal += s.choices[j] != Choice::kDropped && Choice::owner(s.choices[j]) == Choice::owner(choice);
    c.out_entries(Choice::owner(choice), first)[s.start[Choice::expert(choice)] + at] = {
        token, static_cast<uint16_t>(k), static_cast<uint16_t>(ordinal), s.weights[i]};
  });
  if (!c.reduced() && c.shape.ranks == 1) return;
  for (uint32_t q = 0; q < c.shape.ranks; ++q) {
    for (uint32_t t = range.begin / c.shape.top_k + P::lane(); t < range.end / c.shape.top_k; t += P::kLanes) {
      const uint32_t* choices = s.choices + t * c.shape.top_k;
      uint32_t n = 0;
      for (uint32_t k = 0; k < c.shape.top_k; ++k)
        n += choices[k] != Choice::kDropped && Choice::owner(choices[k]) == q;
      c.out_counts(q, first)[t] = static_cast<uint16_t>(n);
    }
  }
}

// The shared expert behind a token's K choices: `ids` and `weights` are the token's. One lane.
FLASHMOE_FN void choose_shared(const Call& c, int32_t* ids, float* weights, float weight) {
  ids[c.shape.routed_top_k()] = static_cast<int32_t>(c.shape.routed_experts());
  weights[c.shape.routed_top_k()] = weight;
}

// Puts the slices of a token's K experts in place of them, each with the expert's weight: `ids` and `weights` are the
// token's, and have room for that. An expert that does not exist is reported here, where its number is known. One lane.
template <class P>
FLASHMOE_FN void choose_slices(const Call& c, uint32_t token, int32_t* ids, float* weights) {
  for (uint32_t k = c.shape.gate_top_k; k-- != 0;) {  // from behind: what is written has been read
    const int32_t id = ids[k];
    const float weight = weights[k];
    const bool exists = id >= 0 && static_cast<uint32_t>(id) < c.shape.gate_experts;
    if (!exists) bad_routing<P>(c, FaultKind::kExpertRange, token, id);
    for (uint32_t n = k * c.shape.slices; n < (k + 1) * c.shape.slices; ++n) {
      ids[n] = exists ? static_cast<int32_t>(static_cast<uint32_t>(id) * c.shape.slices + n % c.shape.slices) : -1;
      weights[n] = weight;
    }
  }
}

// Makes all packets of token block b, but for rows and signals, from the choices that make(range) leaves in the scratch
// for the worker's range.
template <class P, class Make>
FLASHMOE_FN bool build_packets_of(const Call& c, uint32_t b, const PacketScratch& s, uint64_t* load, Make&& make) {
  const ChoiceRange range = own_choices<P>(c, b);
  uint16_t* const place = s.place + P::worker() * c.shape.experts;
  if (P::worker() == 0 && P::lane() == 0) P::store_relaxed(s.bad, 0u);
  P::team_sync();
  for (uint32_t e = P::lane(); e < c.shape.experts; e += P::kLanes) place[e] = 0;
  make(range);
  P::sync();
  for_each_choice<P>(range, s.choices, place, [](uint32_t, uint32_t, uint32_t) {});
  bool aborted = false;
  const uint32_t* before = c.shape.capacity != 0 ? earlier_choices<P>(c, b, aborted) : nullptr;
  if (aborted && P::lane() == 0) P::store_relaxed(s.bad, 1u);
  P::team_sync();
  if (P::load_relaxed(s.bad) != 0) return false;
  scan_workers<P>(c, b, s, before, load);
  P::team_sync();
  if (c.shape.capacity != 0) {
    if (P::worker() == 0 && P::lane() == 0) {
      P::store_release(c.capacity_signal(b), Signal::make(c.epoch, 0), kDevice);
    }
    drop_over_capacity<P>(c, range, s, place);
  }
  place_experts<P>(c, b, s);
  P::team_sync();
  write_entries<P>(c, b, range, s, place);
  record_routing<P>(c, b, range, s);
  return true;
}

// The same from the ids and weights of the token block's gate. The whole team calls it, after a team_sync; false if the
// call is over (bad routing, abort). load: see scan_workers().
template <class P>
FLASHMOE_FN bool build_packets(const Call& c, uint32_t b, const PacketScratch& s, uint64_t* load = nullptr) {
  return build_packets_of<P>(c, b, s, load, [&](const ChoiceRange& range) { make_choices<P>(c, b, range, s); });
}

// The same from ids that an earlier call has left (Call::routing), -1 where it dropped the choice.
template <class P>
FLASHMOE_FN bool build_known_packets(const Call& c, uint32_t b, const PacketScratch& s) {
  return build_packets_of<P>(c, b, s, nullptr, [&](const ChoiceRange& range) {
    for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
      const int32_t id = s.ids[i];
      s.choices[i] = id < 0 ? Choice::kDropped : Choice::make(static_cast<uint32_t>(id), s.owner[id]);
    }
  });
}

// Tells rank q that its packet of token block b is complete: `entries` of them, and their rows. One lane.
template <class P>
FLASHMOE_FN void signal_packet(const Call& c, uint32_t q, uint32_t b, uint32_t entries) {
  const uint64_t word = Signal::make(c.epoch, entries);
  if (q == c.rank) {
    P::store_release(c.packet_signal(q, c.rank, b), word, kDevice);
  } else {
    P::store_release(c.packet_signal(q, c.rank, b), word, kSystem);
  }
}

// After build_packets(): signals this rank's own packet of token block b. Senders take the signal as well: the token
// block's outbox is complete. The whole team calls it.
template <class P>
FLASHMOE_FN void signal_own_packet(const Call& c, uint32_t b, const PacketScratch& s) {
  P::team_sync();
  if (P::worker() == 0 && P::lane() == 0) signal_packet<P>(c, c.rank, b, s.entries[c.rank]);
}

}  // namespace flashmoe

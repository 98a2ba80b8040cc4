// Packets: the choices (token, k) of one token block, sorted by destination rank and local expert. The engines call
// this code after the gate. A rank writes its packet for itself to its own heap, where formers read it. It writes
// packets for other ranks to the outbox, from which senders take them (actors/sender.h).
//
// A team of warps (P::workers) builds the packets of a token block, from the routing that the gate left in shared
// memory. Each warp of the team, a worker, has a range of consecutive tokens. It counts its choices per expert. A scan
// over workers and experts gives every choice its place, and each worker writes its own choices. Places are in token
// order, which a capacity factor relies on.
#pragma once

#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// What the gate writes in place of an expert's number for a choice that has no expert.
struct ExpertId {
  static constexpr int32_t kNone = -1;              // the caller gave -1: the token has fewer than K experts
  static constexpr int32_t kBad = -0x7fffffff - 1;  // the token's row is bad, and has been noted
  // Narrows an id that the caller gave to 32 bits: the id itself, or the nearest number that fits and is not kBad.
  FLASHMOE_HD static constexpr int32_t given(int64_t id) {
    constexpr int64_t kMost = 0x7fffffff;
    return static_cast<int32_t>(id > kMost ? kMost : id < -kMost ? -kMost : id);
  }
};

// A choice (token, k) as one word: its expert and the rank that is to compute it, or why it has no expert.
struct Choice {
  static constexpr uint32_t kDropped = ~0u;   // dropped, because the expert has as many rows as its capacity
  static constexpr uint32_t kNone = ~0u - 1;  // the caller gave no expert
  static constexpr uint32_t kBad = ~0u - 2;   // its token's row is bad, and so are all choices of the token
  FLASHMOE_HD static constexpr bool exists(uint32_t choice) { return choice < kBad; }
  // What Call::routing() has for the choice: its expert, or a negative number that says why there is none.
  FLASHMOE_HD static constexpr int32_t recorded(uint32_t choice) {
    return static_cast<int32_t>(exists(choice) ? expert(choice) : choice);
  }
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
  uint16_t* place;    // [workers][E] how many choices of the expert a worker has; after scan_workers(), the place of
                      // the worker's next choice of it
  uint16_t* count;    // [E] choices of the token block that the expert keeps
  uint16_t* start;    // [E] place of the expert's first entry within its packet
  uint32_t* entries;  // [R] entries of the packet for each rank
  uint32_t* aborted;  // non-zero: the call is over
  uint32_t* missing;  // non-zero: some choice is kNone or kBad
  const uint32_t* owner;  // [E] CallPlacement::owner, copied to memory that is quick to read
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

// Calls visit(i, choice, place) for each of the worker's choices that has an expert, kLanes choices at a time, in the
// order of tokens. place is the value of the expert's counter before, plus the number of the worker's earlier choices
// of that expert. Adds the choices to the counters.
template <class P, class Visit>
FLASHMOE_FN void for_each_choice(const ChoiceRange& range, const uint32_t* choices, uint16_t* counter, Visit&& visit) {
  FLASHMOE_NO_UNROLL
  for (uint32_t base = range.begin; base < range.end; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    const uint32_t choice = i < range.end ? choices[i] : Choice::kDropped;
    const bool active = Choice::exists(choice);
    bool last = false;
    const uint32_t rank = P::rank_among_equal(choice, active, last);
    const uint32_t place = active ? counter[Choice::expert(choice)] + rank : 0;
    P::sync();
    if (active && last) counter[Choice::expert(choice)] = static_cast<uint16_t>(place + 1);
    P::sync();
    if (active) visit(i, choice, place);
  }
}

// Notes an own token's row as bad. One lane.
template <class P>
FLASHMOE_FN void note_row(const Call& c, RowFault fault, uint32_t token, int32_t id = 0) {
  P::keep_largest(&c.control()->noted.value, RowNote{fault, token, id}.pack());
}

// Makes bad all choices of those of the worker's tokens that have an expert twice, or a bad choice. This is rare, so
// one lane does all of a token. No other lane reads the token's choices, so the lane may change them.
template <class P>
FLASHMOE_FN void spoil_tokens(const Call& c, uint32_t b, const ChoiceRange& range, const PacketScratch& s) {
  const uint32_t top_k = c.shape.top_k;
  FLASHMOE_NO_UNROLL
  for (uint32_t t = range.begin / top_k + P::lane(); t < range.end / top_k; t += P::kLanes) {
    uint32_t* const choices = s.choices + t * top_k;
    uint32_t bad = 0;
    FLASHMOE_NO_UNROLL
    for (uint32_t k = 0; k < top_k; ++k) {
      if (choices[k] == Choice::kBad) bad = 1;
      FLASHMOE_NO_UNROLL
      for (uint32_t j = 0; j < k; ++j) {
        if (choices[j] != choices[k] || !Choice::exists(choices[k])) continue;
        bad = 1;
        note_row<P>(c, RowFault::kDuplicateExpert, (b << c.policy.log2_block) + t,
                    static_cast<int32_t>(Choice::expert(choices[k]) / c.shape.slices));
      }
    }
    FLASHMOE_NO_UNROLL
    for (uint32_t k = 0; k < top_k && bad != 0; ++k) {
      choices[k] = Choice::kBad;
      s.weights[t * top_k + k] = 0.0f;
    }
  }
}

// The Choice word for choice i, which has no expert: kNone or kBad. If its id names an expert that does not exist,
// notes the token's row as bad.
template <class P>
FLASHMOE_FN uint32_t choice_of_none(const Call& c, uint32_t b, uint32_t i, const PacketScratch& s) {
  const int32_t id = s.ids[i];
  s.weights[i] = 0.0f;  // the caller may give any weight, even NaN, for a choice without an expert
  P::store_relaxed(s.missing, 1u);
  if (id == ExpertId::kNone) return Choice::kNone;
  if (id != ExpertId::kBad) {
    note_row<P>(c, RowFault::kExpertRange, (b << c.policy.log2_block) + i / c.shape.top_k, id);
  }
  return Choice::kBad;
}

// Turns the worker's ids into choices. Ids that a caller gave are not trusted: with an id that is out of range, or
// with an expert that a token has twice, entries would be written outside their packet. The row of such a token is
// noted as bad, and the token gets no expert. (The id of the shared expert is valid only behind a token's K ids.)
template <class P>
FLASHMOE_FN void make_choices(const Call& c, uint32_t b, const ChoiceRange& range, const PacketScratch& s) {
  const uint32_t none = range.end;
  uint32_t odd = none;  // some choice that is bad or equals an earlier one of its token; harmless if both are kNone
  for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
    const int32_t id = s.ids[i];
    bool good = id >= 0 && static_cast<uint32_t>(id) < c.shape.experts;
    if (good && static_cast<uint32_t>(id) >= c.shape.routed_experts()) {
      good = i % c.shape.top_k >= c.shape.routed_top_k();
    }
    const uint32_t choice = good ? Choice::make(static_cast<uint32_t>(id), s.owner[id]) : choice_of_none<P>(c, b, i, s);
    if (choice == Choice::kBad) odd = i;
    s.choices[i] = choice;
  }
  P::sync();
  for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
    for (uint32_t j = i - i % c.shape.top_k; j < i; ++j) odd = s.choices[j] == s.choices[i] ? i : odd;
  }
  if (P::ballot(odd < none) == 0) return;
  P::store_relaxed(s.missing, 1u);
  P::sync();
  spoil_tokens<P>(c, b, range, s);
}

// With a capacity: waits until token block b - 1 is counted, and returns for each expert how many choices of it token
// blocks 0 .. b - 1 have. Null for b = 0. Sets `aborted` if the wait ended without that; then the counts are not
// there.
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

// For each expert: turns the workers' counts into the places of their first choices among the token block's choices
// of the expert (counts 3, 0, 2: places 0, 3, 3), and their sum into the number of choices that the expert keeps.
// Capacity (GShard section 2.2): of this rank's choices of an expert, the expert keeps the first `capacity`, in the
// order of tokens; each token block hands its count on to the next. Adds all choices, kept or not, to `load` [E],
// unless it is null.
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
    // Counts an expert in slices once, because all its slices are chosen together.
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

// Marks as dropped the worker's choices beyond what their experts keep. These are the last in the order of tokens, so
// the places of the others have no gaps.
template <class P>
FLASHMOE_FN void drop_over_capacity(const Call& c, const ChoiceRange& range, const PacketScratch& s, uint16_t* place) {
  for_each_choice<P>(range, s.choices, place, [&](uint32_t i, uint32_t choice, uint32_t at) {
    if (at >= s.count[Choice::expert(choice)]) s.choices[i] = Choice::kDropped;
  });
  // for_each_choice() has added kept and dropped choices to the counters. Takes both off again, because
  // write_entries() goes through the kept ones once more.
  P::sync();
  for (uint32_t e = P::lane(); e < c.shape.experts; e += P::kLanes) place[e] = min_of<uint16_t>(place[e], s.count[e]);
  P::sync();
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (P::lane() == 0 && Choice::exists(s.choices[i])) --place[Choice::expert(s.choices[i])];
  }
  P::sync();
}

// Turns the experts' counts into the packets' sizes and offsets. Each worker takes some destinations. (A packet
// without entries has offsets, too, because formers look at every packet.)
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
    c.routing(token)[k] = Choice::recorded(s.choices[i]);
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
      ordinal += Choice::exists(s.choices[j]) && Choice::owner(s.choices[j]) == Choice::owner(choice);
    c.out_entries(Choice::owner(choice), first)[s.start[Choice::expert(choice)] + at] = {
        token, static_cast<uint16_t>(k), static_cast<uint16_t>(ordinal), s.weights[i]};
  });
  if (!c.reduced() && c.shape.ranks == 1) return;
  for (uint32_t q = 0; q < c.shape.ranks; ++q) {
    for (uint32_t t = range.begin / c.shape.top_k + P::lane(); t < range.end / c.shape.top_k; t += P::kLanes) {
      const uint32_t* choices = s.choices + t * c.shape.top_k;
      uint32_t n = 0;
      for (uint32_t k = 0; k < c.shape.top_k; ++k) n += Choice::exists(choices[k]) && Choice::owner(choices[k]) == q;
      // With `reduced`, a bad row counts as one row that this rank has computed: the staged row that fill_missing()
      // writes.
      if (q == c.rank && choices[0] == Choice::kBad && c.reduced()) n = 1;
      c.out_counts(q, first)[t] = static_cast<uint16_t>(n);
    }
  }
}

// Puts the shared expert behind a token's K choices. `ids` and `weights` are the token's. One lane.
FLASHMOE_FN void choose_shared(const Call& c, int32_t* ids, float* weights, float weight) {
  ids[c.shape.routed_top_k()] = static_cast<int32_t>(c.shape.routed_experts());
  weights[c.shape.routed_top_k()] = weight;
}

// Replaces each of a token's K experts by its slices, each of which gets the expert's weight. `ids` and `weights` are
// the token's, and have room for all slices. If an expert's number is too large, notes the row here, because later
// code only has numbers of slices. One lane.
template <class P>
FLASHMOE_FN void choose_slices(const Call& c, uint32_t token, int32_t* ids, float* weights) {
  for (uint32_t k = c.shape.gate_top_k; k-- != 0;) {  // from the last down: overwrites only what has been read
    const int32_t id = ids[k];
    const float weight = weights[k];
    const bool exists = id >= 0 && static_cast<uint32_t>(id) < c.shape.gate_experts;
    if (!exists && id >= 0) note_row<P>(c, RowFault::kExpertRange, token, id);
    const int32_t none = id < 0 ? id : ExpertId::kBad;
    for (uint32_t n = k * c.shape.slices; n < (k + 1) * c.shape.slices; ++n) {
      ids[n] = exists ? static_cast<int32_t>(static_cast<uint32_t>(id) * c.shape.slices + n % c.shape.slices) : none;
      weights[n] = weight;
    }
  }
}

// Builds all packets of token block b, without rows and signals. make(range) must leave in the scratch the choices of
// the worker's range. The whole team calls it, after a team_sync; false if the call is over. load: see
// scan_workers().
template <class P, class Make>
FLASHMOE_FN bool build_packets_of(const Call& c, uint32_t b, const PacketScratch& s, uint64_t* load, Make&& make) {
  const ChoiceRange range = own_choices<P>(c, b);
  uint16_t* const place = s.place + P::worker() * c.shape.experts;
  if (P::worker() == 0 && P::lane() == 0) {
    P::store_relaxed(s.aborted, 0u);
    P::store_relaxed(s.missing, 0u);
  }
  P::team_sync();
  for (uint32_t e = P::lane(); e < c.shape.experts; e += P::kLanes) place[e] = 0;
  make(range);
  P::sync();
  for_each_choice<P>(range, s.choices, place, [](uint32_t, uint32_t, uint32_t) {});
  bool aborted = false;
  const uint32_t* before = c.shape.capacity != 0 ? earlier_choices<P>(c, b, aborted) : nullptr;
  if (aborted && P::lane() == 0) P::store_relaxed(s.aborted, 1u);
  P::team_sync();
  if (P::load_relaxed(s.aborted) != 0) return false;
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

// The same, from the ids and weights that the gate has left in the scratch.
template <class P>
FLASHMOE_FN bool build_packets(const Call& c, uint32_t b, const PacketScratch& s, uint64_t* load = nullptr) {
  return build_packets_of<P>(c, b, s, load, [&](const ChoiceRange& range) { make_choices<P>(c, b, range, s); });
}

// The same, from ids that an earlier call has left (Call::routing); a negative id is that of a choice without an
// expert.
template <class P>
FLASHMOE_FN bool build_known_packets(const Call& c, uint32_t b, const PacketScratch& s) {
  return build_packets_of<P>(c, b, s, nullptr, [&](const ChoiceRange& range) {
    for (uint32_t i = range.begin + P::lane(); i < range.end; i += P::kLanes) {
      const int32_t id = s.ids[i];
      s.choices[i] = id < 0 ? Choice::kDropped : Choice::make(static_cast<uint32_t>(id), s.owner[id]);
    }
  });
}

// Writes what Reduce, Combine and joiners will read for choices without an expert, since no expert writes it: zeros
// for kNone, NaN for a bad row. In a joined call, if no expert computes any row of a token, it writes the token's
// result, because no joiner will. The whole team calls it after build_packets(). fill(row, bad): a warp stores such a
// row, in the type of return rows. out: the results.
template <class P, class Fill>
FLASHMOE_FN void fill_missing(const Call& c, uint32_t b, const PacketScratch& s, uint8_t* out, Fill&& fill) {
  if (P::load_relaxed(s.missing) == 0) return;
  P::team_sync();  // the routing is recorded
  FLASHMOE_NO_UNROLL
  for (uint32_t t = P::worker(); t < c.tokens_in_block(b); t += P::workers()) {
    const uint32_t token = (b << c.policy.log2_block) + t;
    const int32_t* const routing = c.routing(token);
    const bool bad = routing[0] == Choice::recorded(Choice::kBad);
    if (c.reduced()) {
      if (!bad) continue;
      fill(c.staged_row(c.rank, token, 0), true);
      // A rank without experts has nothing to reduce, so nobody makes a return row of the staged row.
      if (c.shape.local_experts == 0) fill(c.return_row(c.rank, token, c.rank), true);
      continue;
    }
    uint32_t missing = 0;
    FLASHMOE_NO_UNROLL
    for (uint32_t k = 0; k < c.shape.top_k; ++k) {
      if (routing[k] >= Choice::recorded(Choice::kDropped)) continue;
      fill(c.return_row(c.rank, token, k), bad);
      ++missing;
    }
    if (c.policy.joined == 0 || missing == 0) continue;
    if (missing == c.shape.top_k) {
      fill(out + uint64_t{token} * c.memory.return_row_bytes, bad);
      continue;
    }
    for (uint32_t column = P::lane(); column < c.policy.columns[kReturning]; column += P::kLanes) {
      P::store_relaxed(c.joint_word(column, token), 2u);  // counts the missing row as stored (actors/joiner.h)
    }
  }
}

// Tells rank q that its packet of token block b is complete: `entries` entries, and their rows. One lane.
template <class P>
FLASHMOE_FN void signal_packet(const Call& c, uint32_t q, uint32_t b, uint32_t entries) {
  const uint64_t word = Signal::make(c.epoch, entries);
  if (q == c.rank) {
    P::store_release(c.packet_signal(q, c.rank, b), word, kDevice);
  } else {
    P::store_release(c.packet_signal(q, c.rank, b), word, kSystem);
  }
}

// Signals this rank's own packet of token block b. Senders wait for this signal, too: it says that the outbox has the
// token block's packets for other ranks. The whole team calls it after build_packets().
template <class P>
FLASHMOE_FN void signal_own_packet(const Call& c, uint32_t b, const PacketScratch& s) {
  P::team_sync();
  if (P::worker() == 0 && P::lane() == 0) signal_packet<P>(c, c.rank, b, s.entries[c.rank]);
}

}  // namespace flashmoe

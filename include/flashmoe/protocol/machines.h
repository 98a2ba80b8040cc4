// Once per machine: if the ranks of a group are on several machines, a token's row crosses to each other machine once.
// With `reduced`, one sum of the rows of that machine's experts comes back. This file has the tables and the memory for
// it; senders, relays and returners use them.
//
// For each source p, every other machine m has a *relay*: one of its ranks. Rank p sends the packets for all ranks of m
// to the relay, which passes them on in p's name (actors/relay.h). Where sums are formed, the ranks of m leave their
// sums for p's tokens with the relay, and the relay sends the total home (actors/returner.h). So the ranks of a machine
// share this work, source by source.
//
// A Platform whose ranks may be on several machines says so by kSpansMachines. Its kRelaysApart says who passes
// packets on: actors of their own (RelayWorker), or the OS actor. SpreadPlatform<P> makes such a Platform of a
// Platform P. Where kSpansMachines is false, no code of relays is compiled in.
#pragma once

#include "flashmoe/protocol/gradients.h"

namespace flashmoe {

// ---- Fields behind the symmetric heap and behind those of gradients, in a table of their own: see gradients.h -------

// What a relay holds for the sources that it serves; `slot` is Machines::slot(source, the relay's machine).
enum class RelayField : uint32_t { kSignal, kOffsets, kCounts, kEntries, kSumSignal, kSums, kCount };

inline constexpr FieldSpec<RelayField> kRelayTable[] = {
    {RelayField::kSignal, "relay_signal", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.relayed, l.max_blocks(), 1, 1}, 8}; },
     "[slot][n] the packets of the source's n-th batch of token blocks are complete, for all ranks of this machine"},
    {RelayField::kOffsets, "relay_offsets", Writer::kRank0,
     [](const Limits& l) {
       return FieldShape{{l.relayed, l.max_blocks(), l.machine_ranks, l.max_local_experts + 1}, 2};
     },
     "[slot][b][place][El+1] packet_offsets of the rank at that place of the machine"},
    {RelayField::kCounts, "relay_counts", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.relayed, l.machine_ranks, l.max_tokens, 1}, 2}; },
     "[slot][place][token] packet_counts: who needs the token's row, and whose sums it has"},
    {RelayField::kEntries, "relay_entries", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.relayed, l.max_tokens, l.entries_on_machine(), 1}, sizeof(Entry)}; },
     "[slot][first token of b ...] the entries of block b's packets, rank after rank, dense from its first token's "
     "place"},
    {RelayField::kSumSignal, "sum_signal", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{l.staging * l.relayed, l.machine_ranks, kMaxGroups, 1}, 8}; },
     "[slot][place][g] the rank there has left the columns of group g of all its sums"},
    {RelayField::kSums, "machine_sums", Writer::kRank1,
     [](const Limits& l) {
       return FieldShape{{uint64_t{l.staging} * l.relayed, l.machine_ranks, l.max_tokens,
                          row_pitch(l.hidden, max_of(4u, l.return_bytes))},
                         1};
     },
     "[slot][place][token][H] fp32 sums of the token's rows on the rank there"},
};
static_assert(sizeof(kRelayTable) / sizeof(kRelayTable[0]) == static_cast<size_t>(RelayField::kCount));

template <>
inline constexpr int kDimensions<RelayField> = 4;
using RelayLayout = Layout<RelayField>;

inline RelayLayout make_relay_layout(const Limits& limits) {
  return make_layout(kRelayTable, limits);
}

// Bytes of the heap, of the fields for gradients and of the fields of relays.
inline uint64_t spread_heap_bytes(const Limits& limits) {
  return training_heap_bytes(limits) + make_relay_layout(limits).bytes;
}

// ---- How ranks are spread -------------------------------------------------------------------------------------------

// Which rank is on which machine, as tables that the host has made. Machines are numbered in the order of their
// lowest ranks. A rank's place is its number among the ranks of its machine.
struct Machines {
  uint32_t count = 1;               // the number of machines
  const uint32_t* of = nullptr;     // [R] the machine of each rank
  const uint32_t* place = nullptr;  // [R] the place of each rank
  const uint32_t* ranks = nullptr;  // [R] the ranks, machine by machine, ascending within a machine
  const uint32_t* first = nullptr;  // [count + 1] where each machine's ranks begin in `ranks`
  uint32_t most_ranks = 1;          // the most ranks that a machine has
  // [source_count] the sources for which this rank is the relay, in ascending order from the next rank on, round the
  // ranks. So at any time, relays send their machines' sums to different homes.
  const uint32_t* sources = nullptr;
  uint32_t source_count = 0;
  // This rank's own counters. Each has two copies, which the parity of the epoch selects: a call counts in one copy,
  // and its OS actor zeroes the other one for the next call.
  uint64_t* passed = nullptr;  // [2][source_count] packets of each source that are passed on
  struct Counts {
    uint64_t rows_passed, sums_sent;  // rows written to other ranks as a relay; sums of this machine sent home
  };
  Counts* counts = nullptr;  // [2], for reports

  // The most bytes of rows in one message to a relay, unless a single token block has more.
  uint64_t batch_bytes = 1;
  RelayLayout layout;
  uint64_t behind = 0;  // where in a heap the fields of `layout` begin
  // Set for each call. If x is dispatched again: how many bytes behind a dispatched row of dY the token's x lies
  // (redispatched_behind). Else 0.
  uint64_t second_row = 0;
  // Whether a machine's ranks leave their sums with the relay, which sends the total home. False with kDirect, and in
  // a backward pass, where each rank's gradients of combine weights go home with its sums.
  bool sums = false;

  FLASHMOE_HD uint32_t size(uint32_t machine) const { return first[machine + 1] - first[machine]; }
  FLASHMOE_HD uint32_t rank_at(uint32_t machine, uint32_t at) const { return ranks[first[machine] + at]; }
  FLASHMOE_HD bool together(uint32_t p, uint32_t q) const { return count == 1 || of[p] == of[q]; }
  // The relay of a machine for source p, which is on another machine.
  FLASHMOE_HD uint32_t relay(uint32_t p, uint32_t machine) const { return rank_at(machine, place[p] % size(machine)); }
  FLASHMOE_HD bool is_relay(uint32_t p, uint32_t q) const { return relay(p, of[q]) == q; }
  // The number of source p among the sources of its relay on `machine`. These are counted machine by machine, and in
  // each machine by place.
  FLASHMOE_HD uint32_t slot(uint32_t p, uint32_t machine) const {
    const uint32_t others = of[p] < machine ? of[p] : of[p] - 1;
    return others * ceil_div(most_ranks, size(machine)) + place[p] / size(machine);
  }
  // How many token blocks, of `tokens` tokens each, a sender brings to a relay as one message.
  FLASHMOE_HD uint32_t batch_blocks(uint32_t tokens, uint32_t row_bytes) const {
    return static_cast<uint32_t>(max_of<uint64_t>(batch_bytes / (uint64_t{tokens} * row_bytes), 1));
  }
  // The rank that signals to p the return of what q owes to p: q itself, or, if sums go by relays and p and q are on
  // different machines, the relay of q's machine for p.
  FLASHMOE_HD uint32_t returner(uint32_t p, uint32_t q) const { return sums && !together(p, q) ? relay(p, of[q]) : q; }

  FLASHMOE_HD uint64_t* packets_passed(uint32_t parity, uint32_t i) const { return passed + parity * source_count + i; }
};

// How many slots a relay's fields need: as many as there are sources for which a rank of the smallest machine is the
// relay, at most.
FLASHMOE_HD constexpr uint32_t relay_slots(uint32_t machines, uint32_t most_ranks, uint32_t fewest_ranks) {
  return (machines - 1) * ceil_div(most_ranks, fewest_ranks);
}

// A call of a group whose ranks may be on several machines, and the tables that say which rank is on which machine.
struct SpreadCall : Call {
  Machines spread;

  SpreadCall() : SpreadCall(Call{}, Machines{}) {}
  SpreadCall(const Call& call, const Machines& table) : Call(call), spread(table) { machines = &spread; }
  SpreadCall(const SpreadCall& other) : SpreadCall(other, other.spread) {}
  SpreadCall& operator=(const SpreadCall& other) {
    Call::operator=(other);
    spread = other.spread;
    machines = &spread;
    return *this;
  }
};

template <class P, bool kApart = false>
struct SpreadPlatform : P {
  static constexpr bool kSpansMachines = true, kRelaysApart = kApart;
};

template <class P>
concept SpansMachines = P::kSpansMachines;

// ---- What a relay holds for source p; `at` is the relay, `place` the place of a rank of its machine -----------------

struct RelayPlace {
  const Call& c;
  const Machines& m;
  uint32_t at, slot;

  FLASHMOE_HD RelayPlace(const Call& call, const Machines& machines, uint32_t relay, uint32_t p)
      : c(call), m(machines), at(relay), slot(machines.slot(p, machines.of[relay])) {}

  template <class T>
  FLASHMOE_HD T* field(RelayField f, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0) const {
    return m.layout.at<T>(c.memory.heaps[at] + m.behind, f, slot, i, j, k);
  }
  FLASHMOE_HD uint64_t* signal(uint32_t batch) const { return field<uint64_t>(RelayField::kSignal, batch); }
  FLASHMOE_HD uint16_t* offsets(uint32_t b, uint32_t place) const {
    return field<uint16_t>(RelayField::kOffsets, b, place);
  }
  FLASHMOE_HD uint16_t* counts(uint32_t place, uint32_t token) const {
    return field<uint16_t>(RelayField::kCounts, place, token);
  }
  FLASHMOE_HD Entry* entries(uint32_t first_token) const { return field<Entry>(RelayField::kEntries, first_token); }
  FLASHMOE_HD uint64_t* sum_signal(uint32_t place, uint32_t g) const {
    return field<uint64_t>(RelayField::kSumSignal, place, g);
  }
  FLASHMOE_HD float* sum(uint32_t place, uint32_t token) const { return field<float>(RelayField::kSums, place, token); }
  // Whether any rank of the machine has entries of the token.
  FLASHMOE_HD bool is_needed(uint32_t token) const {
    bool any = false;
    for (uint32_t i = 0; i < m.size(m.of[at]); ++i) any |= *counts(i, token) != 0;
    return any;
  }
};

// With `reduced`: whether the return row that rank q sends for an own token holds a sum. If sums go by relays, ranks
// of another machine send no rows themselves: the machine's relay sends one, if any rank of the machine has entries
// of the token. Otherwise q sends a row if it has entries itself.
FLASHMOE_HD bool is_returned(const Call& c, const Machines& m, uint32_t token, uint32_t q) {
  if (!m.sums || m.together(c.rank, q)) return *c.out_counts(q, token) != 0;
  if (!m.is_relay(c.rank, q)) return false;
  const uint32_t machine = m.of[q];
  bool any = false;
  for (uint32_t i = 0; i < m.size(machine); ++i) any |= *c.out_counts(m.rank_at(machine, i), token) != 0;
  return any;
}

}  // namespace flashmoe

// Relay: passes on what sources on other machines have sent for the ranks of this one. A source's rows lie in this rank's
// heap where its own rows of that source have their place (Call::dispatched_row), also those that only others need; each
// goes to the same place in the heap of every rank that needs it, then that rank's entries, offsets and counts, and behind
// these its packet's signal. So the ranks find packets as if the source itself had written them, and the own one, too.
//
// A step passes on one batch of token blocks at most. It waits for nothing but the source's signals, and a source sends
// without waiting for others: so whoever runs it gets on, and with it all that await packets.
//
// A rank does not end a call before it has passed on everything (run_os), and the source not before all returns of the
// call are here, which ranks owe until they have seen its last packet. So what is read here is not overwritten too early,
// and there is one copy of it.
#pragma once

#include "flashmoe/actors/machine_sender.h"
#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/packet.h"

namespace flashmoe {

// For platforms whose ranks share a machine.
template <class P>
class Relay {
 public:
  FLASHMOE_FN explicit Relay(const Call&) {}
  FLASHMOE_FN bool step() { return false; }
  FLASHMOE_FN bool complete() const { return true; }
  FLASHMOE_FN void explain(Fault&) const {}
};

// Run by one warp; every lane keeps the same private members.
template <class P>
  requires SpansMachines<P>
class Relay<P> {
 public:
  FLASHMOE_FN explicit Relay(const Call& call) : c_(call), m_(P::machines(call)) {
    for (uint32_t i = P::lane(); i < m_.source_count; i += P::kLanes) m_.passed[i] = 0;
    if (P::lane() == 0) *m_.rows_passed = 0;
    P::sync();
  }

  // Passes on a batch, if one is here; true if there was anything new. All lanes.
  FLASHMOE_FN bool step() {
    if (complete()) return false;
    for (uint32_t n = 0; n < m_.source_count; ++n) {
      const uint32_t i = (next_ + n) % m_.source_count;
      if (!has_arrived(i)) continue;
      pass_on(i);
      next_ = i + 1;  // sources take turns
      return true;
    }
    const bool before = complete_;
    complete_ = is_complete();
    return complete_ != before;
  }

  // All is passed on, and all that this rank is to sum for its machine is here.
  FLASHMOE_FN bool complete() const { return complete_ || m_.source_count == 0; }

  // Of a wait that expired, what is missing, if it is a sum.
  FLASHMOE_FN void explain(Fault& fault) const {
    for (uint32_t i = 0; fault.kind == FaultKind::kLocal && i < m_.source_count; ++i) {
      if (!has_heard(i)) continue;
      uint32_t place = 0, g = 0;
      if (has_sums(m_.sources[i], place, g)) continue;
      const RelayPlace from(c_, m_, c_.rank, m_.sources[i]);
      fault.kind = FaultKind::kReturn;
      fault.awaited = m_.rank_at(m_.of[c_.rank], place);
      fault.index = g;
      fault.expected = c_.epoch;
      fault.seen = Signal::epoch(P::load_relaxed(from.sum_signal(place, g)));
    }
  }

 private:
  // Whether the i-th source has begun this call, and agrees on what it is: else its packets mean something else.
  FLASHMOE_FN bool has_heard(uint32_t i) const {
    const uint32_t p = m_.sources[i];
    const uint64_t word = P::broadcast(P::load_acquire(c_.call_signal(c_.rank, p), kSystem), 0);
    P::sync();  // what lane 0 acquired, every lane may read
    return Signal::epoch(word) == c_.epoch && c_.call_config(c_.rank, p)->hash == c_.config.hash;
  }
  FLASHMOE_FN uint32_t blocks_of_batch(uint32_t p) const {
    const uint32_t log2 = CallPayload::log2_block(Signal::payload(*c_.call_signal(c_.rank, p)));
    return m_.batch_blocks(1u << log2, c_.memory.token_row_bytes);
  }
  FLASHMOE_FN uint32_t batches(uint32_t p) const { return ceil_div(c_.blocks_of(p), blocks_of_batch(p)); }

  FLASHMOE_FN bool has_arrived(uint32_t i) const {
    const uint32_t p = m_.sources[i], batch = m_.passed[i];
    if (!has_heard(i) || batch == batches(p)) return false;
    const uint64_t* const signal = RelayPlace(c_, m_, c_.rank, p).signal(batch);
    const bool here = Signal::epoch(P::broadcast(P::load_acquire(signal, kSystem), 0)) == c_.epoch;
    P::sync();
    return here;
  }

  FLASHMOE_FN void pass_on(uint32_t i) const {
    const uint32_t p = m_.sources[i], each = blocks_of_batch(p), first = m_.passed[i] * each;
    for (uint32_t b = first; b < min_of(first + each, c_.blocks_of(p)); ++b) pass_on_block(p, b);
    P::sync();
    if (P::lane() == 0) ++m_.passed[i];
    P::sync();
  }

  // The packets of a block of p's, rank by rank.
  FLASHMOE_FN void pass_on_block(uint32_t p, uint32_t b) const {
    const RelayPlace from(c_, m_, c_.rank, p);
    const uint32_t machine = m_.of[c_.rank], first = c_.packet_first_token(p, b);
    const Entry* entries = from.entries(first);
    for (uint32_t i = 0; i < m_.size(machine); ++i) {
      const uint32_t q = m_.rank_at(machine, i);
      // As p counts: the own shared expert is none of those that it sends to.
      const uint32_t owned = q == c_.rank ? c_.shape.routed_local_experts() : c_.owned(q);
      const uint16_t* const offsets = from.offsets(b, i);
      const uint32_t count = offsets[owned];
      pass_on_rows(p, q, from.counts(i, first), first, c_.packet_tokens(p, b));
      copy_bytes<P>(c_.packet_offsets(q, p, b), offsets, (owned + 1) * sizeof(uint16_t));
      copy_bytes<P>(c_.packet_entries(q, p, first), entries, count * sizeof(Entry));
      entries += count;
      P::sync();  // all lanes' writes before the signal
      if (P::lane() == 0) P::store_release(c_.packet_signal(q, p, b), Signal::make(c_.epoch, count), kSystem);
    }
  }

  FLASHMOE_FN void pass_on_rows(uint32_t p, uint32_t q, const uint16_t* counts, uint32_t first, uint32_t tokens) const {
    if (kTrainsInGroup || c_.reduced()) {
      copy_bytes<P>(c_.packet_counts(q, p, first), counts, tokens * sizeof(uint16_t));
    }
    if (q == c_.rank) return;
    for (uint32_t t = 0; t < tokens; ++t) {
      if (counts[t] == 0) continue;
      uint8_t* const to = c_.dispatched_row(q, p, first + t);
      const uint8_t* const row = c_.dispatched_row(c_.rank, p, first + t);
      copy_bytes<P>(to, row, c_.memory.token_row_bytes);
      if (P::lane() == 0) ++*m_.rows_passed;
      if (m_.second_row == 0) continue;
      copy_bytes<P>(to + m_.second_row, row + m_.second_row, c_.memory.token_row_bytes);
    }
  }

  // Whether all ranks of this machine have left their sums of p's tokens; else the first that has not, and the group. A later
  // call's will do: a rank without experts signals as soon as p is in it, and p is not before this one's sum is home.
  FLASHMOE_FN bool has_sums(uint32_t p, uint32_t& place, uint32_t& g) const {
    if (!m_.sums || c_.blocks_of(p) == 0) return true;
    const RelayPlace from(c_, m_, c_.rank, p);
    for (place = 0; place < m_.size(m_.of[c_.rank]); ++place) {
      for (g = 0; g < c_.policy.groups; ++g) {
        const uint64_t word = P::broadcast(P::load_relaxed(from.sum_signal(place, g)), 0);
        if (Signal::epoch(word) < c_.epoch) return false;
      }
    }
    return true;
  }

  FLASHMOE_FN bool is_complete() const {
    uint32_t place, g;
    for (uint32_t i = 0; i < m_.source_count; ++i) {
      if (!has_heard(i) || m_.passed[i] != batches(m_.sources[i]) || !has_sums(m_.sources[i], place, g)) return false;
    }
    return true;
  }

  const Call& c_;
  const Machines& m_;
  uint32_t next_ = 0;
  bool complete_ = false;
};

}  // namespace flashmoe

// Relay: passes on what sources on other machines have sent for the ranks of this machine. All rows that a source has
// sent lie in this rank's heap (Call::dispatched_row), even rows that only other ranks need. For each other rank q of
// the machine, the relay copies the rows that q needs to the same place in q's heap. Then it copies q's entries,
// offsets and counts, and signals q's packet. So each rank finds packets as if the source itself had written them.
// The relay writes and signals its own packet in the same way.
//
// On the CPU engine the OS actor passes on, one batch of token blocks a step (Relay). Where relays are actors of their
// own (kRelaysApart), workers share the packets among them, after their own sends (RelayWorker). Both wait only for
// signals of sources, and a source sends without waiting for others. So no wait is in a circle.
//
// A rank does not end a call before it has passed on everything (run_os). The source does not end the call before it
// has all returns, and ranks owe these until they have seen its last packet. So nothing that a relay reads is
// overwritten too early, and one copy of the memory is enough.
#pragma once

#include "flashmoe/actors/engine.h"
#include "flashmoe/actors/machine_sender.h"
#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// Whether source p has begun this call, and agrees on what it is: else its packets mean something else. All lanes.
template <class P>
FLASHMOE_FN bool agrees(const Call& c, uint32_t p) {
  const uint64_t word = P::broadcast(P::load_acquire(c.call_signal(c.rank, p), kSystem), 0);
  P::sync();  // what lane 0 acquired, every lane may read
  return Signal::epoch(word) == c.epoch && c.call_config(c.rank, p)->hash == c.config.hash;
}

// The number of token blocks in one message of source p, whose call signal must be here.
template <class P>
FLASHMOE_FN uint32_t blocks_of_batch(const Call& c, uint32_t p) {
  const uint32_t log2 = CallPayload::log2_block(Signal::payload(*c.call_signal(c.rank, p)));
  return c.machines->batch_blocks(1u << log2, c.memory.token_row_bytes);
}

// Passes on source p's packet of token block b, whose batch is here, to the rank that has this place on this machine.
// All lanes.
template <class P, PassesRows Engine>
FLASHMOE_FN void pass_on(const Call& c, Engine& engine, uint32_t p, uint32_t b, uint32_t place) {
  const Machines& m = *c.machines;
  const RelayPlace from(c, m, c.rank, p);
  const uint32_t q = m.rank_at(m.of[c.rank], place);
  const uint32_t first = c.packet_first_token(p, b), tokens = c.packet_tokens(p, b);
  // How many experts the rank at place i has, as p counts them. owned(c.rank) includes this rank's shared expert, for
  // which p sends nothing.
  const auto experts = [&](uint32_t i) {
    const uint32_t rank = m.rank_at(m.of[c.rank], i);
    return rank == c.rank ? c.shape.routed_local_experts() : c.owned(rank);
  };
  uint32_t before = 0;
  FLASHMOE_NO_UNROLL
  for (uint32_t i = 0; i < place; ++i) before += from.offsets(b, i)[experts(i)];
  const uint16_t* const counts = from.counts(place, first);
  uint32_t rows = 0;
  FLASHMOE_NO_UNROLL
  for (uint32_t at = 0; q != c.rank && at < tokens; at += P::kLanes) {
    const uint32_t t = at + P::lane();
    const uint32_t needed = P::ballot(t < tokens && counts[t] != 0), n = P::popcount(needed);
    engine.pass_rows(q, p, first + at + P::nth_bit(needed, P::lane()), n);
    rows += n;
  }
  const uint32_t owned = experts(place), entries = from.offsets(b, place)[owned];
  if (kTrainsInGroup || c.reduced()) copy_words<P>(c.packet_counts(q, p, first), counts, tokens);
  copy_words<P>(c.packet_offsets(q, p, b), from.offsets(b, place), owned + 1);
  copy_entries<P>(c.packet_entries(q, p, first), from.entries(first) + before, entries);
  P::sync();  // all lanes' writes before the signal
  if (P::lane() != 0) return;
  P::store_release(c.packet_signal(q, p, b), Signal::make(c.epoch, entries), kSystem);
  P::add(&m.counts[c.parity()].rows_passed, rows);
}

// The engine with which an OS actor passes rows on: all lanes copy words of 2 bytes.
template <class P>
class PlainRows {
 public:
  FLASHMOE_FN explicit PlainRows(const Call& call) : c_(call) {}

  FLASHMOE_FN void pass_rows(uint32_t q, uint32_t p, uint32_t token, uint32_t rows) const {
    for (uint32_t r = 0; r < rows; ++r) {
      const uint32_t t = P::broadcast(token, r);
      const uint64_t second = c_.machines->second_row;
      copy(c_.dispatched_row(q, p, t), c_.dispatched_row(c_.rank, p, t));
      if (second != 0) copy(c_.dispatched_row(q, p, t) + second, c_.dispatched_row(c_.rank, p, t) + second);
    }
  }

 private:
  FLASHMOE_FN void copy(uint8_t* to, const uint8_t* from) const {
    copy_words<P>(reinterpret_cast<uint16_t*>(to), reinterpret_cast<const uint16_t*>(from),
                  c_.memory.token_row_bytes / 2);
  }

  const Call& c_;
};
static_assert(PassesRows<PlainRows<void>>);

// The OS actor's part in a relay. On Platforms whose ranks share a machine, it has nothing to do.
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
  FLASHMOE_FN explicit Relay(const Call& call) : c_(call), m_(*call.machines) {
    const uint32_t next = c_.parity() ^ 1;
    for (uint32_t i = P::lane(); i < m_.source_count; i += P::kLanes) *m_.packets_passed(next, i) = 0;
    if (P::lane() == 0) m_.counts[next] = {};
    P::sync();
  }

  // Passes on a batch, if one is here, and returns whether there was one. Does nothing if relay workers pass on. All
  // lanes.
  FLASHMOE_FN bool step() {
    if constexpr (!P::kRelaysApart) {
      for (uint32_t n = 0; n < m_.source_count; ++n) {
        const uint32_t i = (next_ + n) % m_.source_count;
        if (!has_arrived(i)) continue;
        pass_on_batch(i);
        next_ = i + 1;  // sources take turns
        return true;
      }
    }
    return false;
  }

  // Whether all packets are passed on, and all sums are here that this rank must add up for its machine. All lanes.
  // The scheduler calls it last, when nothing else of the call is missing, because it looks at a few words of each
  // source.
  FLASHMOE_FN bool complete() {
    while (done_ < m_.source_count && is_done(done_)) ++done_;
    return done_ == m_.source_count;
  }

  // For a wait that has expired: if no signal to this rank itself is missing (kLocal), but a sum that it must add up
  // for its machine is, writes this to `fault`. One lane.
  FLASHMOE_FN void explain(Fault& fault) const {
    for (uint32_t i = 0; fault.kind == FaultKind::kLocal && m_.sums && i < m_.source_count; ++i) {
      const uint32_t p = m_.sources[i];
      if (Signal::epoch(P::load_relaxed(c_.call_signal(c_.rank, p))) != c_.epoch || c_.blocks_of(p) == 0) continue;
      const uint32_t sums = sums_of_source();
      uint32_t n = 0;
      while (n < sums && Signal::epoch(P::load_relaxed(sum_signal(p, n))) >= c_.epoch) ++n;
      if (n == sums) continue;
      fault.kind = FaultKind::kReturn;
      fault.awaited = m_.rank_at(m_.of[c_.rank], n / c_.policy.groups);
      fault.index = n % c_.policy.groups;
      fault.expected = c_.epoch;
      fault.seen = Signal::epoch(P::load_relaxed(sum_signal(p, n)));
    }
  }

 private:
  FLASHMOE_FN uint32_t ranks() const { return m_.size(m_.of[c_.rank]); }
  FLASHMOE_FN uint32_t passed(uint32_t i) const {
    return static_cast<uint32_t>(P::load_relaxed(m_.packets_passed(c_.parity(), i)));
  }

  FLASHMOE_FN bool has_arrived(uint32_t i) const {
    const uint32_t p = m_.sources[i];
    if (!agrees<P>(c_, p)) return false;
    const uint32_t b = passed(i) / ranks();
    if (b == c_.blocks_of(p)) return false;
    const uint64_t* const signal = RelayPlace(c_, m_, c_.rank, p).signal(b / blocks_of_batch<P>(c_, p));
    const bool here = Signal::epoch(P::broadcast(P::load_acquire(signal, kSystem), 0)) == c_.epoch;
    P::sync();
    return here;
  }

  FLASHMOE_FN void pass_on_batch(uint32_t i) const {
    const PlainRows<P> engine(c_);
    const uint32_t p = m_.sources[i], first = passed(i) / ranks();
    const uint32_t end = min_of(first + blocks_of_batch<P>(c_, p), c_.blocks_of(p));
    for (uint32_t b = first; b < end; ++b) {
      for (uint32_t place = 0; place < ranks(); ++place) pass_on<P>(c_, engine, p, b, place);
    }
    P::sync();
    if (P::lane() == 0) P::store_relaxed(m_.packets_passed(c_.parity(), i), uint64_t{end} * ranks());
    P::sync();
  }

  FLASHMOE_FN bool is_done(uint32_t i) const {
    const uint32_t p = m_.sources[i];
    if (!agrees<P>(c_, p)) return false;
    return P::broadcast(passed(i), 0) == c_.blocks_of(p) * ranks() && has_sums(p);
  }

  // How many sum signals the ranks of this machine set here for one source, and where the n-th one for source p lies.
  // They are counted by place, then by return group.
  FLASHMOE_FN uint32_t sums_of_source() const { return ranks() * c_.policy.groups; }
  FLASHMOE_FN uint64_t* sum_signal(uint32_t p, uint32_t n) const {
    return RelayPlace(c_, m_, c_.rank, p).sum_signal(n / c_.policy.groups, n % c_.policy.groups);
  }
  // A sum signal of a later call is accepted, too. A rank without experts sets it as soon as p is in that later call,
  // and p is in it only after the sums of this call have come home.
  FLASHMOE_FN bool has_sums(uint32_t p) const {
    if (!m_.sums || c_.blocks_of(p) == 0) return true;
    bool all = true;
    for (uint32_t n = P::lane(); n < sums_of_source(); n += P::kLanes) {
      all &= Signal::epoch(P::poll(sum_signal(p, n), kSystem)) >= c_.epoch;
    }
    return P::ballot(!all) == 0;
  }

  const Call& c_;
  const Machines& m_;
  uint32_t next_ = 0;
  uint32_t done_ = 0;  // of the first `done_` sources, nothing is missing
};

// One of a rank's relay workers. All lanes call its functions.
template <class P, PassesRows Engine>
  requires HasSpans<Engine>
class RelayWorker {
 public:
  FLASHMOE_FN RelayWorker(const Call& call, Engine& engine) : c_(call), m_(*call.machines), engine_(engine) {}

  // Runs worker number `first` of `workers`. Each source has the same number of workers, which take its packets in
  // turn. So a source that is late holds up no other source, unless there are fewer workers than sources. False if
  // the call was aborted.
  FLASHMOE_FN bool run(uint32_t first, uint32_t workers) {
    const uint32_t sources = m_.source_count, each = sources == 0 ? 0 : max_of(workers / sources, 1u);
    FLASHMOE_NO_UNROLL
    for (uint32_t i = first; i < sources * each; i += workers) {
      if (!pass_on_packets(i % sources, i / sources, each)) return false;
    }
    return true;
  }

 private:
  // Passes on packets first, first + step, ... of the i-th source. Packets are numbered by token block, then by place.
  FLASHMOE_FN bool pass_on_packets(uint32_t i, uint32_t first, uint32_t step) {
    const uint32_t p = m_.sources[i], ranks = m_.size(m_.of[c_.rank]);
    if (!await([&] { return agrees<P>(c_, p); })) return false;
    const RelayPlace from(c_, m_, c_.rank, p);
    const uint32_t batch = blocks_of_batch<P>(c_, p);
    FLASHMOE_NO_UNROLL
    for (uint32_t n = first; n < c_.blocks_of(p) * ranks; n += step) {
      const uint32_t b = n / ranks, place = n % ranks;
      if (!await_batch(from.signal(b / batch))) return false;
      engine_.begin();
      pass_on<P>(c_, engine_, p, b, place);
      if (P::lane() == 0) P::fetch_add(m_.packets_passed(c_.parity(), i), uint64_t{1});
      engine_.end(Phase::kDispatch, b, m_.rank_at(m_.of[c_.rank], place));
    }
    return true;
  }

  FLASHMOE_FN bool await_batch(const uint64_t* signal) const {
    const bool here = await([&] { return Signal::epoch(P::broadcast(P::poll(signal, kSystem), 0)) == c_.epoch; });
    P::acquire(signal, kSystem);
    P::sync();
    return here;
  }

  template <class Ready>
  FLASHMOE_FN bool await(Ready&& ready) const {
    const WaitEnd end = wait_until<P>(
        c_,
        [&] {
          if (ready()) return Step::kDone;
          P::rest();
          return Step::kIdle;
        },
        OsLiveness<P>{c_});
    return end == WaitEnd::kDone;
  }

  const Call& c_;
  const Machines& m_;
  Engine& engine_;
};

}  // namespace flashmoe

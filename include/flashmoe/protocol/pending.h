// How a rank knows that it has computed everything that it owes to a source, while rows of that source may still
// arrive. Formers, processors and keepers change the counters.
//
// There is one counter for each source and return group. Its low 40 bits are the pairs (row, block of columns) that are
// still to compute: 400 for 100 rows and a group of 4 blocks of columns. Its high bits are the number of local experts
// whose former has seen the source's last packet. A former adds rows before it announces their tile, and adds its
// experts after the last packet. A processor that retires a task subtracts. The change that leads to "every expert, no
// rows" completes the counter, and whoever makes it sets the counter to zero. Rows are added before they can be
// subtracted, so the low part is never negative.
//
// Where there are keepers (actors/keeper.h), each counts as one more expert. So a source gets its last return only
// after the keepers have copied its rows.
#pragma once

#include "flashmoe/protocol/machines.h"
#include "flashmoe/protocol/ready_list.h"

namespace flashmoe {

struct Pending {
  static constexpr uint32_t kRowBits = 40;
  FLASHMOE_HD static constexpr uint64_t experts(uint32_t n) { return uint64_t{n} << kRowBits; }
};

// Tells rank p that all that it gets back from this rank in group g is written to its heap. (If p is not mapped, the
// rows are still on this rank. Then this tells the senders, which put the rows and signal p.)
template <class P>
FLASHMOE_FN void signal_home(const Call& c, uint32_t p, uint32_t g) {
  const uint64_t word = Signal::make(c.epoch, 0);
  if (p == c.rank) {
    P::store_release(c.return_signal(p, c.rank, g), word, kDevice);
  } else if constexpr (P::kPeersMapped) {
    P::store_release(c.return_signal(p, c.rank, g), word, kSystem);
  } else {
    P::store_release(c.returns_ready(p), word, kDevice);
  }
}

// Says that this rank has written all that it owes to rank p in group g. Tells p, or, if sums go by relays and p is
// on another machine, this machine's relay for p, with which the sums lie.
template <class P>
FLASHMOE_FN void signal_return(const Call& c, uint32_t p, uint32_t g) {
  if constexpr (SpansMachines<P>) {
    const Machines& m = *c.machines;
    if (m.sums && !m.together(p, c.rank)) {
      const RelayPlace to(c, m, m.relay(p, m.of[c.rank]), p);
      P::store_release(to.sum_signal(m.place[c.rank], g), Signal::make(c.epoch, 0), kSystem);
      return;
    }
  }
  signal_home<P>(c, p, g);
}

// Each lane with `has` adds `change` to its counter (p, g). A lane that completes its counter signals group g to p
// (direct), or says by reduce_signal that Reduce may sum p's rows. All lanes.
template <class P>
FLASHMOE_FN void change_pending(const Call& c, bool has, uint32_t p, uint32_t g, uint64_t change) {
  if (!has) return;
  uint64_t* counter = c.pending(p, g);
  if (P::fetch_add_acq_rel(counter, change) + change !=
      Pending::experts(c.shape.local_experts + (kTrainsInGroup ? c.policy.keepers : 0u))) {
    return;
  }
  P::store_relaxed(counter, uint64_t{0});
  if (!c.reduced()) {
    signal_return<P>(c, p, g);
  } else {
    P::store_release(c.reduce_signal(p, g), Signal::make(c.epoch, 0), kDevice);
  }
}

// `rows` more rows of source p will be computed here. All lanes, before a tile with those rows is announced.
template <class P>
FLASHMOE_FN void expect_rows(const Call& c, uint32_t p, uint32_t rows) {
  for (uint32_t g = P::lane(); g < c.policy.groups; g += P::kLanes) {
    P::fetch_add(c.pending(p, g), uint64_t{rows} * c.group_columns(g));
  }
}

// Counts `experts` more local experts whose former has seen source p's last packet. (A keeper counts as 1.) All lanes.
template <class P>
FLASHMOE_FN void close_source(const Call& c, uint32_t p, uint32_t experts) {
  for (uint32_t g = P::lane(); g < c.policy.groups; g += P::kLanes) {
    change_pending<P>(c, true, p, g, Pending::experts(experts));
  }
}

}  // namespace flashmoe

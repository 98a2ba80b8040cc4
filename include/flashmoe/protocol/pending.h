// How a rank knows that it has computed all it owes to a source, while rows of that source may still be arriving.
//
// One counter per source and return group (where Reduce is a task: per source and column). Its low part is the number of
// (row, column) products still to compute, its high part the number of local experts that have seen the source's last
// packet. A former adds rows before it hands them on, and its experts after the last; whoever brings the counter to
// "every expert, no rows" has completed it and resets it. Rows are added before they can be subtracted, so the low part
// is never negative.
#pragma once

#include "flashmoe/protocol/ready_list.h"

namespace flashmoe {

struct Pending {
  static constexpr uint32_t kRowBits = 40;
  FLASHMOE_HD static constexpr uint64_t experts(uint32_t n) { return uint64_t{n} << kRowBits; }
};

// The last of what this rank owes to rank p in group g has been written there. (Where peers are not mapped: lies here, and
// the senders are told, who send it and signal.)
template <class P>
FLASHMOE_FN void signal_return(const Call& c, uint32_t p, uint32_t g) {
  const uint64_t word = Signal::make(c.epoch, 0);
  if (p == c.rank) {
    P::store_release(c.return_signal(p, c.rank, g), word, kDevice);
  } else if constexpr (P::kPeersMapped) {
    P::store_release(c.return_signal(p, c.rank, g), word, kSystem);
  } else {
    P::store_release(c.returns_ready(p), word, kDevice);
  }
}

// Adds `change` to the lanes' counters (p, slot) that have one, and completes those that it finishes. All lanes.
template <class P>
FLASHMOE_FN void change_pending(const Call& c, bool has, uint32_t p, uint32_t slot, uint64_t change) {
  bool complete = false;
  if (has) {
    uint64_t* counter = c.pending(p, slot);
    complete = P::fetch_add_acq_rel(counter, change) + change == Pending::experts(c.local_experts);
    if (complete) {
      P::store_relaxed(counter, uint64_t{0});
      if (!c.reduced()) {
        signal_return<P>(c, p, slot);
      } else if (!c.reduce_tasks()) {
        P::store_release(c.reduce_signal(p, slot), Signal::make(c.epoch, 0), kDevice);
      }
    }
  }
  if (c.reduce_tasks()) push_ready<P>(c, complete, {TaskKind::kReduce, slot, p});
}

// Counters of a source, and the columns that one of them stands for.
FLASHMOE_HD uint32_t pending_slots(const Call& c) {
  return c.reduce_tasks() ? c.columns[kReturning] : c.groups;
}
FLASHMOE_HD uint32_t pending_slot(const Call& c, uint32_t column) {
  return c.reduce_tasks() ? column : c.group_of(column);
}
FLASHMOE_HD uint32_t pending_columns(const Call& c, uint32_t slot) {
  return c.reduce_tasks() ? 1 : c.group_columns(slot);
}

// `rows` more rows of source p will be computed here. All lanes, before those rows are handed on.
template <class P>
FLASHMOE_FN void expect_rows(const Call& c, uint32_t p, uint32_t rows) {
  for (uint32_t slot = P::lane(); slot < pending_slots(c); slot += P::kLanes) {
    P::fetch_add(c.pending(p, slot), uint64_t{rows} * pending_columns(c, slot));
  }
}

// `experts` more local experts have seen all of source p. All lanes.
template <class P>
FLASHMOE_FN void close_source(const Call& c, uint32_t p, uint32_t experts) {
  for (uint32_t base = 0; base < pending_slots(c); base += P::kLanes) {
    const uint32_t slot = base + P::lane();
    change_pending<P>(c, slot < pending_slots(c), p, slot, Pending::experts(experts));
  }
}

}  // namespace flashmoe

// Processor: takes tasks, has the engine execute them, and retires them: bumps the dependency counters and makes ready,
// or signals home, what that completes.
//
// Counters live in device memory; a retiring warp bumps one per lane. They reset themselves: whoever completes a
// counter zeroes it.
#pragma once

#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/ready_queue.h"

namespace flashmoe {

// After every agent's writes for the task. All lanes of one warp of the processor, in each retire function; retire()
// chooses among them.

// Product n has one more column of the tile: if it is the last, what follows is ready.
template <uint32_t n, class P>
FLASHMOE_FN void retire_column(const Call& c, uint32_t tile) {
  bool last = false;
  if (P::lane() == 0) {
    last = P::fetch_add_acq_rel(&c.tile(tile)->done[n], 1u) + 1 == c.columns[n];
    if (last) P::store_relaxed(&c.tile(tile)->done[n], 0u);
  }
  const Tile::Shape shape = c.tile(tile)->shape;
  for_each_product([&]<uint32_t m>() {
    if constexpr (Product<m>::kAfter == Product<n>::kKind) {
      push_ready<P>(c, last, {Product<m>::kKind, ReadyTile::column(shape.expert, shape.remote), tile});
    }
  });
}

// The tile's rows have one more column of what is owed to their homes.
template <class P>
FLASHMOE_FN void retire_owed(const Call& c, uint32_t tile, uint32_t column) {
  const uint32_t segments = c.tile(tile)->shape.segments;
  const uint32_t slot = pending_slot(c, column);
  for (uint32_t base = 0; base < segments; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    const Segment s = i < segments ? c.segments(tile)[i] : Segment{};
    change_pending<P>(c, i < segments, s.source, slot, uint64_t{0} - s.count);
  }
}

template <class P>
FLASHMOE_FN void retire_reduce(const Call& c, uint32_t packet, uint32_t column) {
  if (P::lane() != 0) return;
  const uint32_t p = c.packet_source(packet), g = c.group_of(column);
  uint32_t* counter = c.reduce_done(p, g);
  if (P::fetch_add_acq_rel(counter, 1u) + 1 != c.blocks_of(p) * c.group_columns(g)) return;
  P::store_relaxed(counter, 0u);
  signal_return<P>(c, p, g);
}

template <class P>
FLASHMOE_FN void retire(const Call& c, const Task& task) {
  switch (task.kind) {
    case TaskKind::kReduce: retire_reduce<P>(c, task.index, task.column); break;
    case TaskKind::kCombine: break;  // nothing depends on it
    default:
      with_product(task.kind, [&]<uint32_t n>() {
        if constexpr (Product<n>::kLeadsOn) retire_column<n, P>(c, task.index);
        if constexpr (n == kReturning) retire_owed<P>(c, task.index, task.column);
      });
  }
}

// Runs one processor of a call to its end. The engine supplies dispatch(b), multiply<n>(index, column) of product n, reduce,
// combine; each returns when every write of the task is ordered before this warp's next release.
template <class P, class Engine>
FLASHMOE_FN void run_processor(const Call& c, uint32_t id, Engine& engine) {
  for (uint32_t b = id; b < c.blocks(); b += c.processors) {
    if (!engine.dispatch(b)) return;
  }
  while (true) {
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = take_ticket<P>(c);
    const Task task = wait_task<P>(c, P::broadcast(ticket, 0));
    switch (task.kind) {
      case TaskKind::kReduce: engine.reduce(task.index, task.column); break;
      case TaskKind::kCombine: engine.combine(task.index, task.column); break;
      case TaskKind::kStop: return;
      default: with_product(task.kind, [&]<uint32_t n>() { engine.template multiply<n>(task.index, task.column); });
    }
    retire<P>(c, task);
  }
}

}  // namespace flashmoe

// Processor: takes tasks, has the engine execute them, and retires them. To retire a task, it changes the dependency
// counters. If this completes a counter, it makes the next tasks ready or signals the home rank.
//
// Counters lie in device memory. Each lane of the warp that retires a task changes at most one counter at a time. The
// lane that completes a counter sets it to zero, so that nothing need be cleared between calls.
#pragma once

#include "flashmoe/actors/engine.h"
#include "flashmoe/actors/joiner.h"
#include "flashmoe/actors/returner.h"
#include "flashmoe/actors/sender.h"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/ready_queue.h"

namespace flashmoe {

// The retire functions: called by all lanes of one warp of the processor, after all writes of the task. retire()
// chooses among them.

// Counts one more block of columns of product n for the tile; for the shared expert, blocks of all slices. When the
// last block is counted, makes the tile ready for the product that comes after n.
template <uint32_t n, class P>
FLASHMOE_FN void retire_column(const Call& c, TileIndex index) {
  const uint32_t tile = index.number();
  bool last = false;
  if (P::lane() == 0) {
    const uint32_t columns = c.policy.columns[n] * (index.has_slice() ? c.shape.shared : 1);
    last = P::fetch_add_acq_rel(&c.tile(tile)->done[n], 1u) + 1 == columns;
    if (last) P::store_relaxed(&c.tile(tile)->done[n], 0u);
  }
  const Tile::Shape shape = c.tile(tile)->shape;
  for_each_product([&]<uint32_t m>() {
    if constexpr (Product<m>::kAfter == Product<n>::kKind) {
      push_ready<P>(c, last, Ready::of_tile(Product<m>::kKind, {tile}, shape.expert, shape.remote));
    }
  });
}

// Counts one more block of columns of the tile's rows as computed, for each source that has rows in the tile (Pending).
template <class P>
FLASHMOE_FN void retire_owed(const Call& c, uint32_t tile, uint32_t column) {
  const uint32_t segments = c.tile(tile)->shape.segments;
  const uint32_t g = c.group_of(column);
  for (uint32_t base = 0; base < segments; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    const Segment s = i < segments ? c.segments(tile)[i] : Segment{};
    change_pending<P>(c, i < segments, s.source, g, uint64_t{0} - s.count);
  }
}

template <class P>
FLASHMOE_FN void retire(const Call& c, const Task& task) {
  with_product(task.kind, [&]<uint32_t n>() {
    if constexpr (Product<n>::kLeadsOn) retire_column<n, P>(c, task.tile());
    if constexpr (n == kReturning) retire_owed<P>(c, task.tile().whole(), task.column);
  });
}

// What a processor that has only one worker stores for its returner and its joiner, in memory that all its lanes share.
template <class P>
struct OneWorker {
  template <class S>
  class Cursor {
   public:
    FLASHMOE_FN S load() const { return state_; }
    FLASHMOE_FN void save(const S& s) {
      P::sync();
      if (P::lane() == 0) state_ = s;
      P::sync();
    }

   private:
    S state_;
  };
  struct Memory {
    ReturnCursors<Cursor> returns;
    LateRows late;
  };
};

// Called when a task's rows are written. Puts those rows into the joiner's queue that are the later row of their
// token. Each row adds 2 to its word, because the processor has computed all of the task's features.
template <class P, JoinsRows Engine>
FLASHMOE_FN void find_late_rows(const Call& c, const Task& task, Joiner<P, Engine>& joiner) {
  const uint32_t tile = task.tile().whole(), rows = c.tile(tile)->shape.rows;
  for (uint32_t base = 0; base < rows; base += P::kLanes) {
    const uint32_t n = min_of(rows - base, P::kLanes);
    joiner.template find<P::kLanes>([&](uint32_t i) { return i < n ? c.tile_row(tile, base + i)->token : 0u; }, n,
                                    task.column, 2);
  }
}

// Runs a processor that has only one worker to the end of the call. (On a GPU, a processor's warps share this work:
// sm90/roles/kernel.cuh.) The processor dispatches, sends (unless peers are not mapped, because then put senders
// send), and computes tasks. While it waits for a task, it runs the returner or the joiner. memory: of this
// processor, uninitialised.
template <class P, RunsProcessor Engine>
FLASHMOE_FN void run_processor(const Call& c, uint32_t id, Engine& engine, typename OneWorker<P>::Memory& memory) {
  if (P::lane() == 0) {
    memory.returns = {};
    memory.late.init();
  }
  P::sync();
  for (uint32_t b = id; b < c.blocks(); b += c.policy.clusters) {
    if (!engine.dispatch(b)) return;
  }
  if constexpr (P::kPeersMapped) {
    if (!Sender<P, Engine>(c, engine).run(id == 0, id)) return;
  }
  Returner<P, Engine, OneWorker<P>::template Cursor> returner(c, engine, memory.returns);
  Joiner<P, Engine> joiner(c, engine, memory.late);
  const bool combines = c.policy.joined == 0, joins = joins_late_rows(c);
  const Summing between = summing_between_tasks(c);
  while (true) {
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = take_ticket<P>(c);
    const Task task = wait_task<P>(c, P::broadcast(ticket, 0), [&] {
      return (joins && joiner.step()) || (combines && returner.step(between) == Step::kProgress);
    });
    if (task.kind == TaskKind::kStop) break;
    with_product(task.kind, [&]<uint32_t n>() { engine.template multiply<n>(task.tile(), task.column); });
    if (is_one_of<kHome>(task.kind) && joins) {
      find_late_rows<P>(c, task, joiner);
      joiner.step();
    }
    retire<P>(c, task);
    // Sums a piece after each GEMM1 task, because peers must not wait until this processor has no tasks left.
    if (is_one_of<kHome>(task.kind) && combines) returner.step(between);
  }
  if (combines) returner.run(c);
  if (joins) {
    joiner.close();
    joiner.run();
  }
}

}  // namespace flashmoe

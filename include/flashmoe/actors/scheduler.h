// Scheduler: hands ready tasks to processors in the order of the call's policy, counts them, and ends the call.
//
// Run by the OS warp, after the subscriber's step; every lane keeps the same private members. A publishing step fills
// the lanes with tasks, of several tiles if need be, and stores them with one release.
#pragma once

#include "flashmoe/actors/subscriber.h"
#include "flashmoe/protocol/ready_list.h"
#include "flashmoe/protocol/ready_queue.h"

namespace flashmoe {

template <class P>
class Scheduler {
 public:
  // column_next: [gemm1_columns] in shared memory, uninitialised; used by gemm1_by_column.
  FLASHMOE_FN Scheduler(const Call& call, Subscriber<P>& subscriber, uint32_t* column_next)
      : c_(call), sub_(subscriber), column_next_(column_next) {
    published_ = P::broadcast(P::load_relaxed(&c_.control()->published.value), 0);
    drained_ = P::broadcast(P::load_relaxed(&c_.control()->list_head.value), 0);
    for (uint32_t i = P::lane(); i < c_.gemm1_columns; i += P::kLanes) column_next_[i] = 0;
    P::sync();
  }

  // Publishes what the window allows; kDone once the call's last word is published. All lanes.
  FLASHMOE_FN Step step() {
    bool moved = drain();
    int64_t room = static_cast<int64_t>(P::broadcast(P::load_relaxed(&c_.control()->queue_head.value), 0) +
                                        c_.order.window - published_);
    while (room > 0) {
      const uint32_t n = publish_some(static_cast<uint32_t>(min_of<int64_t>(room, P::kLanes)));
      if (n == 0) break;
      room -= n;
      moved = true;
    }
    if (sub_.complete() && tasks_ == tasks_of_call()) {
      end_call();
      return Step::kDone;
    }
    return moved ? Step::kProgress : Step::kIdle;
  }

 private:
  // GEMM1 tiles wait in two groups; remote homes go first, since their rows have a way to go.
  static constexpr uint32_t kGroups = 2;

  // `reduced` returns by packet, not by tile, and column order goes over all tiles: both have but the second group.
  FLASHMOE_FN bool one_group() const { return c_.reduced() || c_.order.gemm1_by_column; }

  FLASHMOE_FN uint64_t tasks_of_call() const {
    const uint64_t per_tile = uint64_t{c_.gemm0_columns} + c_.gemm1_columns;
    const uint64_t reduces = c_.reduced() ? uint64_t{sub_.packets_with_entries()} * c_.gemm1_columns : 0;
    return sub_.former().tiles() * per_tile + reduces + c_.blocks();
  }

  // Moves what retiring processors pushed into the groups it is published from.
  FLASHMOE_FN bool drain() {
    bool moved = false;
    while (true) {
      Task task;
      const uint32_t n = drain_ready<P>(c_, drained_, task);
      if (n == 0) break;
      drained_ += n;
      moved = true;
      const bool mine = P::lane() < n;
      for (uint32_t g = 0; g < kGroups; ++g) {
        const bool in_group =
            mine && task.kind == TaskKind::kGemm1 && (one_group() || !c_.tile(task.index)->remote) == (g == 1);
        uint32_t total;
        const uint32_t place = group_[g].ready + count_before<P>(in_group, total);
        if (in_group) *gemm1_tile(g, place) = task.index;
        group_[g].ready += total;
      }
      const bool reduce = mine && task.kind == TaskKind::kReduce;
      uint32_t total;
      const uint32_t place = reduces_ready_ + count_before<P>(reduce, total);
      if (reduce) *reduce_task(place) = task.pack();
      reduces_ready_ += total;
      P::sync();
      if (n < P::kLanes) break;
    }
    return moved;
  }

  // Publishes up to `limit` (<= kLanes) tasks of the kind the policy chooses; returns how many.
  FLASHMOE_FN uint32_t publish_some(uint32_t limit) {
    ReadyState ready;
    ready.reduce = reduces_published_ < reduces_ready_;
    ready.combine = combines_published_ < sub_.combines();
    ready.gemm1 = gemm1_published_ < uint64_t{group_[0].ready + group_[1].ready} * c_.gemm1_columns;
    ready.gemm0 = tile_ != kNoTile || sub_.former().ready() > 0;
    ready.gemm0_published = gemm0_published_;
    ready.gemm1_published = gemm1_published_;
    Task task;
    bool has = false;
    switch (choose(c_.order, ready)) {
      case TaskKind::kReduce: has = next_reduce(limit, task); break;
      case TaskKind::kCombine: has = next_combine(limit, task); break;
      case TaskKind::kGemm1: has = c_.order.gemm1_by_column ? next_column(limit, task) : next_gemm1(limit, task); break;
      case TaskKind::kGemm0: has = next_gemm0(limit, task); break;
      default: return 0;
    }
    const uint32_t n = publish<P>(c_, published_, has, task);
    published_ += n;
    tasks_ += n;
    return n;
  }

  // ---- one function per kind: fills lanes [0, n) with n <= limit tasks and advances the kind's cursor ------------

  FLASHMOE_FN bool next_reduce(uint32_t limit, Task& task) {
    const uint32_t n = min_of(limit, reduces_ready_ - reduces_published_);
    const bool has = P::lane() < n;
    if (has) task = Task::unpack(*reduce_task(reduces_published_ + P::lane()));
    reduces_published_ += n;
    return has;
  }

  FLASHMOE_FN bool next_combine(uint32_t limit, Task& task) {
    const uint32_t n = min_of(limit, sub_.combines() - combines_published_);
    const bool has = P::lane() < n;
    if (has) {
      const uint32_t i = combines_published_ + P::lane();
      task = {TaskKind::kCombine, 0, *c_.workspace<uint32_t>(WorkField::kCombineTasks, i)};
    }
    combines_published_ += n;
    return has;
  }

  // Expert by expert, so that an expert's weights are read while they are in the L2; a tile's columns side by side.
  FLASHMOE_FN bool next_gemm0(uint32_t limit, Task& task) {
    uint32_t filled = 0;
    bool has = false;
    while (filled < limit) {
      if (tile_ == kNoTile) {
        if (sub_.former().ready() == 0) break;
        tile_ = sub_.former().take(expert_);
        column_ = 0;
      }
      const uint32_t n = min_of(limit - filled, c_.gemm0_columns - column_);
      if (P::lane() >= filled && P::lane() < filled + n) {
        task = {TaskKind::kGemm0, column_ + P::lane() - filled, tile_};
        has = true;
      }
      filled += n;
      column_ += n;
      if (column_ == c_.gemm0_columns) tile_ = kNoTile;
    }
    gemm0_published_ += filled;
    return has;
  }

  // Tile by tile: a group's tasks are numbered tile-major.
  FLASHMOE_FN bool next_gemm1(uint32_t limit, Task& task) {
    uint32_t filled = 0;
    bool has = false;
    for (uint32_t g = 0; g < kGroups; ++g) {
      Group& group = group_[g];
      const uint64_t left = uint64_t{group.ready} * c_.gemm1_columns - group.published;
      const uint32_t n = static_cast<uint32_t>(min_of<uint64_t>(limit - filled, left));
      if (P::lane() >= filled && P::lane() < filled + n) {
        const uint64_t i = group.published + P::lane() - filled;
        task = {TaskKind::kGemm1, static_cast<uint32_t>(i % c_.gemm1_columns),
                *gemm1_tile(g, static_cast<uint32_t>(i / c_.gemm1_columns))};
        has = true;
      }
      group.published += n;
      filled += n;
    }
    gemm1_published_ += filled;
    return has;
  }

  // Column block by column block over all ready tiles: the lowest column that has a tile left.
  FLASHMOE_FN bool next_column(uint32_t limit, Task& task) {
    const uint32_t ready = group_[0].ready + group_[1].ready;
    uint32_t column = 0;
    while (column_next_[column] == ready) ++column;
    const uint32_t first = column_next_[column];
    const uint32_t n = min_of(limit, ready - first);
    const bool has = P::lane() < n;
    if (has) task = {TaskKind::kGemm1, column, *gemm1_tile(1, first + P::lane())};
    P::sync();
    if (P::lane() == 0) column_next_[column] = first + n;
    P::sync();
    gemm1_published_ += n;
    return has;
  }

  // One stop word per processor, behind every task: the queue and the list are empty when the last is taken.
  FLASHMOE_FN void end_call() {
    for (uint32_t base = 0; base < c_.processors; base += P::kLanes) {
      published_ += publish<P>(c_, published_, base + P::lane() < c_.processors, {TaskKind::kStop, 0, 0});
    }
    if (P::lane() != 0) return;
    P::store_relaxed(&c_.control()->published.value, published_);
    P::store_relaxed(&c_.control()->list_head.value, drained_);
    P::store_release(&c_.status(c_.rank)->left, c_.epoch, kSystem);
  }

  FLASHMOE_FN uint32_t* gemm1_tile(uint32_t group, uint32_t i) const {
    return c_.workspace<uint32_t>(WorkField::kGemm1Tiles, group, i);
  }
  FLASHMOE_FN uint64_t* reduce_task(uint32_t i) const { return c_.workspace<uint64_t>(WorkField::kReduceTasks, i); }

  struct Group {
    uint32_t ready = 0;
    uint64_t published = 0;  // tasks
  };

  const Call& c_;
  Subscriber<P>& sub_;
  uint32_t* column_next_;
  Group group_[kGroups];
  uint64_t published_;  // words ever published in this context
  uint64_t drained_;    // items ever drained from the ready list
  uint64_t tasks_ = 0;  // published in this call
  uint64_t gemm0_published_ = 0, gemm1_published_ = 0;
  uint32_t reduces_ready_ = 0, reduces_published_ = 0;
  uint32_t combines_published_ = 0;
  uint32_t expert_ = 0, tile_ = kNoTile, column_ = 0;  // where GEMM0 publishing stands
};

}  // namespace flashmoe

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
  // Shared memory, uninitialised.
  struct Memory {
    uint32_t* column_next;               // [gemm1_columns] for gemm1_by_column: tiles published of each column
    uint32_t* gemm0_tiles;               // [kLanes] the tiles next in line for GEMM0
    uint32_t (*gemm1_tiles)[P::kLanes];  // [kGroups] the tiles next in line for GEMM1
  };
  // GEMM1 tiles wait in two groups; remote homes go first, since their rows have a way to go.
  static constexpr uint32_t kGroups = 2;

  FLASHMOE_FN Scheduler(const Call& call, Subscriber<P>& subscriber, const Memory& memory)
      : c_(call), sub_(subscriber), memory_(memory) {
    published_ = P::broadcast(P::load_relaxed(&c_.control()->published.value), 0);
    drained_ = P::broadcast(P::load_relaxed(&c_.control()->list_head.value), 0);
    for (uint32_t i = P::lane(); i < c_.gemm1_columns; i += P::kLanes) memory_.column_next[i] = 0;
    P::sync();
  }

  // Starts the loads of a step, so that they are under way during the subscriber's. All lanes.
  FLASHMOE_FN void look() {
    taken_ = P::load_relaxed(&c_.control()->queue_head.value);
    word_ = look_ready<P>(c_, drained_);
  }

  // Publishes what the window allows; kDone once the call's last word is published. All lanes, after look().
  FLASHMOE_FN Step step() {
    bool moved = drain();
    int64_t room = static_cast<int64_t>(P::broadcast(taken_, 0) + c_.order.window - published_);
    bool fenced = false;
    while (room > 0) {
      const TaskKind kind = choose(c_.order, ready());
      if (kind == TaskKind::kNone) break;
      // One fence for the step: nothing that later tasks of it refer to is written in between. And a lane posts what
      // other lanes polled: each fences its own, then they meet.
      if (!fenced) {
        P::release_fence(kDevice);
        P::sync();
        fenced = true;
      }
      room -= publish_some(kind, static_cast<uint32_t>(min_of<int64_t>(room, P::kLanes)));
      moved = true;
    }
    if (sub_.complete() && tasks_ == tasks_of_call()) {
      end_call();
      return Step::kDone;
    }
    return moved ? Step::kProgress : Step::kIdle;
  }

 private:
  // `reduced` returns by packet, not by tile, and column order goes over all tiles: both have but the second group.
  FLASHMOE_FN bool one_group() const { return c_.reduced() || c_.order.gemm1_by_column; }

  FLASHMOE_FN uint64_t tasks_of_call() const {
    const uint64_t per_tile = uint64_t{c_.gemm0_columns} + c_.gemm1_columns;
    const uint64_t reduces = c_.reduced() ? uint64_t{sub_.packets_with_entries()} * c_.gemm1_columns : 0;
    return sub_.former().tiles() * per_tile + reduces + c_.blocks();
  }

  // Moves what retiring processors pushed to where it is published from. What the items refer to is acquired by the
  // release_fence before they are published: it fences both ways, and the OS warp itself does not look.
  FLASHMOE_FN bool drain() {
    bool moved = false;
    while (true) {
      const uint32_t n = take_ready<P>(c_, drained_, word_);
      if (n == 0) break;
      drained_ += n;
      moved = true;
      const Task task = Task::unpack(P::lane() < n ? word_ : 0);
      for (uint32_t g = 0; g < kGroups; ++g) {
        const bool remote = task.column != 0 && !one_group();
        append(group_[g].ready, task.kind == TaskKind::kGemm1 && remote == (g == 0),
               [&](uint32_t place) { *c_.workspace<uint32_t>(WorkField::kGemm1Tiles, g, place) = task.index; });
      }
      append(reduces_ready_, task.kind == TaskKind::kReduce,
             [&](uint32_t place) { *c_.workspace<uint64_t>(WorkField::kReduceTasks, place) = task.pack(); });
      if (n < P::kLanes) break;
      word_ = look_ready<P>(c_, drained_);
    }
    P::sync();
    return moved;
  }

  // Calls store(place) in the lanes with `has`, at consecutive places behind `end`, which moves on.
  template <class Store>
  FLASHMOE_FN static void append(uint32_t& end, bool has, Store&& store) {
    uint32_t total;
    const uint32_t place = end + count_before<P>(has, total);
    if (has) store(place);
    end += total;
  }

  FLASHMOE_FN ReadyState ready() const {
    ReadyState r;
    r.reduce = reduces_published_ < reduces_ready_;
    r.combine = combines_published_ < sub_.combines();
    r.gemm1 = gemm1_published_ < uint64_t{group_[0].ready + group_[1].ready} * c_.gemm1_columns;
    r.gemm0 = gemm0_next_ < gemm0_end_ || sub_.former().ready() > 0;
    r.gemm0_published = gemm0_published_;
    r.gemm1_published = gemm1_published_;
    return r;
  }

  // Publishes up to `limit` (<= kLanes) tasks of a kind that is ready; returns how many.
  FLASHMOE_FN uint32_t publish_some(TaskKind kind, uint32_t limit) {
    Task task;
    bool has = false;
    switch (kind) {
      case TaskKind::kReduce: has = next_reduce(limit, task); break;
      case TaskKind::kCombine: has = next_combine(limit, task); break;
      case TaskKind::kGemm1: has = c_.order.gemm1_by_column ? next_column(limit, task) : next_gemm1(limit, task); break;
      default: has = next_gemm0(limit, task); break;
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
    if (has) task = Task::unpack(*c_.workspace<uint64_t>(WorkField::kReduceTasks, reduces_published_ + P::lane()));
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

  // Expert by expert, so that an expert's weights are read while they are in the L2; a tile's columns side by side. The
  // tile is named by its place among its expert's: to look up its id, the scheduler would wait for a load.
  FLASHMOE_FN bool next_gemm0(uint32_t limit, Task& task) {
    if (gemm0_next_ == gemm0_end_) {
      gemm0_next_ = 0;
      gemm0_end_ = sub_.former().take(expert_, memory_.gemm0_tiles) * c_.gemm0_columns;
    }
    const uint32_t n = min_of(limit, gemm0_end_ - gemm0_next_);
    const bool has = P::lane() < n;
    if (has) {
      const uint32_t i = gemm0_next_ + P::lane();
      task = {TaskKind::kGemm0, i % c_.gemm0_columns, memory_.gemm0_tiles[i / c_.gemm0_columns]};
    }
    gemm0_next_ += n;
    gemm0_published_ += n;
    return has;
  }

  // Tile by tile: a group's tasks are numbered tile-major.
  FLASHMOE_FN bool next_gemm1(uint32_t limit, Task& task) {
    uint32_t filled = 0;
    bool has = false;
    for (uint32_t g = 0; g < kGroups; ++g) {
      Group& group = group_[g];
      load_tiles(g);
      const uint64_t left = uint64_t{group.loaded_end} * c_.gemm1_columns - group.published;
      const uint32_t n = static_cast<uint32_t>(min_of<uint64_t>(limit - filled, left));
      if (P::lane() >= filled && P::lane() < filled + n) {
        const uint64_t i = group.published + P::lane() - filled;
        task = {TaskKind::kGemm1, static_cast<uint32_t>(i % c_.gemm1_columns),
                memory_.gemm1_tiles[g][i / c_.gemm1_columns - group.loaded_begin]};
        has = true;
      }
      group.published += n;
      filled += n;
    }
    gemm1_published_ += filled;
    return has;
  }

  // Makes sure that the group's next tile, if it has one, is among those in shared memory.
  FLASHMOE_FN void load_tiles(uint32_t g) {
    Group& group = group_[g];
    if (group.published < uint64_t{group.loaded_end} * c_.gemm1_columns || group.loaded_end == group.ready) return;
    group.loaded_begin = group.loaded_end;
    group.loaded_end = min_of(group.ready, group.loaded_begin + P::kLanes);
    const uint32_t i = group.loaded_begin + P::lane();
    P::sync();
    if (i < group.loaded_end) memory_.gemm1_tiles[g][P::lane()] = *c_.workspace<uint32_t>(WorkField::kGemm1Tiles, g, i);
    P::sync();
  }

  // Column block by column block over all ready tiles: the lowest column that has a tile left.
  FLASHMOE_FN bool next_column(uint32_t limit, Task& task) {
    const uint32_t ready = group_[1].ready;
    uint32_t column = 0;
    while (memory_.column_next[column] == ready) ++column;
    const uint32_t first = memory_.column_next[column];
    const uint32_t n = min_of(limit, ready - first);
    const bool has = P::lane() < n;
    if (has) task = {TaskKind::kGemm1, column, *c_.workspace<uint32_t>(WorkField::kGemm1Tiles, 1, first + P::lane())};
    P::sync();
    if (P::lane() == 0) memory_.column_next[column] = first + n;
    P::sync();
    gemm1_published_ += n;
    return has;
  }

  // One stop word per processor, behind every task: the queue and the list are empty when the last is taken.
  FLASHMOE_FN void end_call() {
    P::release_fence(kDevice);
    P::sync();
    for (uint32_t base = 0; base < c_.processors; base += P::kLanes) {
      published_ += publish<P>(c_, published_, base + P::lane() < c_.processors, {TaskKind::kStop, 0, 0});
    }
    if (P::lane() != 0) return;
    P::store_relaxed(&c_.control()->published.value, published_);
    P::store_relaxed(&c_.control()->list_head.value, drained_);
    P::store_release(&c_.status(c_.rank)->left, c_.epoch, kSystem);
  }

  struct Group {
    uint32_t ready = 0;                         // tiles
    uint64_t published = 0;                     // tasks
    uint32_t loaded_begin = 0, loaded_end = 0;  // which tiles are in shared memory
  };

  const Call& c_;
  Subscriber<P>& sub_;
  const Memory memory_;
  Group group_[kGroups];
  uint64_t taken_ = 0, word_ = 0;  // what look() saw
  uint64_t published_;             // words ever published in this context
  uint64_t drained_;               // items ever drained from the ready list
  uint64_t tasks_ = 0;             // published in this call
  uint64_t gemm0_published_ = 0, gemm1_published_ = 0;
  uint32_t reduces_ready_ = 0, reduces_published_ = 0;
  uint32_t combines_published_ = 0;
  uint32_t expert_ = 0;                      // where the next GEMM0 tiles are taken from
  uint32_t gemm0_next_ = 0, gemm0_end_ = 0;  // tasks of the tiles taken
};

}  // namespace flashmoe

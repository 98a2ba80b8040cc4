// Clerk: warp 10 of each block. It looks up tasks (look_up.cuh) and hands them to its block's loaders and consumers,
// in slots of the task ring. In a cluster of two blocks, the first block's clerk takes tasks from the ready queue for
// both blocks, and the second block's clerk retires the tasks that both blocks have computed.
// Reads: the ready queue, tiles, their rows' descriptions and segments (this rank's workspace); the task ring (shared
// memory).
// Writes: its ring's slots. The first clerk also writes the task's word in the second block's ring, the queue's head,
// the queue slot that it empties and, if its wait expires, a fault in all ranks' heaps. The second clerk also writes
// counters of tiles and of rows owed, the ready list (workspace), and the signal that all rows of a rank's tokens are
// computed. With the reduced return this signal is in the workspace, otherwise in that rank's heap, over NVLink if it
// is another rank.
// Barriers, all of TaskRing: arrives at `full`, `handed`, `done` and `free`; polls `handed`, `done` and `free`.
// Never touches the stages, weights, token rows or y. In a backward pass it also prefetches kept rows to the L2,
// takes tickets of tasks after the queue's stop (workspace), and writes what look_up.cuh says.
#pragma once

#include "flashmoe/sm90/roles/look_up.cuh"

namespace flashmoe::sm90 {

// Run by a clerk: hands task n of the ring to the block's loaders and consumers. stored: how many tasks that return
// rows the clerk has handed on before.
template <class Dtype, class Pass>
__device__ __forceinline__ void put_task(const KernelArgs& args, const Call& c, TaskRing& ring, uint32_t n,
                                         const Task& task, uint32_t& stored) {
  using P = Platform;
  TaskSlot& slot = ring.at(n);
  if constexpr (kIsBackward) {
    if (n != 0) Pass::template prefetch<Dtype>(args, c, ring.at(n - 1));
  }
  if (is_rehearsal(task)) {
    look_up_rehearsal(slot);
  } else if (is_behind_stop(task.kind)) {
    if constexpr (kIsBackward) Pass::template look_up_behind_stop<Dtype>(args, c, task, slot);
  } else if (task.kind != TaskKind::kStop) {
    look_up<Dtype, Pass>(args, c, task, slot);
  }
  if (P::lane() == 0) {
    slot.kind = task.kind;
    slot.stored = kNumberAgain<Dtype> ? n : stored;  // n is for compute_tasks(); such builds do not use `stored`
  }
  if (is_one_of<kHome>(task.kind)) ++stored;
  P::sync();
  ring.put_full(n);
}

// Run by the leading block's clerk (one warp): after the rehearsals, takes tasks from the ready queue, and puts them
// in both blocks' rings.
template <class Dtype, class Pass>
__device__ __forceinline__ void lead_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  // A task is taken when the loaders have only this many stages left to begin. That takes the loaders as long as the
  // clerk takes to get and look up a task, which is four round trips to the L2. A task that is taken sooner would
  // wait here, while another cluster could begin it.
  constexpr uint32_t kAhead = 10;
  const uint32_t rehearsed = rehearsals<Dtype>(c);
  uint32_t stages = 0, stored = 0;  // of the tasks so far: all their stages; how many of them return rows
  uint32_t reported = 0;
  bool stopped = false;  // the queue has no more tasks
  [[maybe_unused]] typename Pass::TasksBehindStop behind(args);
  auto report_done = [&](uint32_t taken) {
    if (reported == taken || !ring.is_done(reported)) return false;
    if (P::lane() == 0) ring.report_done(reported);
    ++reported;
    return true;
  };
  for (uint32_t n = 0;; ++n) {
    while (ring.stages_loaded() + kAhead < stages || !ring.is_free(n)) {
      if (!report_done(n)) __nanosleep(kPause);
    }
    Task task = rehearsal(n);
    if (n >= rehearsed && !stopped) {
      uint64_t ticket = 0;
      if (P::lane() == 0) ticket = take_ticket<P>(c);
      task = wait_task<P>(c, P::broadcast(ticket, 0), [&] { return report_done(n); });
    }
    if constexpr (kIsBackward) {
      if constexpr (kTrainsInGroup) {
        if (!stopped && task.kind == TaskKind::kStop) {
          const auto received = [&] {
            if (Pass::all_received(c)) return Step::kDone;
            return report_done(n) ? Step::kProgress : Step::kIdle;
          };
          wait_until<P>(c, received, OsLiveness<P>{c});
        }
      }
      stopped |= task.kind == TaskKind::kStop;
      if (stopped) task = behind.next(args, c, [&] { return report_done(n); });
    }
    if (P::lane() == 0) ring.hand_on(n, task);
    put_task<Dtype, Pass>(args, c, ring, n, task, stored);
    if (task.kind == TaskKind::kStop) {
      while (reported < n) report_done(n);
      return;
    }
    stages += stages_of(ring.at(n));
  }
}

// Run by the following block's clerk (one warp): retires the tasks that the consumers of both blocks have done.
// Consumers do not retire tasks themselves, because each counter costs a round trip to the L2. The arrivals of the
// consumers (and of the leading clerk) order the consumers' stores before the changes of the counters. So whoever
// sees these changes also sees the stores (cumulativity).
template <class Dtype, class Pass>
__device__ __forceinline__ void follow_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  uint32_t retired = 0, stored = 0;
  auto retire_done = [&](uint32_t taken) {
    if (retired == taken || !ring.is_done(retired)) return false;
    const TaskSlot& slot = ring.at(retired);
    if (!is_rehearsal(slot.task()) && !is_behind_stop(slot.kind)) retire<P>(c, slot.task());
    P::sync();
    if (P::lane() == 0) ring.put_free(retired);
    ++retired;
    return true;
  };
  for (uint32_t n = 0;; ++n) {
    while (!ring.is_handed(n)) {
      if (!retire_done(n)) __nanosleep(kPause);
    }
    const Task task = ring.handed_task(n);
    put_task<Dtype, Pass>(args, c, ring, n, task, stored);
    if (task.kind != TaskKind::kStop) continue;
    while (retired < n) retire_done(n);
    return;
  }
}

}  // namespace flashmoe::sm90

// The backward pass (docs/training.md): what its roles do in addition to their work in a forward pass, or in place of
// that work. Dispatch finds the routing that the forward pass has kept. Token rows are rows of dY. Tasks differentiate.
// After the queue's stop word come the products for the gradients of weights.
#pragma once

#include "flashmoe/sm90/gradients/biases.cuh"
#include "flashmoe/sm90/gradients/choices.cuh"
#include "flashmoe/sm90/gradients/load.cuh"
#include "flashmoe/sm90/gradients/look_up.cuh"
#include "flashmoe/sm90/gradients/received.cuh"
#include "flashmoe/sm90/gradients/router.cuh"
#include "flashmoe/sm90/gradients/tasks.cuh"
#include "flashmoe/sm90/roles/pass.cuh"

namespace flashmoe::sm90 {

// Functions that are most of what a role does are in base classes, in files of their own. Functions of a few lines are
// here.
struct Backward : Inference,
                  KeptChoices,
                  ReceivedRows,
                  PrefetchOfKept,
                  GateLookUp,
                  LoadsBehindStop,
                  BackwardTasks,
                  AddsRouterDx,
                  CombinesWithRouter {
  using TasksBehindStop = sm90::TasksBehindStop;
  static constexpr uint32_t kCombines = sm90::kCombines;

  // Sends rows of dY and, if x is dispatched again, rows of x: by the same code with other addresses.
  static __device__ __forceinline__ void send_rows(const KernelArgs& args, const Call& c, RowCopies& copies, uint32_t q,
                                                   uint32_t token, uint32_t rows) {
    const uint8_t* first = args.dy();
    uint64_t row_bytes = args.dy_row_bytes(), behind = 0;
    FLASHMOE_NO_UNROLL
    while (true) {
      copies.copy(
          rows, c.memory.token_row_bytes,
          [&](uint32_t row) -> const uint8_t* { return first + Platform::broadcast(token, row) * row_bytes; },
          [&](uint32_t row) { return c.dispatched_row(q, c.rank, Platform::broadcast(token, row)) + behind; });
      if (behind == args.group.x_behind) break;
      first = args.backward.x, row_bytes = args.backward.x_row_bytes, behind = args.group.x_behind;
    }
  }
  static __device__ __forceinline__ uint32_t first_number(const KernelArgs& args, const Call& c, uint32_t tile,
                                                          uint32_t expert) {
    if constexpr (!kTrainsInGroup) return 0;
    return first_row_of(args.group, c, tile, expert);
  }
  static __device__ __forceinline__ void look_up_gathered(const KernelArgs& args, const Call& c, const Task& task,
                                                          const RowPlace& at, const Row& row, uint32_t& number) {
    if constexpr (kTrainsInGroup) {
      number = within(args.group, at.first_number + at.in_tile);
      if (task.column == 0) args.group.gather[at.tile * kTileTokens + at.in_tile] = gather_code(args.group, c, row);
    } else {
      number = kept_row(c, row, task.tile().slice());
    }
  }
  // If a slice of the shared expert has all gates before all ups, dX's tasks multiply gates and ups as if they were two
  // slices.
  static __device__ __forceinline__ void halve_slices(const KernelArgs& args, TaskSlot& slot) {
    const uint32_t halves = z_halves(args);
    slot.slices *= halves, slot.k_bytes /= halves;
  }
  template <class Dtype>
  static __device__ __forceinline__ void look_up_behind_stop(const KernelArgs& args, const Call& c, const Task& task,
                                                             TaskSlot& slot) {
    if (is_of_router_dx(c, task.group())) {
      look_up_router_dx<Dtype>(args, c, task, slot);
    } else {
      look_up_over_rows<Dtype>(c, task, slot);
    }
  }

  // By the loader warp that has nothing to load in a task of dX: sends gradients of combine weights to their homes.
  template <class Dtype>
  static __device__ __forceinline__ void return_weights(const KernelArgs& args, const Call& c, const TaskSlot& slot) {
    if (is_one_of<kHome>(slot.kind) && slot.tile != kNoTile)
      send_weight_gradients<Dtype>(args, c, slot.tile, slot.column, slot.share, slot.expert);
  }

  // All warps, after their roles: sums that come after the stop word.
  template <class Dtype>
  static __device__ __forceinline__ void sum_behind_stop(const KernelArgs& args, const Call& c) {
    if constexpr (!kTrainsInGroup) sum_weight_parts(args, c);
    sum_biases<Dtype>(args, c);
  }
  static __device__ __forceinline__ void collect_weights(const KernelArgs& args, const Call& c) {
    collect_weight_gradients(args, c);
  }
};

}  // namespace flashmoe::sm90

// Loaders: how they load the tasks of a backward pass that come after the queue's stop.
#pragma once

#include "flashmoe/sm90/gradients/router.cuh"
#include "flashmoe/sm90/gradients/weights.cuh"
#include "flashmoe/sm90/machine/load.cuh"

namespace flashmoe::sm90 {

// Loaders: load a task that multiplies over an expert's rows.
template <class Dtype, class Count>
__device__ __forceinline__ void load_over_rows(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                               Pipeline& ring, Count&& count) {
  const BackwardArgs& b = args.backward;
  const WeightTask task = WeightTask::of(args, slot.expert, slot.column);
  const uint32_t first_row = task.first_row + cluster_rank() * (kTaskFeatures / kClusterBlocks);
  const uint32_t first_column = task.first_column + cluster_rank() * kBoxFeatures;
  const uint32_t columns = first_row < c.shape.hidden ? c.shape.hidden - first_row : 0;
  const FeatureSpans spans{task.of_down ? &b.weighted_columns : &b.dz_columns, first_column, false, 0, false};
  const uint32_t first_byte = columns != 0 ? first_row * Dtype::kBytes : 0;
  const GatheredRows rows{
      (task.of_down ? args.dy() : b.x) + first_byte,
      static_cast<uint32_t>((task.of_down ? args.dy_row_bytes() : b.x_row_bytes) / 16),
      kTrainsInGroup ? (task.of_down ? args.group.received_dy() : args.group.x) + first_byte : nullptr,
      kTrainsInGroup ? c.memory.token_row_bytes / 16 : 0, kTrainsInGroup ? args.group.gather : nullptr};
  load_weight_task<Dtype>(ring, c, slot.expert, slot.share.rows, rows, columns, spans, count);
}

struct LoadsBehindStop {
  // Loaders: load a task that comes after the stop word. Returns whether the two warps may then be at different stages.
  template <class Dtype, class Count>
  static __device__ __forceinline__ bool load_behind_stop(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                                          Pipeline& ring, Count&& count) {
    const uint32_t group = slot.task().group();
    if (!is_of_router(c, group)) {
      load_over_rows<Dtype>(args, c, slot, ring, count);
      return false;
    }
    if (is_of_router_dx(c, group)) {
      load_router_dx<Dtype>(args, slot, ring, count);
    } else if (group != kCombines) {  // a task that combines loads nothing
      load_router_weights<Dtype>(args, slot, ring, count);
    }
    return true;
  }
};

}  // namespace flashmoe::sm90

// What the clerks of a backward pass look up in addition to roles/look_up.cuh: where the forward pass has kept what
// belongs to a row, and the tasks that come after the queue's stop.
#pragma once

#include "flashmoe/sm90/gradients/pre_activations.cuh"
#include "flashmoe/sm90/gradients/received.cuh"
#include "flashmoe/sm90/gradients/weights.cuh"
#include "flashmoe/sm90/roles/look_up.cuh"

namespace flashmoe::sm90 {

// The bytes of a row of pre-activations.
template <class Dtype>
__device__ __forceinline__ uint32_t kept_row_bytes(const KernelArgs& args) {
  return args.backward.z_columns * Dtype::kBytes;
}

struct PrefetchOfKept {
  // Has the L2 fetch what a task's epilogue reads of kept rows, since these come from memory otherwise. Run by one
  // warp. The clerk prefetches the rows of a task when it looks up the next task, which is some ten stages before the
  // first task's epilogue. If the clerk prefetched them when it looks up the task itself, the L2 would have evicted
  // them again before the epilogue.
  template <class Dtype>
  static __device__ __forceinline__ void prefetch(const KernelArgs& args, const Call& c, const TaskSlot& slot) {
    if (!is_one_of<kDifferentiating>(slot.kind) || is_rehearsal(slot.task())) return;
    constexpr uint32_t kOne = Dtype::kBytes;
    const uint32_t bytes = kept_row_bytes<Dtype>(args);
    const uint32_t each = kTaskFeatures * (bytes == c.shape.intermediate * kOne ? kOne : 2 * kOne);
    const uint8_t* const from = args.backward.kept.pre_activations + slot.column * each;
    const uint32_t size = min_of(each, bytes - slot.column * each);
    for (uint32_t r = Platform::lane(); r < slot.share.rows; r += Platform::kLanes) {
      prefetch_to_l2(from + uint64_t{slot.tokens[r]} * bytes, size);
    }
  }
};

// The gradient of a token's shared-gate logit, which is the product of the row of `shared_gate` with the token's row.
// The token is that of row in_tile of a tile of the shared expert. The caller calls this only when all slices of the
// tile are differentiated.
__device__ __forceinline__ float shared_logit_gradient(const KernelArgs& args, const Call& c, uint32_t tile,
                                                       uint32_t in_tile, const Row& row) {
  const uint32_t parts = ceil_div(c.shape.intermediate, kTaskFeatures) * kClusterBlocks,
                 first = c.shape.routed_local_experts();
  const uint64_t all = kTrainsInGroup ? args.group.rows : uint64_t{c.shape.tokens} * rows_of_token(c.shape);
  float sum = 0.0f;
#pragma unroll 1
  for (uint32_t s = 0; s < c.shape.shared; ++s) {
    const uint32_t number = kTrainsInGroup ? within(args.group, first_row_of(args.group, c, tile, first + s) + in_tile)
                                           : kept_row(c, row, s);
    const float* const from = args.backward.weight_parts + number;
#pragma unroll 4
    for (uint32_t p = 0; p < parts; ++p) sum += from[p * all];
  }
  return sum * row.weight * (1.0f - row.weight);
}

struct GateLookUp {
  // For a row of a task that computes dX of the shared expert: returns the gradient of the row's shared-gate logit, as
  // the bits of a float, or 0 if there is no shared gate. The epilogue adds this gradient times `shared_gate` to the
  // row of dX. The task of the first block of columns also stores the gradient for the caller.
  static __device__ __forceinline__ uint32_t look_up_gate(const KernelArgs& args, const Call& c, const Task& task,
                                                          uint32_t tile, uint32_t in_tile, const Row& row) {
    if (args.shared_gate == nullptr) return 0;
    const float gradient = shared_logit_gradient(args, c, tile, in_tile, row);
    if (task.column == 0 && args.options.shared_logit_gradients != nullptr)
      args.options.shared_logit_gradients[row.token] = gradient;
    return __float_as_uint(gradient);
  }
};

// Fills the slot of a task that a cluster takes after its stop word, as look_up() fills the slots of other tasks. Such
// a task multiplies over all rows of an expert, or, for the router's gradient, over all tokens.
template <class Dtype>
__device__ __forceinline__ void look_up_over_rows(const Call& c, const Task& task, TaskSlot& slot) {
  if (Platform::lane() != 0) return;
  const uint32_t rows = task.group() == kCombines       ? 0
                        : is_of_router(c, task.group()) ? c.shape.tokens
                                                        : rows_of_expert(c, local_expert_of(c, task.group()));
  slot.tile = slot.expert = task.group();
  slot.of = task.of;
  slot.column = task.column;
  slot.slices = 1;
  slot.k_bytes = ceil_div(rows, kRowsOfStage<Dtype>) * kRowBytes;  // so that Wide::stages(k_bytes) is right
  slot.share = {.wide = true, .first = 0, .rows = rows, .cover = Wide::kTokens};
}

}  // namespace flashmoe::sm90

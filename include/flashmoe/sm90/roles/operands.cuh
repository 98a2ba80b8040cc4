// What loaders and consumers both ask of a product: its weights, their scales and biases, and how many columns of
// results a task has. Each thread of these roles (warps 0 to 9) calls these functions for itself.
// Reads the kernel's arguments, the call and a task's slot (shared memory). Writes nothing, and touches no barrier.
// It says where weights and biases are, and does not read them.
#pragma once

#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// The weights of product p: their tensor map and their scales (those of the experts, or of the shared expert's
// slices), the number of weight rows of an expert, and the biases.
template <uint32_t p>
__device__ __forceinline__ const TensorMap* weights_of(const KernelArgs& args, bool shared) {
  if constexpr (Product<p>::kRight == Operand::kGateUp) return shared ? &args.shared_gate_up : &args.gate_up;
  return shared ? &args.shared_down : &args.down;
}
template <uint32_t p>
__device__ __forceinline__ const ScaleTable& weight_scales(const KernelArgs& args, bool shared) {
  if constexpr (Product<p>::kRight == Operand::kGateUp) return shared ? args.shared_gate_up_scale : args.gate_up_scale;
  return shared ? args.shared_down_scale : args.down_scale;
}
template <uint32_t p>
__device__ __forceinline__ uint32_t weight_rows(const Call& c, bool gated) {
  return Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate * (gated ? 2 : 1) : c.shape.hidden;
}
template <uint32_t p>
__device__ __forceinline__ const void* bias_of(const KernelArgs& args) {
  return Product<p>::kRight == Operand::kGateUp ? args.gate_up_bias : args.down_bias;
}

// columns_of(): how many columns of results a task of this kind has. columns_left(): how many columns of results there
// are from the task's first one on.
template <bool kGated>
__device__ __forceinline__ uint32_t columns_of(TaskKind kind) {
  return with_product(kind, [&]<uint32_t p>() { return kColumnsPerTask<p, kGated>; });
}
template <bool kGated>
__device__ __forceinline__ uint32_t columns_left(const Call& c, const TaskSlot& slot) {
  const uint32_t all = with_product(slot.kind, [&]<uint32_t p>() {
    return Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate : c.shape.hidden;
  });
  return all - slot.column * columns_of<kGated>(slot.kind);
}
// Whether all features that are left are in the first block's half of the task, so that the products take only this
// half. (Never in e4m3, where columns behind the last would change the scales of the columns before them. Never in
// passes that train, because it takes one more shape.)
template <class Dtype, bool kGated>
__device__ __forceinline__ bool is_half(const Call& c, const TaskSlot& slot) {
  if constexpr (kQuantised<Dtype> || kBuild.keeps || kIsBackward) return false;
  return 2 * columns_left<kGated>(c, slot) <= columns_of<kGated>(slot.kind);
}

}  // namespace flashmoe::sm90

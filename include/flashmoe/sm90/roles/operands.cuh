// What loaders and consumers both ask of a product: its weights, their scales and biases, and how many columns of results a task
// has. Run by any thread of these roles (warps 0 to 9), for itself.
// Reads the kernel's arguments, the call and a task's slot (shared memory). Writes nothing, and touches no barrier.
// It says where weights and biases are, and does not read them.
#pragma once

#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// The weights of product p: their tensor map, of the experts or of the shared expert's slices, how many rows an expert has
// of them, and their biases.
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

// Columns of results that a task of this kind has, and how many there are from the task's first one on.
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
// Whether the first block's half of the features has all that are left, so that the products take no more. (Not of rows in
// e4m3: those behind would change the scales of the columns before them. Nor in passes that train: it is one more shape.)
template <class Dtype, bool kGated>
__device__ __forceinline__ bool is_half(const Call& c, const TaskSlot& slot) {
  if constexpr (kQuantised<Dtype> || kBuild.keeps || kIsBackward) return false;
  return 2 * columns_left<kGated>(c, slot) <= columns_of<kGated>(slot.kind);
}

}  // namespace flashmoe::sm90

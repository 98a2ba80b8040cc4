// A layer, ready to launch: everything that the kernel is told. It is made once, when the layer is added. A call then
// only sets its tokens.
#pragma once

#include <memory>

#include "cuda/launch.h"
#include "cuda/layer.h"
#include "host/placement.h"

namespace flashmoe::cuda {

// What the layers of a context have in common.
struct Common {
  const Arch& arch;
  Limits limits;
  Call call;          // has the fields set that are the same for all layers
  OrderPolicy asked;  // by the user; the engine chooses the fields that are kBuiltIn
  HostFault* fault = nullptr;
  const char* reasons = nullptr;  // see KernelArgs
};

// The tables of a placement in the device's memory.
struct Placement {
  Placement(const Device& device, const host::PlacementTables& tables, uint32_t rank);

  const uint32_t local_experts;
  DeviceMemory memory;
  const uint32_t *owner, *by_owner, *owner_base;
};

// The tensor maps of experts' matrices in the kernel's arguments.
struct WeightMaps {
  gpu::TensorMap gate_up, down, shared_gate_up, shared_down;
};

struct Plan {
  // Encodes the layer's tensor maps. trace: null unless it is traced.
  Plan(const Common& common, const Layer& layer, const Placement& where, const LoadedKernels& kernels, uint8_t* trace);
  void set_tokens(const Common& common, const TokenSpec& tokens);
  // For passes that train among several ranks. kept_layout, routing_layout: the memory of what a call of so many tokens
  // keeps. call_layout: the memory that the call uses until it is over.
  GroupKeptLayout kept_layout(uint64_t tokens, const gpu::KeptRoom& room) const;
  RoutingLayout routing_layout(uint64_t tokens, const gpu::KeptRoom& room) const;
  GroupCallLayout call_layout(const Common& common) const;
  // For passes that train: the memory that a backward pass uses.
  PassLayout pass_layout(uint64_t tokens, const KeptRows& rows) const;
  // Whether a call of so many tokens keeps its rows in `room` although it has needed only `needed`: `room` must have
  // space for `needed`, and not be much larger.
  bool suits(uint64_t tokens, const gpu::KeptRoom& room, const gpu::KeptRoom& needed) const;
  // Notes that the next calls may need about as much.
  void expect(const gpu::KeptRoom& needed);
  // For Pass::kBackward, after set_tokens(). Encodes the tensor maps of rows.
  void set_gradients(const GradientSpec& g);
  // Whether this is a pass that trains among several ranks.
  bool trains_in_group() const { return pass != Pass::kInference && args.call.shape.ranks != 1; }
  // Whether the kernel for a few tokens takes the call; and the most tokens of a call that this kernel takes for this
  // layer.
  bool few() const;
  uint32_t most_few() const;

  const Arch& arch;
  gpu::KernelArgs args{};
  const LoadedKernels kernels;
  const LayerSpec spec;
  const Pass pass;
  const bool redispatch;    // see Layer
  const bool few_in_group;  // see policy.h
  const host::Holders placement;
  gpu::KeptRoom expected_room{};  // for the next call that keeps among several ranks; empty before the first

 private:
  void set_kept(const Common& common, const TokenSpec& t);
  PassLayout set_rows(const GradientSpec& g);

  WeightMaps general_maps_{}, few_maps_{};  // those of each kernel, of which set_tokens() chooses
};

}  // namespace flashmoe::cuda

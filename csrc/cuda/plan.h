// A layer as it is launched: everything the kernel is told, made once when the layer is added; a call sets its tokens.
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
  Call call;          // with the fields set that are the same for all layers
  OrderPolicy asked;  // by the user; 0: the engine's choice
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

struct Plan {
  // Encodes the layer's tensor maps. trace: null unless it is traced.
  Plan(const Common& common, const Layer& layer, const Placement& where, const LoadedKernels& kernels, uint8_t* trace);
  void set_tokens(const Common& common, const TokenSpec& tokens);
  // Of passes that train among several ranks: where a call of so many tokens has what it keeps, and until it is over.
  GroupKeptLayout kept_layout(uint64_t tokens, const gpu::KeptRoom& room) const;
  RoutingLayout routing_layout(uint64_t tokens, const gpu::KeptRoom& room) const;
  GroupCallLayout call_layout(const Common& common) const;
  // Of passes that train: where a backward pass has its memory.
  PassLayout pass_layout(uint64_t tokens, const KeptRows& rows) const;
  // Whether a call of so many tokens, which has needed so much, keeps it in this room: if it has that, and not much more.
  bool suits(uint64_t tokens, const gpu::KeptRoom& room, const gpu::KeptRoom& needed) const;
  // That calls may need about as much.
  void expect(const gpu::KeptRoom& needed);
  // Of Pass::kBackward, behind set_tokens(). Encodes the tensor maps of rows.
  void set_gradients(const GradientSpec& g);
  // Whether it is a pass that trains among several ranks.
  bool trains_in_group() const { return pass != Pass::kInference && args.call.shape.ranks != 1; }
  // Whether the kernel of a few tokens takes the call, and the most tokens that it takes of the layer.
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
  gpu::KeptRoom expected_room{};  // for the next call that keeps among several ranks; none before the first

 private:
  void set_kept(const Common& common, const TokenSpec& t);
  PassLayout set_rows(const GradientSpec& g);
};

}  // namespace flashmoe::cuda

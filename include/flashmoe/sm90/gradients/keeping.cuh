// The forward pass that keeps what its gradients need (docs/training.md): the routing, pre-activations, and among
// several ranks the rows of other ranks' tokens.
#pragma once

#include "flashmoe/sm90/gradients/choices.cuh"
#include "flashmoe/sm90/gradients/pre_activations.cuh"
#include "flashmoe/sm90/gradients/received.cuh"
#include "flashmoe/sm90/roles/pass.cuh"

namespace flashmoe::sm90 {

struct Keeping : Inference, KeptChoices, ReceivedRows {
  // Pre-activations are kept under the row's number in the call (kept_row()). Among several ranks they are first kept
  // under the row's number in the tiles, and after the call gpu/kept_rows.cuh moves them to where they stay.
  static __device__ __forceinline__ uint32_t first_number(const KernelArgs&, const Call&, uint32_t tile, uint32_t) {
    return kTrainsInGroup ? tile * kTileTokens : 0;
  }
  static __device__ __forceinline__ void look_up_gathered(const KernelArgs&, const Call& c, const Task& task,
                                                          const RowPlace& at, const Row& row, uint32_t& number) {
    number = kTrainsInGroup ? at.first_number + at.in_tile : kept_row(c, row, task.tile().slice());
  }

  // If weights scale the input, what is kept are the products before they get weight and bias. The gradient of the
  // weight is a sum over these products, and they cannot be computed from the pre-activations, since the weight may be
  // 0. kBehind: the place for pre-activations that have weight and bias, which are then not kept.
  template <bool kGated, bool kBehind = false>
  static __device__ __forceinline__ auto kept_place(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                                    uint32_t first_column) {
    if constexpr (kBehind)
      return NothingKept{};
    else
      return PreActivations<kGated>{args.kept.pre_activations, slot.tokens, first_column, c.shape.intermediate};
  }
};

}  // namespace flashmoe::sm90

// How dispatch keeps a token block's routing for the backward pass, and how the dispatch of that pass finds it again.
// Every warp of the team runs it.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/sm90/roles/team.cuh"

namespace flashmoe::sm90 {

struct KeptChoices {
  // Copies a token block's routing that the forward pass has kept to the scratch memory of the team.
  static __device__ __forceinline__ void copy_choices(const KeptOutputs& kept, const Call& c, uint32_t b,
                                                      const PacketScratch& s) {
    const uint64_t first = uint64_t{b << c.policy.log2_block} * c.shape.top_k;
    for (uint32_t i = threadIdx.x; i < c.tokens_in_block(b) * c.shape.top_k; i += kTeamWarps * 32) {
      s.ids[i] = kept.ids[first + i];
      s.weights[i] = kept.weights[first + i];
    }
  }

  // Keeps the experts of all choices of a token block. To be called before the token block's packets are built.
  static __device__ __forceinline__ void keep_choices(const KeptOutputs& kept, const Call& c, uint32_t b,
                                                      const PacketScratch& s) {
    const uint64_t first = uint64_t{b << c.policy.log2_block} * c.shape.top_k;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < c.tokens_in_block(b) * c.shape.top_k; i += kTeamWarps * 32) {
      kept.ids[first + i] = s.ids[i];
    }
  }
  // Keeps which of these choices were dropped or bad, and the weights. To be called after the packets are built, by the
  // same threads as keep_choices().
  static __device__ __forceinline__ void keep_routing(const KeptOutputs& kept, const Call& c, uint32_t b) {
    const uint32_t first = b << c.policy.log2_block, top_k = c.shape.top_k;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < c.tokens_in_block(b) * top_k; i += kTeamWarps * 32) {
      const uint32_t token = first + i / top_k, k = i % top_k;
      const uint64_t at = uint64_t{token} * top_k + k;
      const int32_t recorded = c.routing(token)[k];
      if (recorded == Choice::recorded(Choice::kDropped)) kept.ids[at] = ~kept.ids[at];
      if (recorded == Choice::recorded(Choice::kBad)) kept.ids[at] = ExpertId::kBad;
      kept.weights[at] = c.weights(token)[k];
    }
  }
};

}  // namespace flashmoe::sm90

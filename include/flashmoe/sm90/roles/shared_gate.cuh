// The gate of more than kManyExperts experts: the two blocks of a cluster share its work. Each block multiplies the
// tokens of both blocks by half of the experts. It stores the logits of the other block's tokens in the other block's
// memory. If each block computed its gate alone, it would read the whole router for its few tokens (512 experts of 2048
// columns: 2 MB for 32 tokens). All blocks would read it at the same time, and the L2 would limit their speed.
// Run by warps 0 to 9 of a block (dispatch.cuh): the loaders load stages, the consumers multiply. Reads x and the
// router by TMA, and the router's bias. Writes the stages and the logits behind them, in the shared memory of both
// blocks.
// Barriers: the gate's `full` and `empty`. `logits_stored` says that the other block's share is here; `dispatched` says
// that the other block no longer reads the logits in its own memory, so this block may store new ones there. Both
// blocks go through equally many token blocks, so each phase is awaited.
#pragma once

#include "flashmoe/sm90/epilogue/features.cuh"
#include "flashmoe/sm90/machine/load.cuh"
#include "flashmoe/sm90/roles/gate_sums.cuh"
#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// Whether the blocks of a cluster share the gate.
template <class Dtype>
__device__ __forceinline__ bool shares_gate(const KernelArgs& args, const Call& c) {
  return !kIsBackward && Scores<Dtype>::Type::kTensorCores && args.topk_ids == nullptr &&
         c.shape.gate_experts > kManyExperts;
}

// The end of the token blocks for which thread blocks dispatch. With a shared gate, it is a multiple of two, so the
// last token block may not exist.
template <class Dtype>
__device__ __forceinline__ uint32_t dispatch_end(const KernelArgs& args, const Call& c) {
  return shares_gate<Dtype>(args, c) ? align_up(c.blocks(), kClusterBlocks) : c.blocks();
}

// Waits for the n-th phase of a barrier at which the other block arrives. Everything that the other block does before
// it arrives ends, because the waits in dispatch are bounded. So this wait ends too.
__device__ __forceinline__ void wait_for_cluster(const uint64_t& barrier, uint32_t n) {
  while (!test_wait_cluster(shared_address(&barrier), n & 1u)) {
  }
}
// Arrives at the other block's barrier. Called by one thread, after a barrier at which its block has met: what the
// block did before that is then visible to threads that have waited for the arrival.
__device__ __forceinline__ void tell_cluster(const uint64_t& barrier) {
  arrive_release_at_block(1 - cluster_rank(), shared_address(&barrier));
}

// A block's share of the gate of two token blocks: of its own token block, b, and of the other block's.
struct GateShare {
  uint32_t first_token, tokens;  // of both token blocks together
  uint32_t first_expert, end_expert;

  __device__ __forceinline__ GateShare(const Call& c, uint32_t b) {
    const uint32_t experts = c.shape.gate_experts, half = align_up(ceil_div(experts, kClusterBlocks), 64u);
    first_token = (b - cluster_rank()) << c.policy.log2_block;
    tokens = min_of(kClusterBlocks * c.block_tokens(), c.shape.tokens - first_token);
    first_expert = cluster_rank() * half;
    end_expert = min_of(experts, first_expert + half);
  }
  template <class Dtype>
  __device__ __forceinline__ uint32_t stages(const Call& c) const {
    return ceil_div(end_expert - first_expert, GateOfMany::kFeatures) *
           GateOfMany::stages(c.shape.hidden * Dtype::kBytes);
  }
};

// Run by the loaders: loads the stages of a share.
template <class Dtype>
__device__ __forceinline__ void load_shared_gate(const KernelArgs& args, const Call& c, const GateShare& share,
                                                 GateOfMany::Ring& ring) {
  const BoxRows tokens{&args.tokens, share.first_token, share.tokens};
  for (uint32_t e = share.first_expert; e < share.end_expert; e += GateOfMany::kFeatures) {
    const FeatureBox experts{&args.router, e, 0, 0, 0, false, e + kBoxFeatures >= share.end_expert};
    detail::load_stages<Dtype, GateOfMany>(ring, experts, tokens, NoScales{}, c.shape.hidden * Dtype::kBytes, [] {});
  }
}

// Run by the consumers: computes the logits of a share. own: this block's logits, [token, expert]; those of the other
// block lie at the same address in that block.
template <class Dtype>
__device__ __forceinline__ void compute_shared_gate(const KernelArgs& args, const Call& c, const GateShare& share,
                                                    float* own, GateOfMany::Ring& ring) {
  using Shape = FeaturesByTokens<GateOfMany, GateOfMany::kTokens>;
  const uint32_t group = thread_anew() / kWarpgroup, experts = c.shape.gate_experts;
  Accumulators<Shape> acc;
  for (uint32_t e = share.first_expert + group * Shape::kNextA; e < share.end_expert + group * Shape::kNextA;
       e += GateOfMany::kFeatures) {
    FeatureBias bias[Shape::kMs];
    load_bias<Dtype>(bias, args.router_bias, Lane::of_thread(group), e, experts);
    multiply_segments<typename Scores<Dtype>::Type, Shape>(ring, group,
                                                           GateOfMany::stages(c.shape.hidden * Dtype::kBytes), acc);
    const Lane at = Lane::of_thread(group);
    const uint32_t first_of_second = c.block_tokens() / 8;  // the second block's first group of 8 tokens
    const auto place = [&](uint32_t eighth) {
      const uint32_t block = eighth < first_of_second ? 0 : 1;
      return in_block(block, own) + ((eighth - block * first_of_second) * 8 + at.token()) * experts;
    };
#pragma unroll
    for (uint32_t m = 0; m < Shape::kMs; ++m)
      store_gate<Dtype, Shape::kN>(at, acc[m], bias[m], args.rule, share.tokens, e + m * 64, share.end_expert, experts,
                                   place);
  }
}

// Run by loaders and consumers: computes this block's share of the logits of its token block b and of the other
// block's. turn: how many token blocks this block has done before.
template <class Dtype>
__device__ __forceinline__ void route_together(const KernelArgs& args, const Call& c, Shared& s, uint8_t* stages,
                                               float* logits, uint32_t b, uint32_t turn) {
  const GateShare share(c, b);
  // At a new barrier, a wait for parity 1 returns at once, so the loaders find all stages empty.
  const bool loads = thread_anew() >= kFirstLoader;
  GateOfMany::Ring ring{shared_address(stages), shared_address(s.gate_barriers), 0, loads ? 1u : 0u};
  ring.advance(turn * share.template stages<Dtype>(c));
  if (!loads) {
    if (turn != 0) wait_for_cluster(s.dispatched, turn - 1);
    compute_shared_gate<Dtype>(args, c, share, logits, ring);
  } else if (thread_anew() < kFirstLoader + kLoaders) {
    load_shared_gate<Dtype>(args, c, share, ring);
  }
}

}  // namespace flashmoe::sm90

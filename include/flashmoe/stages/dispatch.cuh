// Dispatch: a token block's way to packets in its destinations' heaps. Gate (logits on the tensor cores, through the GEMM
// pipeline), choice of experts, packets, the signal of the own one. Rows, and the other signals: send.cuh.
//
// The whole block takes part, but for the OS warp: the loaders load, the consumers multiply, then all choose and build.
#pragma once

#include <type_traits>

#include "flashmoe/sm90/shared.cuh"
#include "flashmoe/sm90/tracer.cuh"
#include "flashmoe/stages/epilogue.cuh"
#include "flashmoe/stages/load.cuh"
#include "flashmoe/stages/mainloop.cuh"
#include "flashmoe/stages/route.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kTeamWarps = kWarps - 1;  // the last is the OS actor's
inline constexpr uint32_t kTeamBarrier = 3;         // 1 and 2 are the consumers' own
using Team = TeamPlatform<kTeamWarps, kTeamBarrier>;

// Scratch in the stages. The gate's pipeline leaves 16 KiB of each, or 4 with few experts; the logits take them, those of
// every fourth token in each: where the next 8 tokens' are is then but an addition away. When the logits are there the
// stages are free for the packets.
struct DispatchScratch {
  static constexpr uint32_t kLogits = 32 * 1024;  // within a stage

  uint8_t* stages;

  __device__ __forceinline__ float* logits(uint32_t experts, uint32_t token) const {
    return reinterpret_cast<float*>(stages + token % kStages * kStageBytes + kLogits) + token / kStages * experts;
  }
  __device__ __forceinline__ PacketScratch packets() const {
    uint8_t* const second = stages + kStageBytes;
    PacketScratch s;
    s.ids = reinterpret_cast<int32_t*>(stages);
    s.weights = reinterpret_cast<float*>(stages + 8 * 1024);
    s.count = reinterpret_cast<uint16_t*>(stages + 16 * 1024);
    s.start = reinterpret_cast<uint16_t*>(stages + 18 * 1024);
    s.entries = reinterpret_cast<uint32_t*>(stages + 20 * 1024);
    s.bad = reinterpret_cast<uint32_t*>(stages + 21 * 1024);
    s.owner = reinterpret_cast<uint32_t*>(stages + 24 * 1024);
    s.place = reinterpret_cast<uint16_t*>(second);
    return s;
  }
};
static_assert(kMaxPairs * 4 <= 8 * 1024 && kMaxExperts * 2 <= 2 * 1024 && kMaxRanks * 4 <= 1024);
static_assert(kMaxExperts * 4 <= 8 * 1024 && kTeamWarps * kMaxExperts * 2 <= DispatchScratch::kLogits);
static_assert(Gate::tokens(1) <= DispatchScratch::kLogits && DeepGate::tokens(2) <= DispatchScratch::kLogits);
static_assert(DispatchScratch::kLogits + kMaxGateLogits / kStages * 4 <= kStageBytes);
static_assert(DispatchScratch::kLogits + kMaxTokenBlock / kStages * kFewExperts * 4 <= DeepGate::features(0));

// Tokens of one pass of the gate. Without tensor cores each warpgroup takes 64: 128 take more registers than the block
// enters with.
template <class Dtype, class Stage>
inline constexpr uint32_t kGateTokens =
    Scores<Dtype>::Type::kTensorCores || std::is_same_v<Stage, DeepGate> ? kMaxTokenBlock : 64;

// Has the L2 fetch what the gate will read, whole rows at once: the gate itself asks for 128 bytes of each row at a time, and
// waits for memory with each. The block's first tokens, and its share of the router's rows, which all blocks read. One
// warp, of no other use at the start. It made the gate 2 us shorter once; of late, nothing (docs/measured.md).
__device__ __forceinline__ void prefetch_gate(const KernelArgs& args, const Call& c) {
  if (args.topk_ids != nullptr) return;
  const uint32_t row_bytes = c.hidden * c.element_bytes;
  for (uint32_t e = blockIdx.x + Platform::lane() * gridDim.x; e < c.experts; e += Platform::kLanes * gridDim.x) {
    prefetch_l2(args.router_rows.row(0, e), row_bytes);
  }
  if (blockIdx.x >= c.blocks()) return;
  for (uint32_t t = Platform::lane(); t < c.tokens_in_block(blockIdx.x); t += Platform::kLanes) {
    prefetch_l2(args.x + ((blockIdx.x << c.log2_block) + t) * args.x_row_bytes, row_bytes);
  }
}

// Loaders: the router's rows and the block's tokens, as many experts at a time as the stage has.
template <class Dtype, class Stage>
__device__ __forceinline__ void load_gate(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                          uint32_t b) {
  uint32_t* const places = s.ring.slot[0].places;
  const uint32_t tokens = c.tokens_in_block(b);
  for (uint32_t t = threadIdx.x - kFirstLoader; t < tokens; t += kLoaders) {
    places[t] = static_cast<uint32_t>(((b << c.log2_block) + t) * (args.x_row_bytes / 16));
  }
  named_barrier_sync(kLoaderBarrier, kLoaders);
  for (uint32_t first = 0; first < tokens; first += kGateTokens<Dtype, Stage>) {
    const TokenRows rows{args.x, args.x, places + first, min_of(tokens - first, kGateTokens<Dtype, Stage>)};
    for (uint32_t e = 0; e < c.experts; e += Stage::kFeatures) {
      detail::gather_stages<Dtype, Stage>(ring, {&args.router, e, 0, 0, 0}, rows, c.hidden * Dtype::kBytes, [] {});
    }
  }
}

// Consumers: logits[token][expert] of `tokens` tokens from `first` on.
template <class Dtype, class Shape>
__device__ __forceinline__ void multiply_gate(const KernelArgs& args, const Call& c, const DispatchScratch& scratch,
                                              Pipeline& ring, uint32_t group, uint32_t first, uint32_t tokens) {
  Accumulators<Shape> acc;
  const uint32_t experts = c.experts;  // once: the stores could change what is in shared memory
  const uint32_t skipped = min_of(tokens, group * Shape::kNextB);  // the other group's
  for (uint32_t e = group * Shape::kNextA; e < experts + group * Shape::kNextA; e += Shape::Stage::kFeatures) {
    FeatureBias bias[Shape::kMs];
    load_bias<Dtype>(bias, args.router_bias, Lane::of_thread(group), e, experts);
    multiply<typename Scores<Dtype>::Type, Shape>(ring, group, c.hidden * Dtype::kBytes, true, acc);
    const Lane at = Lane::of_thread(group);  // anew: else the addresses are computed before the products
    const uint32_t token = first + skipped + at.token();
    float* const to[2] = {scratch.logits(experts, token), scratch.logits(experts, token + 1)};
    store_gate<Shape::kN>(at, acc, bias, tokens - skipped, e, experts, to, 8 / kStages * experts);
  }
}

// Consumers: all of a block's logits.
template <class Dtype>
__device__ __forceinline__ void multiply_gate(const KernelArgs& args, const Call& c, const DispatchScratch& scratch,
                                              Pipeline& ring, uint32_t b) {
  const uint32_t group = threadIdx.x / kWarpgroup, all = c.tokens_in_block(b);
  if (few_experts(c.experts)) return multiply_gate<Dtype, FewByTokens>(args, c, scratch, ring, group, 0, all);
  for (uint32_t first = 0; first < all; first += kGateTokens<Dtype, Gate>) {
    const uint32_t tokens = min_of(all - first, kGateTokens<Dtype, Gate>);
    if (tokens <= 64) {
      multiply_gate<Dtype, FeaturesByTokens<Gate, 64>>(args, c, scratch, ring, group, first, tokens);
    } else if constexpr (kGateTokens<Dtype, Gate> > 64) {
      multiply_gate<Dtype, FeaturesByTokens<Gate, 128>>(args, c, scratch, ring, group, first, tokens);
    }
  }
}

// Every warp of the team: given ids and weights to where the packets are built.
__device__ __forceinline__ void copy_given(const KernelArgs& args, const Call& c, uint32_t b, const PacketScratch& s) {
  const uint64_t first = uint64_t{b << c.log2_block} * c.top_k;
  for (uint32_t i = threadIdx.x; i < c.tokens_in_block(b) * c.top_k; i += kTeamWarps * 32) {
    if (args.topk_ids_64) {
      const int64_t id = static_cast<const int64_t*>(args.topk_ids)[first + i];
      s.ids[i] = id == static_cast<int32_t>(id) ? static_cast<int32_t>(id) : -1;
    } else {
      s.ids[i] = static_cast<const int32_t*>(args.topk_ids)[first + i];
    }
    s.weights[i] = args.topk_weights[first + i];
  }
}

// Every warp of the team: the experts of the block's tokens, from their logits.
__device__ __forceinline__ void choose_block(const KernelArgs& args, const Call& c, Shared& s,
                                             const DispatchScratch& scratch, uint32_t b) {
  const PacketScratch packets = scratch.packets();
  const uint32_t tokens = c.tokens_in_block(b);
  const bool few = c.experts <= stages::kFewLanes, renormalize = args.renormalize != 0;
  const uint32_t at_once = few ? Platform::kLanes / stages::kFewLanes : 2;  // choices of a warp
  for (uint32_t first = Team::worker(); first < tokens; first += at_once * kTeamWarps) {
    auto choice = [&](uint32_t t) -> stages::Choice {
      return {scratch.logits(c.experts, t), packets.ids + t * c.top_k, packets.weights + t * c.top_k};
    };
    uint32_t bad;
    if (few) {
      const uint32_t t = first + Platform::lane() / stages::kFewLanes * kTeamWarps;
      bad = stages::choose_few(t < tokens ? choice(t) : stages::Choice{}, c.experts, c.top_k, renormalize);
    } else {  // beyond the last token, the first once more
      const uint32_t second = first + kTeamWarps < tokens ? first + kTeamWarps : first;
      bad = stages::choose_experts({choice(first), choice(second)}, c.experts, c.top_k, renormalize);
    }
    if (bad == 0 || Platform::lane() != 0) continue;
    s.router_bad = 1;
    post_fault<Platform>(c, {.kind = FaultKind::kRouterValue,
                             .actor = Actor::kProcessor,
                             .awaited = c.rank,
                             .culprit = c.rank,
                             .index = (b << c.log2_block) + first + (__ffs(bad) - 1) * kTeamWarps});
  }
}

// Fills ids and weights of the block, from the given ones or by the router. False if a logit is not finite.
template <class Dtype>
__device__ __forceinline__ bool route_block(const KernelArgs& args, const Call& c, Shared& s,
                                            const DispatchScratch& scratch, Pipeline& ring, uint32_t b) {
  const PacketScratch packets = scratch.packets();
  if (args.topk_ids != nullptr) {
    copy_given(args, c, b, packets);
    return true;
  }
  if (threadIdx.x < kFirstLoader) {
    multiply_gate<Dtype>(args, c, scratch, ring, b);
  } else if (threadIdx.x < kFirstLoader + kLoaders) {
    if (few_experts(c.experts)) {
      load_gate<Dtype, DeepGate>(args, c, s, ring, b);
    } else {
      load_gate<Dtype, Gate>(args, c, s, ring, b);
    }
  }
  Team::team_sync();
  choose_block(args, c, s, scratch, b);
  Team::team_sync();
  return s.router_bad == 0;
}

// The team's part of one token block. `ring` is the caller's side of the pipeline. False if the call is over.
template <class Dtype, class Trace>
__device__ __forceinline__ bool dispatch_block(const KernelArgs& args, const Call& c, Shared& s, uint8_t* stages,
                                               Pipeline& ring, uint32_t b, const Trace& trace) {
  const DispatchScratch scratch{stages};
  const PacketScratch packets = scratch.packets();
  trace.begin();
  if (!route_block<Dtype>(args, c, s, scratch, ring, b)) return false;
  trace.end(TracePhase::kGate, b, 0);
  trace.begin();
  uint32_t* const owner = const_cast<uint32_t*>(packets.owner);
  for (uint32_t e = threadIdx.x; e < c.experts; e += kTeamWarps * 32) owner[e] = c.owner[e];
  Team::team_sync();
  if (!build_packets<Team>(c, b, packets)) {
    Team::team_sync();  // the word that says so lies in the stages, and loaders may overwrite it once a warp goes on
    return false;
  }
  signal_own_packet<Team>(c, b, packets);  // the others' are complete when their rows are there, see send.cuh
  // The scratch was read and written through the generic proxy; the copy engine writes there next.
  fence_proxy_async_shared();
  Team::team_sync();
  trace.end(TracePhase::kDispatch, b, 0);
  return true;
}

}  // namespace flashmoe::sm90

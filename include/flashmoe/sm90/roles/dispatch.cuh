// Dispatch: makes a token block's packets, one for each rank. Run by warps 0 to 10 of a block together, before they
// take their roles: the loaders' warps load the gate's stages, the consumers' warps multiply them to logits, then all
// warps choose experts and build packets.
// Read: x and the router by TMA, the router's bias; or given top-k ids and weights; or in a backward pass the routing
// that was kept. For the shared expert's gate, and to quantise rows, x by loads.
// Write: the stages, as scratch (shared memory). This rank's heap: its packet for itself, and that packet's signal.
// This rank's workspace: packets for other ranks (the outbox), routing, counts for a capacity, quantised rows, a note
// of a bad row. Outputs: experts' load, logits, routing to keep. For choices without an expert: what Combine or a
// Joiner will read, which is a return row, a staged row, a joint word, or y.
// Barriers: the gate's `full` and `empty`; named barrier 3; if the blocks of a cluster share the gate,
// `logits_stored` and `dispatched` of both blocks (shared_gate.cuh). With a capacity, it waits for the token block
// before this one.
// Never touches other ranks' heaps (send.cuh or puts.cuh brings packets there), the task ring or the staging buffers.
#pragma once

#include "flashmoe/gpu/quantise.cuh"
#include "flashmoe/gpu/route.cuh"
#include "flashmoe/gpu/shared_expert.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/epilogue/features.cuh"
#include "flashmoe/sm90/machine/load.cuh"
#include "flashmoe/sm90/roles/gate_sums.cuh"
#include "flashmoe/sm90/roles/ring.cuh"
#include "flashmoe/sm90/roles/shared_gate.cuh"
#include "flashmoe/sm90/roles/team.cuh"

namespace flashmoe::sm90 {

// Dispatch's scratch in the memory of the stages. The logits lie at its end (machine/pipeline.cuh). Once they are
// computed, the memory in front of them holds what packets are built with.
struct DispatchScratch {
  uint8_t* stages;

  __device__ __forceinline__ float* logits(uint32_t experts, uint32_t token) const {
    return reinterpret_cast<float*>(stages + kLogitsAt) + token * experts;
  }
  __device__ __forceinline__ PacketScratch packets() const {
    uint8_t* const second = stages + kStageBytes;
    PacketScratch s;
    s.ids = reinterpret_cast<int32_t*>(stages);
    s.weights = reinterpret_cast<float*>(stages + 8 * 1024);
    s.count = reinterpret_cast<uint16_t*>(stages + 16 * 1024);
    s.start = reinterpret_cast<uint16_t*>(stages + 18 * 1024);
    s.entries = reinterpret_cast<uint32_t*>(stages + 20 * 1024);
    s.aborted = reinterpret_cast<uint32_t*>(stages + 21 * 1024);
    s.missing = s.aborted + 1;
    s.owner = reinterpret_cast<uint32_t*>(stages + 24 * 1024);
    s.place = reinterpret_cast<uint16_t*>(second);
    return s;
  }
};
static_assert(kMaxChoices * 4 <= 8 * 1024 && kMaxExperts * 2 <= 2 * 1024 && kMaxRanks * 4 <= 1024);
static_assert(kMaxExperts * 4 <= 8 * 1024 && kStageBytes + kTeamWarps * kMaxExperts * 2 <= kLogitsAt);

// Whether a pass of the gate has at most 64 tokens if there are more than kMiddleGate experts. Products with 128 tokens
// would take more registers than a thread has before the roles begin: without tensor cores, and in kernels that trace
// or put, which have fewer to spare.
template <class Dtype>
inline constexpr bool kHalvesGate = !Scores<Dtype>::Type::kTensorCores || kBuild.trace || kBuild.rdma;

// Calls f, a lambda `[&]<class Stage>() {..}`, with the gate's layout.
template <class Dtype, class F>
__device__ __forceinline__ void with_gate(uint32_t experts, F&& f) {
  if (experts <= kSmallGate) return f.template operator()<Gate<kSmallGate>>();
  if (experts <= kMiddleGate) return f.template operator()<Gate<kMiddleGate>>();
  if constexpr (!kHalvesGate<Dtype>) {
    if (experts <= kBoxFeatures) return f.template operator()<Gate<kBoxFeatures>>();
  }
  f.template operator()<GateInPasses>();
}

// The most tokens of one pass of the gate.
template <class Dtype, class Stage>
inline constexpr uint32_t kGateTokens = kHalvesGate<Dtype> && kInPasses<Stage> ? 64 : kMaxTokenBlock;

// The number of stages that the gate of a whole token block takes.
template <class Dtype, class Stage>
__device__ __forceinline__ uint32_t gate_stages(const Call& c) {
  return ceil_div(c.block_tokens(), kGateTokens<Dtype, Stage>) * ceil_div(c.shape.gate_experts, Stage::kFeatures) *
         Stage::stages(c.shape.hidden * Dtype::kBytes);
}

// Run by the loaders: loads the router's rows and the token block's tokens, as many experts at a time as a stage has.
template <class Dtype, class Stage>
__device__ __forceinline__ void load_gate(const KernelArgs& args, const Call& c, typename Stage::Ring& ring,
                                          uint32_t b) {
  const uint32_t tokens = c.tokens_in_block(b);
  for (uint32_t first = 0; first < tokens; first += kGateTokens<Dtype, Stage>) {
    const uint32_t rows = min_of(tokens - first, kGateTokens<Dtype, Stage>);
    for (uint32_t e = 0; e < c.shape.gate_experts; e += Stage::kFeatures) {
      const BoxRows tokens_of_pass{&args.tokens, (b << c.policy.log2_block) + first, rows};
      detail::load_stages<Dtype, Stage>(ring, FeatureBox{&args.router, e, 0, 0, 0, false, false}, tokens_of_pass,
                                        NoScales{}, c.shape.hidden * Dtype::kBytes, [] {});
    }
  }
}

// Called before logits overwrite the stages, because the other warpgroup may still be reading these. The whole team
// meets here, although only the consumers need to. (If the consumers met at a barrier of their own, while the other
// warps waited at the team's barrier, racecheck would report what the other warps read after it as unordered.)
__device__ __forceinline__ void gate_stages_read() {
  Team::team_sync_of_roles();
}

// Run by the consumers: computes logits[token][expert] for `tokens` tokens from `first` on.
template <class Dtype, class Shape>
__device__ __forceinline__ void multiply_gate(const KernelArgs& args, const Call& c, const DispatchScratch& scratch,
                                              typename Shape::Stage::Ring& ring, uint32_t group, uint32_t first,
                                              uint32_t tokens) {
  Accumulators<Shape> acc;
  const uint32_t experts = c.shape.gate_experts;  // read once: for the compiler, stores of logits may change `c`
  const uint32_t skipped = min_of(tokens, group * Shape::kNextB);  // tokens of the other warpgroup
  for (uint32_t e = group * Shape::kNextA; e < experts + group * Shape::kNextA; e += Shape::Stage::kFeatures) {
    FeatureBias bias[Shape::kMs];
    load_bias<Dtype>(bias, args.router_bias, Lane::of_thread(group), e, experts);
    const uint32_t stages = Shape::Stage::stages(c.shape.hidden * Dtype::kBytes);
    multiply_segments<typename Scores<Dtype>::Type, Shape>(ring, group, stages, acc);
    if constexpr (!kInPasses<typename Shape::Stage>) gate_stages_read();
    const Lane at = Lane::of_thread(group);  // anew: otherwise addresses are computed before the products
    float* const to = scratch.logits(experts, first + skipped + at.token());
    static_assert(Shape::kMs == 1);
    store_gate<Dtype, Shape::kN>(at, acc[0], bias[0], args.rule, tokens - skipped, e, experts, experts,
                                 [&](uint32_t eighth) { return to + eighth * 8 * experts; });
  }
}

// Run by the consumers: computes all of a token block's logits.
template <class Dtype, class Stage>
__device__ __forceinline__ void compute_logits(const KernelArgs& args, const Call& c, const DispatchScratch& scratch,
                                               typename Stage::Ring& ring, uint32_t b) {
  const uint32_t group = thread_anew() / kWarpgroup, all = c.tokens_in_block(b);
  if constexpr (Stage::kFeatures <= kMiddleGate) {
    multiply_gate<Dtype, FeaturesByHalfTokens<Stage>>(args, c, scratch, ring, group, 0, all);
  } else {
    for (uint32_t first = 0; first < all; first += kGateTokens<Dtype, Stage>) {
      const uint32_t tokens = min_of(all - first, kGateTokens<Dtype, Stage>);
      if (tokens <= 64) {
        multiply_gate<Dtype, FeaturesByTokens<Stage, 64>>(args, c, scratch, ring, group, first, tokens);
      } else if constexpr (kGateTokens<Dtype, Stage> > 64) {
        multiply_gate<Dtype, FeaturesByTokens<Stage, 128>>(args, c, scratch, ring, group, first, tokens);
      }
    }
  }
}

// Run by every warp of the team: chooses the experts of the token block's tokens, from their logits.
__device__ __forceinline__ void choose_block(const KernelArgs& args, const Call& c, const DispatchScratch& scratch,
                                             uint32_t b) {
  const PacketScratch packets = scratch.packets();
  const uint32_t tokens = c.tokens_in_block(b), experts = c.shape.gate_experts, top_k = c.shape.gate_top_k;
  auto choice = [&](uint32_t t) -> TokenChoice {
    return {scratch.logits(experts, t), packets.ids + t * c.shape.top_k, packets.weights + t * c.shape.top_k};
  };
  if (!args.rule.plain()) {
#pragma unroll 1
    for (uint32_t t = Team::worker(); t < tokens; t += kTeamWarps) {
      const bool good = choose_by_rule(args.rule, choice(t), experts, top_k);
      if (!good && Platform::lane() == 0) {
        note_row<Platform>(c, RowFault::kLogits, (b << c.policy.log2_block) + t);
      }
    }
    return;
  }
  const bool four = experts <= kTokenLanes;
  const uint32_t at_once = four ? Platform::kLanes / kTokenLanes : 2;  // tokens for which a warp chooses together
  for (uint32_t first = Team::worker(); first < tokens; first += at_once * kTeamWarps) {
    uint32_t bad;
    if (four) {
      const uint32_t t = first + Platform::lane() / kTokenLanes * kTeamWarps;
      bad = choose_four(args.rule, t < tokens ? choice(t) : TokenChoice{}, experts, top_k);
    } else {  // if there is no second token, the first one once more
      const uint32_t second = first + kTeamWarps < tokens ? first + kTeamWarps : first;
      bad = choose_experts(args.rule, {choice(first), choice(second)}, experts, top_k);
    }
    if (bad == 0 || Platform::lane() != 0) continue;
    // Only the bad row with the lowest token is noted, which is that of the first bit.
    note_row<Platform>(c, RowFault::kLogits, (b << c.policy.log2_block) + first + (__ffs(bad) - 1) * kTeamWarps);
  }
}

// Run by loaders and consumers: computes the token block's logits, without the cluster's other block.
template <class Dtype>
__device__ __forceinline__ void route_alone(const KernelArgs& args, const Call& c, Shared& s,
                                            const DispatchScratch& scratch, uint32_t b) {
  with_gate<Dtype>(c.shape.gate_experts, [&]<class Stage>() {
    // At a new barrier, a wait for parity 1 returns at once, so the loaders find all stages empty.
    const bool loads = thread_anew() >= kFirstLoader;
    typename Stage::Ring ring{shared_address(scratch.stages), shared_address(s.gate_barriers), 0, loads ? 1u : 0u};
    ring.advance(b / gridDim.x * gate_stages<Dtype, Stage>(c));
    if (!loads) {
      compute_logits<Dtype, Stage>(args, c, scratch, ring, b);
    } else {
      if (thread_anew() < kFirstLoader + kLoaders) load_gate<Dtype, Stage>(args, c, ring, b);
      if constexpr (!kInPasses<Stage>) gate_stages_read();
    }
  });
}

// Fills the ids and weights of the token block: from those that the caller has given, or by the router.
template <class Dtype>
__device__ __forceinline__ void route_block(const KernelArgs& args, const Call& c, Shared& s,
                                            const DispatchScratch& scratch, uint32_t b) {
  const PacketScratch packets = scratch.packets();
  if (args.topk_ids != nullptr) {
    copy_given<Dtype, kTeamWarps * 32>(args, c, b, packets.ids, packets.weights);
    return;
  }
  const bool shares = shares_gate<Dtype>(args, c);
  if (shares) {
    if constexpr (Scores<Dtype>::Type::kTensorCores)
      route_together<Dtype>(args, c, s, scratch.stages, scratch.logits(0, 0), b, b / gridDim.x);
  } else {
    route_alone<Dtype>(args, c, s, scratch, b);
  }
  Team::team_sync();
  if (shares) {
    if (thread_anew() == 0) tell_cluster(s.logits_stored);
    wait_for_cluster(s.logits_stored, b / gridDim.x);
    if (b >= c.blocks()) return;
  }
  if (args.router_logits != nullptr) {
    const uint32_t experts = c.shape.gate_experts;
    write_logits(args.router_logits + (uint64_t{b} << c.policy.log2_block) * experts, scratch.logits(experts, 0),
                 c.tokens_in_block(b) * experts, threadIdx.x, kTeamWarps * 32);
    Team::team_sync();
  }
  choose_block(args, c, scratch, b);
  Team::team_sync();
}

// Run by every warp of the team: replaces the experts that the token block's tokens have chosen by their slices.
__device__ __forceinline__ void slice_block(const Call& c, uint32_t b, const PacketScratch& s) {
  Team::team_sync();
#pragma unroll 1
  for (uint32_t t = threadIdx.x; t < c.tokens_in_block(b); t += kTeamWarps * 32) {
    const uint32_t token = (b << c.policy.log2_block) + t;
    choose_slices<Platform>(c, token, s.ids + t * c.shape.top_k, s.weights + t * c.shape.top_k);
  }
}

// Run by every warp of the team: adds the shared expert to the choices of the token block's tokens.
template <class Dtype>
__device__ __forceinline__ void add_shared(const KernelArgs& args, const Call& c, uint32_t b, const PacketScratch& s) {
  const uint8_t* const rows = args.x + uint64_t{b << c.policy.log2_block} * args.x_row_bytes;
#pragma unroll 1
  for (uint32_t t = Team::worker(); t < c.tokens_in_block(b); t += kTeamWarps) {
    const float weight = shared_weight<Dtype>(args, rows + t * args.x_row_bytes, c.shape.hidden);
    if (Team::lane() == 0) choose_shared(c, s.ids + t * c.shape.top_k, s.weights + t * c.shape.top_k, weight);
  }
}

// Run by every warp of the team: writes the token block's rows in e4m3, as they are sent and multiplied.
template <class Dtype>
__device__ __forceinline__ void quantise_block(const KernelArgs& args, const Call& c, uint32_t b) {
  const uint32_t hidden = c.shape.hidden;
#pragma unroll 1
  for (uint32_t t = Team::worker(); t < c.tokens_in_block(b); t += kTeamWarps) {
    const uint32_t token = (b << c.policy.log2_block) + t;
    const uint8_t* const row = args.x + token * args.x_row_bytes;
    if (args.x_scale == nullptr) {
      quantise_row<Dtype>(row, c.out_row(token), hidden);
    } else {
      copy_quantised_row(row, args.x_scale + uint64_t{token} * scale_blocks(hidden), c.out_row(token), hidden);
    }
  }
}

// Run by one warp: fills a whole return row, staged row or row of y with NaN (for a bad row) or zeros.
template <class Dtype>
__device__ __forceinline__ void fill_row(const Call& c, uint8_t* row, bool bad) {
  const uint4 filled = filled_chunk<Dtype>(bad);
#pragma unroll 1
  for (uint32_t at = Team::lane() * 16; at < c.memory.return_row_bytes; at += Team::kLanes * 16) {
    *reinterpret_cast<uint4*>(row + at) = filled;
  }
}

// Run by every warp of the team at the end of token block b: its scratch may be overwritten from now on, and its
// logits also by the cluster's other block.
template <class Dtype>
__device__ __forceinline__ void end_block(const KernelArgs& args, const Call& c, Shared& s, uint32_t b) {
  // The scratch was read and written through the generic proxy; the copy engine writes there next.
  fence_proxy_async_shared();
  Team::team_sync();
  if (!shares_gate<Dtype>(args, c) || b + gridDim.x >= dispatch_end<Dtype>(args, c)) return;
  if (thread_anew() == 0) tell_cluster(s.dispatched);
}

// The team's work for one token block. False if the call is over, and the cluster's other block does not need this
// block for later token blocks.
template <class Dtype, class Pass, class Trace>
__device__ __forceinline__ bool dispatch_block(const KernelArgs& args, const Call& c, Shared& s, uint8_t* stages,
                                               uint32_t b, const Trace& trace) {
  const DispatchScratch scratch{stages};
  const PacketScratch packets = scratch.packets();
  trace.begin();
  if constexpr (kIsBackward) {
    Pass::copy_choices(args.backward.kept, c, b, packets);
  } else {
    route_block<Dtype>(args, c, s, scratch, b);
    if (b >= c.blocks()) return true;  // there is no token block b: this block only took its part in a shared gate
    if (c.shape.slices != 1) slice_block(c, b, packets);
    if (c.shape.shared != 0) add_shared<Dtype>(args, c, b, packets);
  }
  trace.end(Phase::kGate, b, 0);
  uint32_t* const owner = const_cast<uint32_t*>(packets.owner);
  for (uint32_t e = threadIdx.x; e < c.shape.experts; e += kTeamWarps * 32) owner[e] = c.placement.owner[e];
  Team::team_sync();
  if constexpr (kBuild.keeps) {
    Pass::keep_choices(args.kept, c, b, packets);
    Team::team_sync();  // build_packets() turns ids into choices in place
  }
  const bool built =
      kIsBackward ? build_known_packets<Team>(c, b, packets) : build_packets<Team>(c, b, packets, args.load);
  if (!built) {
    end_block<Dtype>(args, c, s, b);  // all warps have then read `aborted`, which lies in the scratch
    return shares_gate<Dtype>(args, c);
  }
  if constexpr (!kIsBackward) {
    fill_missing<Team>(c, b, packets, args.out, [&](uint8_t* row, bool bad) { fill_row<Dtype>(c, row, bad); });
  }
  if constexpr (kQuantised<Dtype>) quantise_block<Dtype>(args, c, b);
  signal_own_packet<Team>(c, b, packets);  // senders signal the other packets when their rows are sent (send.cuh)
  if constexpr (kBuild.keeps) Pass::keep_routing(args.kept, c, b);
  end_block<Dtype>(args, c, s, b);
  trace.end(Phase::kDispatch, b, 0);
  return true;
}

}  // namespace flashmoe::sm90

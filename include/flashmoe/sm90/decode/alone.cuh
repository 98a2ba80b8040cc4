// The layer of a few tokens (at most kFewTokens) on a rank that is alone: one cooperative launch, one block per SM, 12
// warps a block, or 13 if weights have scales. All threads of all blocks run it.
//
// It reads x, routing that the caller gives, the router and the experts' weights. It writes the outputs. Blocks
// exchange data in memory of their own rank: FewMemory (gpu/decode_memory.h), and in the workspace intermediate rows
// and words of Control. In the heap it writes only a fault. It reads and writes no other rank's memory. Its shared
// memory is FewShared (decode/block.cuh).
//
// Such a call takes as long as reading its experts' weights once, plus the round trips to memory for which its steps
// wait. The actors of sm90/roles/kernel.cuh would make a chain of some twenty round trips, for tiles of a few rows that
// one scheduler hands out. Here each block finds out for itself which experts have which rows, and takes tasks by
// itself. From the moment the experts are known until the end, each multiprocessor has 112 KiB of weights on their way
// (mxfp4: 64 KiB), even while the rows that they are multiplied by are not there yet.
//
//   gate    a block computes the logits of some experts and some tokens at a time. In calls of up to kFewExactTokens
//           tokens these are eight experts, and each warp has a part of H; in other calls some warps multiply, each
//           eight experts by 16 tokens (decode/routing.cuh)
//   choose  every block chooses the experts of all tokens; if tokens are many, each block chooses those of some tokens,
//           and passes its choices on to the other blocks
//   then, by a block's warps (sm90/decode/tasks.cuh, sm90/decode/gemms.cuh):
//   0-7     consumers: GEMM0's tasks, then GEMM1's; they store intermediate and weighted rows to device memory
//   8       takes tasks, and loads their weights (one thread)
//   9       loads their rows: those of GEMM1 when the unit's intermediate rows are stored. With weights in 16 bits, warp
//           10 loads the rows behind the first 32. In FP8, warps 9 to 11 load rows, and quantise them
//           (decode/rows_quantised.cuh)
//   10, 11  in mxfp4: load the scales of the weights (decode/scales_mxfp4.cuh). There the consumers meet once, in named
//           barrier 1, before their first task
//   11      (10 with weights in fp32, 12 if weights have scales) counts each task of GEMM0 that is stored, where all
//           blocks look (one thread)
//   When all blocks have stored their rows, all warps sum the rows of each token. There is no return and no Combine.
//
// Bits: with weights in 16 bits, a token's row has the general kernel's bits in every call, whatever the other tokens
// are: products are summed along K in steps of 16, and logits in segments of H, as there (docs/invariance.md). With
// other weights, calls of up to kFewExactTokens tokens have bits of their own: GEMM1 may cut the intermediate columns
// into parts, with a task for each part, and in mxfp4 products have several sums side by side. (See docs/fp8.md and
// docs/mxfp4.md.)
//
// Waits: blocks wait for logits, for choices, for a unit's rows, and at the meeting. All waits are bounded
// (wait_until). This kernel does not use the protocol's queues and signals.
#pragma once

#include "flashmoe/gpu/leave.cuh"
#include "flashmoe/sm90/decode/gemms.cuh"
#include "flashmoe/sm90/decode/routing.cuh"

namespace flashmoe::sm90 {
namespace few {

// Whether the block has something to do after all blocks have met: sums, tokens to report, or units' counters to clear.
template <class Dtype>
__device__ __forceinline__ bool is_among_last(const Block& b) {
  const uint32_t tokens = b.c.shape.tokens, sums = b.c.shape.hidden * Dtype::kBytes / 16 * tokens;
  return blockIdx.x * P::kLanes < sums || blockIdx.x < tokens || blockIdx.x * kFewThreads < b.routing.units;
}

// All blocks meet. A block that `waits` goes on when every block has come, and may then load what they all stored
// before. The other blocks do not wait. False if the call is over.
__device__ __forceinline__ bool meet(const Block& b, bool waits) {
  __syncthreads();
  if (b.warp() == 0) {
    uint64_t* const met = &b.c.control()->few_met.value;
    if (P::lane() == 0) P::add_release(met, uint64_t{1});
    auto all_here = [&] {
      return P::ballot(P::load_acquire(met, kDevice) != gridDim.x) == 0 ? Step::kDone : Step::kIdle;
    };
    if (waits) wait_for_blocks(b, all_here);
  }
  return all_well(b);
}

// The block's warps, each in its role, until there are no more tasks.
template <class Dtype, Activation kActivation, bool kHalved, class Trace>
__device__ __forceinline__ void run_tasks(const Block& b, const Trace& trace) {
  constexpr bool kGated = is_gated(kActivation);
  if (b.warp() < kFewConsumers) {
    Format<Dtype>::prepare(b);
    consume_tasks<Dtype, kActivation, kHalved>(b, trace);
  } else if (b.warp() == kFewConsumers) {
    if (P::lane() == 0) load_weights<Dtype, kGated, kHalved>(b);
  } else if (b.warp() == kFewTeller) {
    if (P::lane() == 0) tell_of_stored(b);
  } else {
    Format<Dtype>::template load<kGated, kHalved>(b);
  }
}

template <class Dtype, Activation kActivation, class Trace>
__device__ __forceinline__ void run_gemms(const Block& b, const Trace& trace) {
  if (!halves_tasks(b)) {
    run_tasks<Dtype, kActivation, false>(b, trace);
  } else if constexpr (kMayHalve) {
    run_tasks<Dtype, kActivation, true>(b, trace);
  }
  trace.begin(1);
  const bool ok = meet(b, is_among_last<Dtype>(b));
  if (!ok) return;
  trace.begin();
  sum_rows<Dtype>(b);
  report_routing(b);
  // Clears the units' counters for the next call: nobody reads them any more in this one.
  for (uint32_t u = blockIdx.x * kFewThreads + threadIdx.x; u < b.routing.units; u += gridDim.x * kFewThreads) {
    *b.memory().done(u) = 0;
  }
  trace.end(Phase::kCombine, blockIdx.x, 0);
  trace.end(Phase::kReturn, blockIdx.x, 0, 1);
}

}  // namespace few

// The kernel of a rank that is alone.
struct Alone {
  template <class Dtype, Activation kActivation, bool kTrace>
  static __device__ __forceinline__ void run(const KernelArgs& args, FewShared& s) {
    const few::Block b{args, args.call, s, s.routing, Platform::load_relaxed(&args.call.control()->calls.value) + 1};
    const Tracer<kTrace, kFewThreads> trace{args, s.trace_events, s.trace_starts};
    if (threadIdx.x == 0) {
      s.failed = s.wrong = 0;
      s.trace_events = 0;
      prefetch_map(&args.gate_up);
      prefetch_map(&args.down);
      if constexpr (kMayHalve) {
        prefetch_map(&args.halved.gate_up);
        prefetch_map(&args.halved.down);
      }
    }
    __syncthreads();
    trace.begin();
    if (args.topk_ids == nullptr) few::compute_logits<typename Scores<Dtype>::Type>(b);
    trace.end(Phase::kGate, blockIdx.x, 0);
    // An earlier call failed, see leave(). This is checked only here, so that the epoch is loaded while logits are
    // computed.
    if (b.epoch == 0) return;
    // By the last thread, which has the least to do, while the block waits for logits. The barriers are used only after
    // the block barriers of route().
    if (threadIdx.x == kFewThreads - 1) few::init_pipeline(s.pipeline);
    const bool ok = few::route<Dtype>(b);
    trace.end(Phase::kDispatch, blockIdx.x, 0);
    if (ok) few::run_gemms<Dtype, kActivation>(b, trace);
    __syncthreads();
    if (threadIdx.x != 0) return;
    trace.finish();
    if (s.failed != 0 && s.fault.kind != FaultKind::kNone) {
      s.call = b.c;
      s.call.epoch = b.epoch;
      post_fault<Platform>(s.call, s.fault);
    }
    leave<true>(args, b.c, b.epoch);
  }
};

}  // namespace flashmoe::sm90

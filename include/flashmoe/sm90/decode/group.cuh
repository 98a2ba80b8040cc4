// The layer of a few tokens on a rank of a group whose memory is mapped. The kernel is that of sm90/decode/alone.cuh,
// with the protocol's packets in place of its routing, and with the protocol's returns in place of its meeting. All
// threads of all blocks run it.
//
// It has the memory of that kernel, and the heaps of all ranks. It reads its own heap, where peers store their calls,
// packets, rows and returns. It stores its own to the heaps of peers. From the peers' heaps it loads only their Status:
// whether they are alive and, for a fault, which call they have begun.
//
// Between ranks, it writes and awaits the same as the general kernel (docs/protocol.md). So other ranks cannot tell
// which kernel a rank runs. It has no actors. Their work is done as follows:
//   announcing    a block in the middle of the grid announces the call, before anything else
//   packets       the last blocks send the rows of a token block each to all ranks, while logits are computed
//                 (decode/send.cuh). Then they choose experts, and send entries, offsets and signal (decode/outbox.cuh)
//   arrival       warp 0 of every block waits until all packets of all ranks are here. Then each block lists its rank's
//                 rows for itself (decode/packets.cuh)
//   returning     consumers store rows to their homes as they compute them. The block that is counted last signals all
//                 return groups to all ranks
//   combining     blocks that have sums to make wait for all returns, and make the sums
// decode/waits.cuh says how it waits, and what block 0 does meanwhile.
//
// It supports only the direct return, and sums returned rows in the general kernel's order. So every bit is that of the
// general kernel, except for experts in e4m3 (docs/fp8.md).
#pragma once

#include "flashmoe/protocol/announce.h"
#include "flashmoe/sm90/decode/alone.cuh"
#include "flashmoe/sm90/decode/outbox.cuh"
#include "flashmoe/sm90/decode/packets.cuh"

namespace flashmoe::sm90 {
namespace few {

// Sends the packets that this block builds, then waits for the packets of all ranks and fills the routing from them.
// False if the call is over.
template <class Dtype>
__device__ __forceinline__ bool exchange(const Block& b) {
  bool ok = true;
  for_own_token_blocks(b, [&](uint32_t n) { ok = ok && send_packets<Dtype>(b, n); });
  if (!ok) return false;  // `ok` is the same in all threads
  if (b.warp() == 0) await_packets(b);
  if (!all_well(b)) return false;
  take_packets<Dtype>(b);
  return true;
}

// Warp 0, when the block has stored its results. The block that is counted last signals to all ranks that their rows
// are there. By the count it has acquired what the other blocks stored, and its signals release all of it. (The signal
// to this rank itself has system scope, too, so that all lanes run one and the same store.)
__device__ __forceinline__ void count_block(const Block& b) {
  const Call& c = b.c;
  bool last = false;
  if (P::lane() == 0) last = P::fetch_add_acq_rel(&c.control()->few_stored.value, uint64_t{1}) + 1 == gridDim.x;
  if (P::ballot(last) == 0) return;
  P::sync();
  const uint32_t groups = c.policy.groups;
  for (uint32_t i = P::lane(); i < c.shape.ranks * groups; i += P::kLanes) {
    P::store_release(c.return_signal(i / groups, c.rank, i % groups), Signal::make(b.epoch, 0), kSystem);
  }
  for (uint32_t u = P::lane(); u < b.routing.units; u += P::kLanes)
    *b.memory().done(u) = 0;  // nobody reads them any more
}

// Warp 0: waits until all ranks have returned all groups of this rank's tokens.
__device__ __forceinline__ void await_returns(const Block& b) {
  const Call& c = b.c;
  const uint32_t groups = c.policy.groups, all = c.shape.ranks * groups;
#pragma unroll 1
  for (uint32_t base = 0; base < all; base += P::kLanes) {
    const uint32_t i = base + P::lane(), q = i / groups, g = i % groups;
    uint32_t nothing;
    if (!await_signals(b, {i < all ? c.return_signal(c.rank, q, g) : nullptr, FaultKind::kReturn, q, g}, nothing))
      return;
  }
}

// All warps of the blocks that have sums to make: sum the returned rows of tokens. A lane makes 16 bytes of an output
// row at a time.
template <class Dtype>
__device__ __forceinline__ void sum_returned(const Block& b) {
  constexpr uint32_t kElements = 16 / Dtype::kBytes, kAtOnce = 8;
  const Call& c = b.c;
  const uint32_t chunks = c.shape.hidden / kElements, top_k = c.shape.top_k;
  const uint64_t pitch = c.return_row(c.rank, 0, 1) - c.return_row(c.rank, 0, 0);
  const uint32_t first = (blockIdx.x + gridDim.x * b.warp()) * P::kLanes + P::lane();
  for (uint32_t i = first; i < chunks * c.shape.tokens; i += gridDim.x * kFewThreads) {
    const uint8_t* const rows = c.return_row(c.rank, i / chunks, 0) + i % chunks * 16;
    float sum[kElements] = {};
#pragma unroll 1
    for (uint32_t base = 0; base < top_k; base += kAtOnce) {
      uint4 pieces[kAtOnce];
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        pieces[k] = uint4{};
        if (base + k < top_k) pieces[k] = load_once(rows + (base + k) * pitch);
      }
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) Dtype::accumulate(sum, pieces[k]);
    }
    reinterpret_cast<uint4*>(b.args.out)[i] = Dtype::round(sum);
  }
}

// One thread, when nothing of the block can go wrong any more, and its results are counted.
__device__ __forceinline__ void leave_well(const Block& b) {
  if (blockIdx.x == 0) P::store_relaxed(&b.c.status(b.c.rank)->left, b.epoch, kSystem);
  leave(b.args, b.c, b.epoch);
}

// After exchange(): computes this rank's rows, and sums those that came back. False if the call is over; otherwise the
// block has left the call (leave_well()).
template <class Dtype, Activation kActivation, class Trace>
__device__ __forceinline__ bool compute(const Block& b, const Trace& trace) {
  run_tasks<Dtype, kActivation, false>(b, trace);
  trace.begin(1);
  if (!all_well(b)) return false;
  const bool sums = blockIdx.x * P::kLanes < b.c.shape.hidden * Dtype::kBytes / 16 * b.c.shape.tokens;
  if (b.warp() == 0) {
    count_block(b);
    if (sums) await_returns(b);  // a rank without tokens awaits nothing
  }
  if (!all_well(b)) return false;
  // The last warp leaves the call for the block, because it has the fewest sums, if any. Leaving takes two round trips,
  // and the other warps sum meanwhile.
  if (threadIdx.x == kFewThreads - P::kLanes) leave_well(b);
  if (!sums) return true;
  trace.begin();
  sum_returned<Dtype>(b);
  trace.end(Phase::kCombine, blockIdx.x, 0);
  trace.end(Phase::kReturn, blockIdx.x, 0, 1);
  return true;
}

// All threads, first of all: makes this block's copy of the call, with its epoch (0: an earlier call failed), and
// prepares the rest of shared memory.
__device__ __forceinline__ void begin_call(const KernelArgs& args, FewShared& s) {
  constexpr uint32_t kEpochWords = sizeof(Epoch) / 4;
  static_assert(offsetof(Call, epoch) == 0);
  uint64_t calls = 0;  // loaded while the call is copied
  if (threadIdx.x == 0) calls = P::load_relaxed(&args.call.control()->calls.value);
  const auto* from = reinterpret_cast<const uint32_t*>(&args.call);
  auto* to = reinterpret_cast<uint32_t*>(&s.call);
  for (uint32_t i = kEpochWords + threadIdx.x; i < sizeof(Call) / 4; i += kFewThreads) to[i] = from[i];
  if (threadIdx.x == kFewThreads - 1) init_pipeline(s.pipeline);
  if (threadIdx.x == 0) {
    s.failed = s.wrong = 0;
    s.trace_events = 0;
    if (args.call.shape.local_experts != 0) {
      prefetch_map(&args.gate_up);
      prefetch_map(&args.down);
    }
    s.call.epoch = calls + 1;
  }
  __syncthreads();
}

// Warps 0 and 1 of the block in the middle of the grid. With enough blocks, it computes no logits and builds no
// packets, which a release to peers would delay by some microseconds.
__device__ __forceinline__ void announce(const Block& b) {
  if (blockIdx.x != gridDim.x / 2) return;
  const Call& c = b.c;
  if (b.warp() == 0) {
    announce_own<P>(c);
    // For the next call, which may be the general kernel's.
    clear_tickets<P>(c);
  } else if (b.warp() == 1) {
    announce_to_peers<P>(c);
  }
}

}  // namespace few

// The kernel of a rank of a group.
struct InGroup {
  template <class Dtype, Activation kActivation, bool kTrace>
  static __device__ __forceinline__ void run(const KernelArgs& args, FewShared& s) {
    few::begin_call(args, s);
    const few::Block b{args, s.call, s, s.routing, s.call.epoch};
    if (b.epoch == 0) return;  // see leave()
    const Tracer<kTrace, kFewThreads> trace{args, s.trace_events, s.trace_starts};
    trace.begin();
    few::announce(b);
    few::for_own_token_blocks(b, [&](uint32_t n) { few::Format<Dtype>::send_rows(b, n); });
    if (args.topk_ids == nullptr && b.c.shape.tokens != 0) few::compute_logits<typename Scores<Dtype>::Type>(b);
    trace.end(Phase::kGate, blockIdx.x, 0);
    if (few::builds_packets(b)) few::list_slots(b);
    bool ok = few::exchange<Dtype>(b);
    trace.end(Phase::kDispatch, blockIdx.x, 0);
    if (ok) ok = few::compute<Dtype, kActivation>(b, trace);
    if (threadIdx.x != 0) return;
    trace.finish();
    if (ok) return;
    if (s.fault.kind != FaultKind::kNone) post_fault<Platform>(b.c, s.fault);
    leave(args, b.c, b.epoch);
  }
};

}  // namespace flashmoe::sm90

// The layer of a few tokens on a rank of a group whose memory is mapped: the kernel of sm90/few.cuh with the protocol's packets
// in place of its routing, and its returns in place of its meeting.
//
// What goes between ranks, and when, is what the general kernel writes and awaits (docs/protocol.md): to the others it is
// the same rank. It has none of its actors; what one of them would do is done by
//   announcing    block 0 to this rank, the last block to the others, first of all
//   packets       a token block each, by the last blocks: rows to all ranks, while logits are computed (few_send.cuh); then the
//                 choice, and entries, offsets and the signal (few_packets.cuh)
//   arrival       warp 0 of every block, until all packets of all ranks are here; each block lists its rank's rows for itself
//   returning     the consumers, as they compute rows; who counts the last block signals all groups to all ranks
//   combining     blocks that have sums to make await all returns
// Block 0's waits are the rank's OS actor: they keep its heartbeat, watch the others', and name who does not come.
//
// Only results that go home as rows, and sums in the general kernel's order: so every bit is that of any other way; but for
// experts in e4m3 (docs/fp8.md).
#pragma once

#include "flashmoe/actors/os.h"
#include "flashmoe/sm90/few.cuh"
#include "flashmoe/sm90/few_packets.cuh"
#include "flashmoe/sm90/few_send.cuh"

namespace flashmoe::sm90 {
namespace few {

// What a wait that expired has awaited from a rank. (What Subscriber::missing() says; to share it changes the general kernel.)
__device__ __forceinline__ Fault missing_signal(const Call& c, FaultKind kind, uint32_t from, uint32_t index,
                                                const uint64_t* signal) {
  return {.kind = kind,
          .actor = Actor::kOs,
          .awaited = from,
          .index = index,
          .expected = c.epoch,
          .seen = Signal::epoch(P::load_relaxed(signal))};
}

// One warp of each block: until step() says that what other ranks send is here. missing(): what is not, by one lane. False,
// to all lanes, if the call is over.
template <class StepFn, class Missing>
__device__ __forceinline__ bool wait_for_ranks(const Block& b, StepFn&& step, Missing&& missing) {
  const Call& c = b.c;
  WaitEnd end;
  if (blockIdx.x != 0) {
    end = wait_until<P>(c, step, OsLiveness<P>{c}, 1);
  } else {
    Status* const own = c.status(c.rank);
    uint64_t heartbeat = own->heartbeat, progress = own->progress;  // nobody else writes them
    GroupLiveness<P> group(c, b.s.seen);
    auto step_of_os = [&] {
      const Step s = step();
      if (P::lane() == 0) {
        P::store_relaxed(&own->heartbeat, ++heartbeat, kSystem);
        if (s != Step::kIdle) P::store_relaxed(&own->progress, ++progress, kSystem);
      }
      if (s == Step::kIdle) peer_faulted<P>(c);
      return s;
    };
    end = wait_until<P>(c, step_of_os, group, 1);
    if (end == WaitEnd::kExpired && P::lane() == 0) {
      Fault fault = missing();
      fault.culprit = group.culprit(fault.awaited);
      post_fault<P>(c, fault);
    }
  }
  if (end == WaitEnd::kDone) return true;
  if (P::lane() == 0) {
    fail(b, {.kind = end == WaitEnd::kExpired && blockIdx.x != 0 ? FaultKind::kLocal : FaultKind::kNone});
  }
  return false;
}

// Warp 0: until all packets of all ranks are here. False if the call is over.
__device__ __forceinline__ bool await_packets(const Block& b) {
  const Call& c = b.c;
  Arrivals<P, kPacketsOfLane, 8> arrivals(c, b.s.packets.sources);
  auto step = [&] {
    const bool moved = arrivals.step([](uint32_t, uint32_t, uint32_t) {}, [](uint32_t) {});
    if (const uint32_t p = arrivals.stranger(); p < c.shape.ranks && blockIdx.x == 0 && P::lane() == 0) {
      post_fault<P>(c, {.kind = FaultKind::kDisagree, .actor = Actor::kOs, .awaited = p, .culprit = p});
    }
    return arrivals.complete() ? Step::kDone : moved ? Step::kProgress : Step::kIdle;
  };
  auto missing = [&] {
    for (uint32_t p = 0; p < c.shape.ranks; ++p) {
      const Source& s = b.s.packets.sources[p];
      if (s.blocks == Source::kUnheard)
        return missing_signal(c, FaultKind::kCallSignal, p, 0, c.call_signal(c.rank, p));
      if (s.next < s.blocks)
        return missing_signal(c, FaultKind::kPacket, p, s.next, c.packet_signal(c.rank, p, s.next));
    }
    return missing_signal(c, FaultKind::kLocal, c.rank, 0, c.call_signal(c.rank, c.rank));
  };
  return wait_for_ranks(b, step, missing);
}

// Fills the routing, from all ranks' packets. False if the call is over.
template <class Dtype>
__device__ __forceinline__ bool exchange(const Block& b) {
  bool ok = true;
  for_own_token_blocks(b, [&](uint32_t n) { ok = ok && send_packets<Dtype>(b, n); });
  if (!all_well(b)) return false;
  if (b.warp() == 0 && await_packets(b)) number_packets(b);
  if (!all_well(b)) return false;
  take_packets<Dtype>(b);
  return true;
}

// All threads, when the block has stored what it has of results. The last block tells all ranks that theirs are there:
// what the others stored it has acquired with the count, and its signals release.
__device__ __forceinline__ void count_block(const Block& b) {
  const Call& c = b.c;
  bool last = false;
  if (threadIdx.x == 0) last = P::fetch_add_acq_rel(&c.control()->met.value, uint64_t{1}) + 1 == gridDim.x;
  if (__syncthreads_or(static_cast<int>(last)) == 0) return;
  const uint32_t groups = c.policy.groups;
  for (uint32_t i = threadIdx.x; i < c.shape.ranks * groups; i += kFewThreads) {
    signal_home<P>(c, (c.rank + i / groups) % c.shape.ranks, i % groups);
  }
  for (uint32_t u = threadIdx.x; u < b.routing.units; u += kFewThreads)
    *c.few_done(u) = 0;  // nobody reads them any more
}

// Warp 0: until all that this rank's tokens get back is here.
__device__ __forceinline__ void await_returns(const Block& b) {
  const Call& c = b.c;
  const uint32_t groups = c.policy.groups, all = c.shape.ranks * groups;
  auto signal = [&](uint32_t i) { return c.return_signal(c.rank, i / groups, i % groups); };
  auto step = [&] {
    bool here = true;
    for (uint32_t i = P::lane(); i < all; i += P::kLanes) {
      here &= Signal::epoch(P::load_acquire(signal(i), kSystem)) == c.epoch;
    }
    return P::ballot(!here) == 0 ? Step::kDone : Step::kIdle;
  };
  auto missing = [&] {
    uint32_t i = 0;
    while (i + 1 < all && Signal::epoch(P::load_relaxed(signal(i))) == c.epoch) ++i;
    return missing_signal(c, FaultKind::kReturn, i / groups, i % groups, signal(i));
  };
  wait_for_ranks(b, step, missing);
}

// All warps of the blocks that have some of it: the sums of tokens' returned rows, 16 bytes of an output row a lane.
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

// Behind exchange(). False if the call is over.
template <class Dtype, Activation kActivation, class Trace>
__device__ __forceinline__ bool compute(const Block& b, const Trace& trace) {
  run_tasks<Dtype, kActivation>(b, trace);
  trace.begin(1);
  if (!all_well(b)) return false;
  count_block(b);
  const uint32_t sums = b.c.shape.hidden * Dtype::kBytes / 16 * b.c.shape.tokens;
  if (blockIdx.x * P::kLanes >= sums) return true;  // a rank without tokens awaits nothing
  if (b.warp() == 0) await_returns(b);
  if (!all_well(b)) return false;
  trace.begin();
  sum_returned<Dtype>(b);
  trace.end(Phase::kCombine, blockIdx.x, 0);
  trace.end(Phase::kReturn, blockIdx.x, 0, 1);
  return true;
}

// All threads, first of all: this block's copy of the call, with its epoch. 0: an earlier call failed.
__device__ __forceinline__ void copy_call(const KernelArgs& args, FewShared& s) {
  const auto* from = reinterpret_cast<const uint32_t*>(&args.call);
  auto* to = reinterpret_cast<uint32_t*>(&s.call);
  for (uint32_t i = threadIdx.x; i < sizeof(Call) / 4; i += kFewThreads) to[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0) s.call.epoch = P::load_relaxed(&args.call.control()->calls.value) + 1;
}

// One warp of block 0, and one of the last.
__device__ __forceinline__ void announce(const Block& b) {
  const Call& c = b.c;
  if (blockIdx.x == 0) {
    announce_own<P>(c);
    // The next call's, which may be the general kernel's.
    if (P::lane() == 0) P::store_relaxed(&c.control()->reduces[c.parity() ^ 1].value, uint64_t{0});
  }
  if (blockIdx.x + 1 == gridDim.x) announce_to_peers<P>(c);
}

}  // namespace few

template <class Dtype, Activation kActivation, bool kTrace>
__device__ __forceinline__ void run_few_in_group(const KernelArgs& args, FewShared& s) {
  few::copy_call(args, s);
  if (threadIdx.x == 0) {
    s.failed = 0;
    s.trace_events = 0;
    if (args.call.shape.local_experts != 0) {
      prefetch_map(&args.gate_up);
      prefetch_map(&args.down);
    }
    few::init_pipeline(s.pipeline);
  }
  __syncthreads();
  const few::Block b{args, s.call, s, s.routing, s.call.epoch};
  if (b.epoch == 0) return;  // see leave()
  const Tracer<kTrace, kFewThreads> trace{args, s.trace_events, s.trace_starts};
  trace.begin();
  if (b.warp() == 0) few::announce(b);
  few::for_own_token_blocks(b, [&](uint32_t n) { few::send_rows<Dtype>(b, n); });
  if (args.topk_ids == nullptr && b.c.shape.tokens != 0) few::compute_logits<typename Scores<Dtype>::Type>(b);
  if (threadIdx.x == kFewThreads - 1) few::fetch_first_weights<Dtype, is_gated(kActivation)>(b);
  trace.end(Phase::kGate, blockIdx.x, 0);
  bool ok = few::exchange<Dtype>(b);
  trace.end(Phase::kDispatch, blockIdx.x, 0);
  if (ok) ok = few::compute<Dtype, kActivation>(b, trace);
  __syncthreads();
  if (threadIdx.x != 0) return;
  trace.finish();
  if (s.failed != 0 && s.fault.kind != FaultKind::kNone) post_fault<Platform>(b.c, s.fault);
  if (blockIdx.x == 0 && ok) Platform::store_release(&b.c.status(b.c.rank)->left, b.epoch, kSystem);
  leave(args, b.c, b.epoch);
}

}  // namespace flashmoe::sm90

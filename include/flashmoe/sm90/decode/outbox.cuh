// Builds and sends the packets of a few tokens among several ranks (sm90/decode/group.cuh). Some thread blocks do this,
// one token block at a time. The packets are those that protocol/packet.h makes. Here one warp for each destination
// counts and places the choices, and stores them directly to the destination. With so few choices there is no need for
// a team's meetings, or for a copy in the workspace.
//
// All threads of the last blocks run it. It counts in FewOutbox, in shared memory. It stores offsets, entries and
// signals to the heaps of all ranks. It stores to the own workspace what the host reads of the routing, and to the own
// heap the return rows of choices without an expert. It adds to the output `load`.
#pragma once

#include "flashmoe/protocol/packet.h"
#include "flashmoe/sm90/decode/routing.cuh"
#include "flashmoe/sm90/decode/send.cuh"

namespace flashmoe::sm90::few {

// All threads, before a block barrier that comes before the first packet: notes each expert's slot.
__device__ __forceinline__ void list_slots(const Block& b) {
  const CallPlacement& placement = b.c.placement;
  FewOutbox& to = b.s.peers.outbox;
  const uint32_t slots = placement.owner_base[b.c.shape.ranks];
  for (uint32_t q = threadIdx.x; q <= b.c.shape.ranks; q += kFewThreads) {
    to.base[q] = static_cast<uint16_t>(placement.owner_base[q]);
  }
  for (uint32_t slot = threadIdx.x; slot < slots; slot += kFewThreads) {
    const uint32_t expert = placement.by_owner[slot];
    if (expert != kElsewhere) to.slot[expert] = static_cast<uint16_t>(slot);
  }
}

// All threads, after a block barrier: checks the given routing, because a wrong expert would make the block write
// outside of a packet. (spoil_given() then takes all experts from a token with a wrong choice.)
__device__ __forceinline__ void check_given(const Block& b, uint32_t n) {
  const Call& c = b.c;
  const uint32_t top_k = c.shape.top_k, first = n << c.policy.log2_block;
  const int32_t* const ids = b.routing.ids + first * top_k;
  for (uint32_t i = threadIdx.x; i < c.tokens_in_block(n) * top_k; i += kFewThreads) {
    if (is_wrong(b, i - i % top_k, i, ids[i], [&](uint32_t j) { return ids[j]; })) b.s.wrong = 1;
  }
}

// One warp: sends the packet of token block n to rank q, except its rows. Returns how many entries the packet has.
__device__ __forceinline__ uint32_t send_entries(const Block& b, uint32_t n, uint32_t q) {
  const Call& c = b.c;
  FewOutbox& s = b.s.peers.outbox;
  const uint32_t top_k = c.shape.top_k, first = n << c.policy.log2_block, choices = c.tokens_in_block(n) * top_k;
  const int32_t* const ids = b.routing.ids + first * top_k;
  const float* const weights = b.routing.weights + first * top_k;
  const uint32_t begin = s.base[q], owned = s.base[q + 1] - begin;
  uint16_t* const count = s.count + begin;
  for (uint32_t l = P::lane(); l < owned; l += P::kLanes) count[l] = 0;
  P::sync();
  // The local expert on rank q of choice i; `owned` or more if the choice's expert is not one of rank q's.
  auto local = [&](uint32_t i) { return i < choices && ids[i] >= 0 ? s.slot[ids[i]] - begin : ~0u; };
#pragma unroll 1
  for (uint32_t base = 0; base < choices; base += P::kLanes) {
    const uint32_t i = base + P::lane(), l = local(i);
    const bool here = l < owned;
    bool last;
    const uint32_t rank = P::rank_among_equal(l, here, last), place = here ? count[l] + rank : 0;
    P::sync();
    if (here) s.place[i] = static_cast<uint16_t>(place);
    if (here && last) count[l] = static_cast<uint16_t>(place + 1);
    P::sync();
  }
  uint16_t* const offsets = c.packet_offsets(q, c.rank, n);
  uint32_t entries = 0;
#pragma unroll 1
  for (uint32_t base = 0; base < owned; base += P::kLanes) {
    const uint32_t l = base + P::lane();
    uint32_t total;
    const auto start = static_cast<uint16_t>(entries + P::exclusive_scan(l < owned ? count[l] : 0u, total));
    if (l < owned) offsets[l] = count[l] = start;
    entries += total;
  }
  if (P::lane() == 0) offsets[owned] = static_cast<uint16_t>(entries);
  P::sync();
  Entry* const to = c.packet_entries(q, c.rank, first);
#pragma unroll 1
  for (uint32_t i = P::lane(); i < choices; i += P::kLanes) {
    const uint32_t l = local(i);
    if (l < owned) to[count[l] + s.place[i]] = {first + i / top_k, static_cast<uint16_t>(i % top_k), 0, weights[i]};
  }
  return entries;
}

// All threads: stores what the host reads of the token block's routing. Also fills the return rows of choices without
// an expert, which no rank returns. Blocks that make sums read these rows after all blocks have stored theirs.
template <class Dtype>
__device__ __forceinline__ void report_choices(const Block& b, uint32_t n) {
  const Call& c = b.c;
  const uint32_t top_k = c.shape.top_k, first = n << c.policy.log2_block;
  for (uint32_t i = threadIdx.x; i < c.tokens_in_block(n) * top_k; i += kFewThreads) {
    const uint32_t p = first * top_k + i, token = first + i / top_k, k = i % top_k;
    const int32_t id = b.routing.ids[p];
    c.weights(token)[k] = b.routing.weights[p];
    c.routing(token)[k] = id >= 0 ? id : recorded_without_row(id);
    if (id >= 0) {
      if (b.args.load != nullptr) P::add(&b.args.load[id], uint64_t{1});
      continue;
    }
    auto* const row = reinterpret_cast<uint4*>(c.return_row(c.rank, token, k));
    const uint4 filled = filled_chunk<Dtype>(id == ExpertId::kBad);
#pragma unroll 1
    for (uint32_t at = 0; at < c.memory.return_row_bytes / 16; ++at) row[at] = filled;
  }
}

// All warps: choose the experts of token block n, and send its packets, whose rows are already on their way. False if
// the call is over.
template <class Dtype>
__device__ __forceinline__ bool send_packets(const Block& b, uint32_t n) {
  const Call& c = b.c;
  const uint32_t first = n << c.policy.log2_block, at = first * c.shape.top_k;
  if (b.args.topk_ids != nullptr) {
    copy_given<Dtype, kFewThreads>(b.args, c, n, b.routing.ids + at, b.routing.weights + at);
    __syncthreads();
    check_given(b, n);
  } else {
    choose(b, {first, 1, c.tokens_in_block(n)});
  }
  if (!all_well(b)) return false;  // now all threads have stored their rows, and all choices are made
  spoil_given(b, first, c.tokens_in_block(n));
  // The last warps send first, since warp 0 goes on to await packets.
  for (uint32_t i = kFewWarps - 1 - b.warp(); i < c.shape.ranks; i += kFewWarps) {
    const uint32_t q = (c.rank + i) % c.shape.ranks, entries = send_entries(b, n, q);
    P::sync();
    if (P::lane() == 0) signal_packet<P>(c, q, n, entries);
  }
  report_choices<Dtype>(b, n);
  return true;
}

}  // namespace flashmoe::sm90::few

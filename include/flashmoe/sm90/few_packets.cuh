// The packets of a few tokens among several ranks (sm90/few_group.cuh): built for every rank by some thread blocks, and
// taken apart by all, each for itself, into units of rows.
#pragma once

#include "flashmoe/actors/sender.h"
#include "flashmoe/sm90/few_routing.cuh"

namespace flashmoe::sm90::few {

// All warps of a block, which build a token block's packets. They meet where __syncthreads() does.
using Builders = TeamPlatform<kFewWarps, 0>;

// ---- out ------------------------------------------------------------------------------------------------------------

// All warps: chooses for the tokens of token block n, and builds and signals its packets, a destination a warp. False if
// the call is over.
template <class Dtype>
__device__ __forceinline__ bool send_packets(const Block& b, uint32_t n) {
  const Call& c = b.c;
  const uint32_t first = n << c.policy.log2_block;
  auto& memory = b.s.scratch.packets;
  PacketScratch packets;
  packets.ids = b.routing.ids + first * c.shape.top_k;
  packets.weights = b.routing.weights + first * c.shape.top_k;
  packets.place = memory.place;
  packets.count = memory.count;
  packets.start = memory.start;
  packets.entries = memory.entries;
  packets.bad = &memory.bad;
  packets.owner = memory.owner;
  if (b.args.topk_ids != nullptr) {
    copy_given<Dtype, kFewThreads>(b.args, c, n, packets.ids, packets.weights);
  } else {
    choose(b, {first, 1, c.tokens_in_block(n)});
  }
  if (!all_well(b)) return false;  // and the logits are read, in whose place packets are built
  for (uint32_t e = threadIdx.x; e < c.shape.experts; e += kFewThreads) memory.owner[e] = c.placement.owner[e];
  if (!build_packets<Builders>(c, n, packets, b.args.load)) {
    if (threadIdx.x == 0) fail(b, {});  // posted
    return all_well(b);
  }
  Builders::team_sync();
  for (uint32_t i = b.warp(); i < c.shape.ranks; i += kFewWarps) {
    const uint32_t q = (c.rank + i) % c.shape.ranks, entries = memory.entries[q];
    if (q != c.rank) {
      copy_words<P>(c.packet_offsets(q, c.rank, n), c.out_offsets(q, n), c.owned(q) + 1);
      copy_entries<P>(c.packet_entries(q, c.rank, first), c.out_entries(q, first), entries);
    }
    P::sync();
    if (P::lane() == 0) signal_packet<P>(c, q, n, entries);
  }
  Builders::team_sync();  // another token block's logits may come
  return true;
}

// ---- in -------------------------------------------------------------------------------------------------------------

// One warp, once all packets of all ranks are here: numbers them, and their entries.
__device__ __forceinline__ void number_packets(const Block& b) {
  FewPackets& s = b.s.packets;
  const uint32_t ranks = b.c.shape.ranks;
  uint32_t packets = 0, entries = 0;
  for (uint32_t p = 0; p < ranks; ++p) packets += s.sources[p].blocks;
  for (uint32_t base = 0; base < packets; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    uint32_t p = 0, n = i, total;
    while (p < ranks && n >= s.sources[p].blocks) n -= s.sources[p++].blocks;
    const bool exists = p < ranks;
    const uint32_t first = entries + P::exclusive_scan(exists ? b.c.packet_size(p, n) : 0u, total);
    if (exists) {
      s.source[i] = static_cast<uint16_t>(p);
      s.block[i] = static_cast<uint16_t>(n);
      s.first[i] = static_cast<uint16_t>(first);
    }
    entries += total;
  }
  if (P::lane() != 0) return;
  s.count = packets;
  s.first[packets] = static_cast<uint16_t>(entries);
}

// All threads: offsets and entries, to where they are quick to read.
__device__ __forceinline__ void read_packets(const Block& b) {
  FewPackets& s = b.s.packets;
  const Call& c = b.c;
  const uint32_t pitch = c.shape.local_experts + 1;
  for (uint32_t i = threadIdx.x; i < s.count * pitch; i += kFewThreads) {
    const uint32_t packet = i / pitch;
    s.offsets[i] = c.packet_offsets(c.rank, s.source[packet], s.block[packet])[i % pitch];
  }
  for (uint32_t i = threadIdx.x; i < s.first[s.count]; i += kFewThreads) {
    uint32_t packet = 0;  // the last whose first entry is not behind this one
    for (uint32_t end = s.count; end - packet > 1;) {
      const uint32_t middle = (packet + end) / 2;
      (s.first[middle] <= i ? packet : end) = middle;
    }
    const uint32_t p = s.source[packet];
    const Entry* const from = c.packet_entries(c.rank, p, c.packet_first_token(p, s.block[packet]));
    const Entry entry = from[i - s.first[packet]];
    s.tokens[i] = entry.token;
    s.choices[i] = entry.k;
    s.weights[i] = entry.weight;
  }
}

// One warp: gives the entries of local expert l their rows, packet by packet.
__device__ __forceinline__ void place_rows(const Block& b, uint32_t l) {
  const FewPackets& s = b.s.packets;
  const uint32_t pitch = b.c.shape.local_experts + 1;
  uint32_t row = b.s.scratch.groups.first[l];
  for (uint32_t base = 0; base < s.count; base += P::kLanes) {
    const uint32_t packet = base + P::lane();
    uint32_t begin = 0, entries = 0, total;
    if (packet < s.count) {
      begin = s.offsets[packet * pitch + l];
      entries = s.offsets[packet * pitch + l + 1] - begin;
    }
    uint32_t to = row + P::exclusive_scan(entries, total);
    for (uint32_t i = 0; i < entries; ++i, ++to) {
      const uint32_t from = s.first[packet] + begin + i;
      b.routing.ids[to] = SentRow{s.source[packet], s.tokens[from], s.choices[from]}.pack();
      b.routing.weights[to] = s.weights[from];
      b.routing.choice[to] = static_cast<uint16_t>(to);
    }
    row += total;
  }
}

// All threads, behind number_packets() and a meeting: fills the routing. The rows of an expert are by source and token.
template <class Dtype>
__device__ __forceinline__ void take_packets(const Block& b) {
  const FewPackets& s = b.s.packets;
  const uint32_t experts = b.c.shape.local_experts, pitch = experts + 1;
  read_packets(b);
  if (experts == 0 && threadIdx.x == 0) b.routing.rows = b.routing.units = 0;
  __syncthreads();
  for (uint32_t l = threadIdx.x; l < experts; l += kFewThreads) {
    uint32_t rows = 0;
    for (uint32_t packet = 0; packet < s.count; ++packet) {
      rows += s.offsets[packet * pitch + l + 1] - s.offsets[packet * pitch + l];
    }
    b.s.scratch.groups.rows[l] = static_cast<uint16_t>(rows);
  }
  __syncthreads();
  number_units<Dtype>(b);
  __syncthreads();
  for (uint32_t l = b.warp(); l < experts; l += kFewWarps) place_rows(b, l);
  fence_proxy_async_shared();  // the copy engine writes where all this was
  __syncthreads();
}

}  // namespace flashmoe::sm90::few

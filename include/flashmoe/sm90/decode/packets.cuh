// Waits for the packets of a few tokens among several ranks (sm90/decode/group.cuh), and takes them apart into units of
// rows. Every thread block does this for itself.
//
// Warp 0 waits, then all threads read. They read the own heap: signals of calls and packets, offsets and entries. They
// write shared memory: FewPackets, then FewRouting. Only a fault that block 0 finds goes to peers.
#pragma once

#include "flashmoe/sm90/decode/routing.cuh"
#include "flashmoe/sm90/decode/waits.cuh"

namespace flashmoe::sm90::few {

// Warp 0: waits until all ranks have begun the call, and lists the packets that they send. False if the call is over.
__device__ __forceinline__ bool await_calls(const Block& b) {
  static_assert(kMaxRanks <= P::kLanes);
  const Call& c = b.c;
  FewPackets& s = b.s.peers.packets;
  const uint32_t p = P::lane();
  const bool exists = p < c.shape.ranks;
  // Whether rank p computes the same call. If not, its call signal is not accepted, because its packets would be
  // misread.
  auto agrees = [&] {
    if (c.call_config(c.rank, p)->hash == c.config.hash) return true;
    if (blockIdx.x == 0) {
      post_fault<P>(c, {.kind = FaultKind::kDisagree, .actor = Actor::kOs, .awaited = p, .culprit = p});
    }
    return false;
  };
  uint32_t payload = 0;
  if (!await_signals(b, {exists ? c.call_signal(c.rank, p) : nullptr, FaultKind::kCallSignal, p, 0}, payload, agrees)) {
    return false;
  }
  const uint32_t log2_block = CallPayload::log2_block(payload);
  const uint32_t blocks = exists ? ceil_div(CallPayload::tokens(payload), 1u << log2_block) : 0;
  uint32_t total, i = P::exclusive_scan(blocks, total);
  for (uint32_t n = 0; n < blocks; ++n, ++i) {
    s.source[i] = static_cast<uint16_t>(p);
    s.block[i] = static_cast<uint16_t>(n);
    s.token[i] = static_cast<uint16_t>(n << log2_block);
  }
  if (P::lane() == 0) s.count = total;
  P::sync();
  return true;
}

// Warp 0: waits until all packets of all ranks are here, and numbers their entries. False if the call is over.
__device__ __forceinline__ bool await_packets(const Block& b) {
  if (!await_calls(b)) return false;
  const Call& c = b.c;
  FewPackets& s = b.s.peers.packets;
  uint32_t entries = 0;
#pragma unroll 1
  for (uint32_t base = 0; base < s.count; base += P::kLanes) {
    const uint32_t i = base + P::lane();
    AwaitedSignal awaited{nullptr, FaultKind::kPacket, 0, 0};
    if (i < s.count) {
      awaited.from = s.source[i];
      awaited.index = s.block[i];
      awaited.signal = c.packet_signal(c.rank, awaited.from, awaited.index);
    }
    uint32_t size = 0, total;
    if (!await_signals(b, awaited, size)) return false;
    const uint32_t first = entries + P::exclusive_scan(size, total);
    if (i < s.count) s.first[i] = static_cast<uint16_t>(first);
    entries += total;
  }
  if (P::lane() == 0) s.first[s.count] = static_cast<uint16_t>(entries);
  return true;
}

// The index of the last of `count` values that is at most `at`. The values never fall, and the first is at most `at`.
__device__ __forceinline__ uint32_t last_not_above(const uint16_t* values, uint32_t count, uint32_t at) {
  uint32_t found = 0;
  for (uint32_t end = count; end - found > 1;) {
    const uint32_t middle = (found + end) / 2;
    (values[middle] <= at ? found : end) = middle;
  }
  return found;
}

// All threads: copy offsets and entries to shared memory. One round trip suffices for up to 32 packets for 47 experts
// with 768 entries. Threads count offsets from the first thread on and entries from the last thread on, so that few
// offsets and few entries are read by different warps.
__device__ __forceinline__ void read_packets(const Block& b) {
  constexpr uint32_t kOffsets = 4, kEntries = 2;  // of a thread, on their way together
  FewPackets& s = b.s.peers.packets;
  const Call& c = b.c;
  const uint32_t pitch = c.shape.local_experts + 1, offsets = s.count * pitch, entries = s.first[s.count];
  uint32_t o = threadIdx.x, e = kFewThreads - 1 - threadIdx.x;
#pragma unroll 1
  for (; o < offsets || e < entries; o += kOffsets * kFewThreads, e += kEntries * kFewThreads) {
    uint16_t offset[kOffsets];
    Entry entry[kEntries];
    uint32_t packet[kEntries];
#pragma unroll
    for (uint32_t j = 0; j < kOffsets; ++j) {
      const uint32_t i = o + j * kFewThreads, of = i / pitch;
      if (i < offsets) offset[j] = c.packet_offsets(c.rank, s.source[of], s.block[of])[i % pitch];
    }
#pragma unroll
    for (uint32_t j = 0; j < kEntries; ++j) {
      const uint32_t i = e + j * kFewThreads;
      if (i >= entries) continue;
      packet[j] = last_not_above(s.first, s.count, i);
      entry[j] = c.packet_entries(c.rank, s.source[packet[j]], s.token[packet[j]])[i - s.first[packet[j]]];
    }
#pragma unroll
    for (uint32_t j = 0; j < kOffsets; ++j) {
      if (o + j * kFewThreads < offsets) s.offsets[o + j * kFewThreads] = offset[j];
    }
#pragma unroll
    for (uint32_t j = 0; j < kEntries; ++j) {
      const uint32_t i = e + j * kFewThreads;
      if (i >= entries) continue;
      s.sent[i] = SentRow{s.source[packet[j]], entry[j].token, entry[j].k}.pack();
      s.weights[i] = entry[j].weight;
      s.packet[i] = static_cast<uint16_t>(packet[j]);
    }
  }
}

// All threads: compute how many rows each expert has, and where the rows of each packet are. An expert's rows are
// ordered by source and token, and follow those of the experts before it. The number of an expert's first row is the
// sum of all packets' offsets for it, because a packet's offset is how many of its entries are of experts before.
__device__ __forceinline__ void place_packets(const Block& b) {
  constexpr uint32_t kAtOnce = 4;
  FewPackets& s = b.s.peers.packets;
  const uint32_t experts = b.c.shape.local_experts, pitch = experts + 1;
  for (uint32_t l = threadIdx.x; l < experts; l += kFewThreads) {
    uint32_t first = 0;
#pragma unroll 4
    for (uint32_t packet = 0; packet < s.count; ++packet) first += s.offsets[packet * pitch + l];
    uint32_t row = first;
#pragma unroll 1
    for (uint32_t base = 0; base < s.count; base += kAtOnce) {
      uint32_t begin[kAtOnce], end[kAtOnce];
      auto at = [&](uint32_t j) { return min_of(base + j, s.count - 1) * pitch + l; };
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) begin[j] = s.offsets[at(j)], end[j] = s.offsets[at(j) + 1];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (base + j >= s.count) break;
        s.shift[at(j)] = static_cast<uint16_t>(row - begin[j]);
        row += end[j] - begin[j];
      }
    }
    b.s.scratch.groups.rows[l] = static_cast<uint16_t>(row - first);
  }
}

// All threads, after await_packets() and a block barrier: fills the routing from the packets.
template <class Dtype>
__device__ __forceinline__ void take_packets(const Block& b) {
  const FewPackets& s = b.s.peers.packets;
  const uint32_t experts = b.c.shape.local_experts, pitch = experts + 1;
  read_packets(b);
  if (experts == 0 && threadIdx.x == 0) b.routing.rows = b.routing.units = 0;
  __syncthreads();
  place_packets(b);
  __syncthreads();
  // Entries are counted from the last thread on, so that few entries are handled by the last warps, while the first
  // ones number units.
  for (uint32_t i = kFewThreads - 1 - threadIdx.x; i < s.first[s.count]; i += kFewThreads) {
    const uint32_t packet = s.packet[i], at = i - s.first[packet];
    const uint32_t expert = last_not_above(s.offsets + packet * pitch, experts, at);
    const auto row = static_cast<uint16_t>(s.shift[packet * pitch + expert] + at);
    b.routing.ids[row] = s.sent[i];
    b.routing.weights[row] = s.weights[i];
    b.routing.choice[row] = row;
  }
  number_units<Dtype>(b);
  fence_proxy_async_shared();  // the copy engine will write where the packets were
  __syncthreads();
}

}  // namespace flashmoe::sm90::few

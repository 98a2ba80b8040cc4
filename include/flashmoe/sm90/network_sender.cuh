// Network sender: what RowSender does where peers are not mapped, and the returns besides. All puts of a rank are its
// senders': nobody else waits for the network, and NVSHMEM's code is in one role.
//
// A sender leaves when its puts have arrived: then what they read may be overwritten by the next call, or given to another
// context.
#pragma once

#include "flashmoe/actors/os.h"
#include "flashmoe/gpu/network.cuh"
#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/send.cuh"

namespace flashmoe::sm90 {

// All lanes: a row of a multiple of 16 bytes. kChunks: of 16 bytes that a lane has on their way.
template <uint32_t kChunks>
__device__ __forceinline__ void copy_row(const uint8_t* from, uint8_t* to, uint32_t bytes) {
  using P = Platform;
  constexpr uint32_t kStep = P::kLanes * 16;
  FLASHMOE_NO_UNROLL
  for (uint32_t at = P::lane() * 16; at < bytes; at += kChunks * kStep) {
    uint4 chunk[kChunks];
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k) {
      if (at + k * kStep < bytes) chunk[k] = load_once(from + at + k * kStep);
    }
#pragma unroll
    for (uint32_t k = 0; k < kChunks; ++k) {
      if (at + k * kStep < bytes) *reinterpret_cast<uint4*>(to + at + k * kStep) = chunk[k];
    }
  }
}

// One of `senders` warps. All functions by all lanes; those that return a bool: false if the call was aborted.
template <class Dtype, class Trace>
class NetworkSender {
  using P = Platform;

 public:
  __device__ __forceinline__ NetworkSender(const KernelArgs& args, const Call& call, const Trace& trace)
      : args_(args), c_(call), trace_(trace) {}

  __device__ __forceinline__ void run(uint32_t first, uint32_t senders) {
    const bool announced = first != 0 || announce();
    if (announced && send_packets(first, senders)) send_returns(first, senders);
    network::quiet();  // of a call that failed, too
  }

 private:
  // Later than the OS actor's own, see RowSender: from the copy in the own heap, since that is where puts may read.
  __device__ __forceinline__ bool announce() const {
    if (blockIdx.x < c_.blocks() && !await_routing<P>(c_, blockIdx.x)) return false;
    if (!await_word<P>(c_, c_.call_signal(c_.rank, c_.rank))) return false;
    CallConfig* const config = c_.call_config(c_.rank, c_.rank);
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.ranks; ++i) {
      network::put_signal(config, config, sizeof(CallConfig), c_.call_signal(c_.rank, c_.rank), call_word(c_),
                          (c_.rank + i) % c_.ranks);
    }
    return true;
  }

  // Token blocks first, first + senders, ..., for all ranks: so each row is copied once.
  __device__ __forceinline__ bool send_packets(uint32_t first, uint32_t senders) const {
    const uint32_t blocks = c_.blocks();
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.ranks; ++i) {
      FLASHMOE_NO_UNROLL
      for (uint32_t b = first; b < blocks; b += senders) {
        if (i == 1) {
          if (!await_routing<P>(c_, b)) return false;
          copy_rows(b);
        }
        const uint32_t q = (c_.rank + i) % c_.ranks;
        trace_.begin();
        send_packet(b, q);
        trace_.end(Phase::kDispatch, b, q);
      }
    }
    return true;
  }

  // With more, and NVSHMEM's code in the same loop, kernels spill.
  static constexpr uint32_t kChunks = Dtype::kBytes == 2 ? 4 : 2;

  // The block's rows that any other rank needs, to where puts may read.
  __device__ __forceinline__ void copy_rows(uint32_t b) const {
    const uint32_t first = b << c_.log2_block, tokens = c_.tokens_in_block(b);
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < tokens; base += P::kLanes) {
      const uint32_t t = base + P::lane();
      uint32_t n = 0;
      FLASHMOE_NO_UNROLL
      for (uint32_t q = 0; q < c_.ranks; ++q) {
        if (q != c_.rank && t < tokens) n |= c_.out_counts(q, first)[t];
      }
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0; left &= left - 1) {
        const uint32_t token = first + base + lowest_bit<P>(left);
        copy_row<kChunks>(args_.x + token * args_.x_row_bytes, c_.out_row(token), c_.token_row_bytes);
      }
    }
    P::sync();
  }

  // Rows that follow one another in one put: with many experts per token, most tokens go to every rank.
  __device__ __forceinline__ void send_packet(uint32_t b, uint32_t q) const {
    const uint32_t first = b << c_.log2_block, tokens = c_.tokens_in_block(b);
    const uint32_t slot = peer_slot(c_.rank, q, c_.ranks);
    uint32_t mine = 0, entries;
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < tokens; base += P::kLanes) {
      const uint32_t t = base + P::lane();
      const uint32_t n = t < tokens ? c_.out_counts(q, first)[t] : 0;
      mine += n;
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0;) {
        const uint32_t begin = lowest_bit<P>(left), token = first + base + begin;
        const uint32_t end = begin + lowest_bit<P>(~(left >> begin));
        const uint8_t* const last = c_.out_row(token + end - begin - 1);
        network::put(c_.heap<uint8_t>(c_.rank, HeapField::kRows, slot, token), c_.out_row(token),
                     static_cast<uint32_t>(last - c_.out_row(token)) + c_.token_row_bytes, q);
        left = end >= P::kLanes ? 0 : left >> end << end;
      }
    }
    P::exclusive_scan(mine, entries);
    network::put(c_.packet_counts(c_.rank, c_.rank, first), c_.out_counts(q, first), tokens * sizeof(uint16_t), q);
    if (entries != 0) {
      network::put(c_.packet_entries(c_.rank, c_.rank, first), c_.out_entries(q, first), entries * sizeof(Entry), q);
    }
    network::fence();
    network::put_signal(c_.packet_offsets(c_.rank, c_.rank, b), c_.out_offsets(q, b),
                        (c_.owned(q) + 1) * sizeof(uint16_t), c_.packet_signal(c_.rank, c_.rank, b),
                        Signal::make(c_.epoch, entries), q);
  }

  // A rank's tokens 32 at a time go round the senders; whoever is the last to know that its rows have arrived signals.
  __device__ __forceinline__ bool send_returns(uint32_t first, uint32_t senders) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.ranks; ++i) {
      const uint32_t p = (c_.rank + i) % c_.ranks;
      if (!await_word<P>(c_, c_.call_signal(c_.rank, p))) return false;
      const uint32_t tokens = c_.tokens_of(p);
      if (tokens == 0) continue;  // it awaits nothing, and nobody says that it is owed something
      if (!await_word<P>(c_, c_.returns_ready(p))) return false;
      trace_.begin();
      send_rows(p, tokens, first * P::kLanes, senders * P::kLanes);
      network::quiet();
      if (P::lane() == 0 && P::fetch_add_acq_rel(c_.returns_sent(p), 1u) + 1 == senders) {
        P::store_relaxed(c_.returns_sent(p), 0u);
        network::signal(c_.return_signal(c_.rank, c_.rank, 0), Signal::make(c_.epoch, 0), p);
      }
      P::sync();
      trace_.end(Phase::kReduce, first, p << 8);
    }
    return true;
  }

  // The sums for those of p's tokens that have rows here.
  __device__ __forceinline__ void send_rows(uint32_t p, uint32_t tokens, uint32_t first, uint32_t step) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t base = first; base < tokens; base += step) {
      const uint32_t t = base + P::lane();
      const uint32_t n = t < tokens ? c_.packet_counts(c_.rank, p, 0)[t] : 0;
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0; left &= left - 1) {
        const uint32_t token = base + lowest_bit<P>(left);
        network::put(c_.return_row(c_.rank, token, c_.rank), c_.staged_row(p, token, 0), c_.return_row_bytes, p);
      }
    }
  }

  const KernelArgs& args_;
  const Call& c_;
  const Trace& trace_;
};

// Sends this rank's own fault to the others, if it posts one. One warp, all lanes. The OS actor is the last that may: while it
// awaits what others return.
__device__ __forceinline__ void tell_fault(const Call& c) {
  using P = Platform;
  wait_until<P>(
      c,
      [&] {
        if (P::broadcast(P::poll(&c.status(c.rank)->left, kDevice), 0) == c.epoch) return Step::kDone;
        __nanosleep(500);
        return Step::kIdle;
      },
      OsLiveness<P>{c});
  FaultRecord* const own = c.fault(c.rank, c.rank);
  P::load_acquire(&c.control()->abort.value, kDevice);  // set after the record
  if (P::broadcast(P::load_acquire(&own->posted, kSystem), 0) == 0) return;
  P::sync();
  // A disagreement is worded from both configurations, and this rank may not have come to announce its own.
  CallConfig* const config = c.call_config(c.rank, c.rank);
  const bool begun = Signal::epoch(P::broadcast(P::load_acquire(c.call_signal(c.rank, c.rank), kDevice), 0)) == c.epoch;
  FLASHMOE_NO_UNROLL
  for (uint32_t i = 1; i < c.ranks; ++i) {
    if (begun) network::put(config, config, sizeof(CallConfig), (c.rank + i) % c.ranks);
    network::fence();
    network::put_signal(&own->fault, &own->fault, sizeof(Fault), &own->posted, 1, (c.rank + i) % c.ranks);
  }
  network::quiet();
}

}  // namespace flashmoe::sm90

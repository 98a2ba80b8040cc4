// Send: a rank's rows to the other ranks that hold one of their experts, and the signals that complete their packets.
//
// By all warps of some blocks, before they compute. Not by a warp of each, although that would be free while the own rows
// are computed: a block's first stores to a peer take 0.1 ms, and its loads wait behind them. So nearly all blocks had no
// task until 0.16 ms into the call. And by the copy engine, through the stages, which are free until then: a few blocks keep
// as much on its way as fills the link.
//
// Destination after destination, each rank beginning with the one behind it: so a rank hears from one rank at a time, and
// early, instead of from all at the end. And a packet's rows by several warps, one packet after the other: were each packet
// one warp's, all would be complete at the same time, late, and until then there would be no tile of theirs.
#pragma once

#include "flashmoe/actors/os.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/sm90/barrier.cuh"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/tma.cuh"

namespace flashmoe::sm90 {

// Of a sender, all lanes: waits until a word of the own heap or workspace is of this call. False if the call was aborted. What
// is behind it is acquired where this rank's own actors wrote it; of a peer's word, what the word itself says.
__device__ __forceinline__ bool await_word(const Call& c, const uint64_t* word) {
  using P = Platform;
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        if (Signal::epoch(P::broadcast(P::poll(word, kDevice), 0)) == c.epoch) return Step::kDone;
        __nanosleep(500);
        return Step::kIdle;
      },
      OsLiveness<P>{c});
  P::acquire(word, kDevice);
  P::sync();
  return end == WaitEnd::kDone;
}

// The same for the own packet's signal, which says that the block's routing and entries are written.
__device__ __forceinline__ bool await_routing(const Call& c, uint32_t b) {
  return await_word(c, c.packet_signal(c.rank, c.rank, b));
}

// One warp's copies of rows, by the copy engine through the warp's own shared memory: half of it is loaded while the other
// is stored. A lane without a chunk of its own takes part in the waits.
class RowCopies {
  using P = Platform;

 public:
  // As few chunks as keep the memory full: the engine takes them one by one.
  static constexpr uint32_t kChunkBytes = 2048, kAtOnce = 4;  // of one lane; lanes
  static constexpr uint32_t kBytes = 2 * kAtOnce * kChunkBytes;
  static constexpr uint32_t kBarriers = 2;

  // kBytes of shared memory, and barriers that no other warp uses.
  __device__ __forceinline__ RowCopies(uint32_t memory, uint32_t barriers)
      : memory_(memory + P::lane() % kAtOnce * kChunkBytes), barriers_(barriers) {
    if (P::lane() == 0) {
      for (uint32_t i = 0; i < kBarriers; ++i) barrier_init(barriers + i * 8, kAtOnce);
      fence_barrier_init();
    }
    P::sync();
  }

  // Rows 0 to rows - 1, of `row_bytes`, from from(row) to to(row), which are called by all lanes, each for a row of its own.
  // They are written when it returns. All lanes.
  template <class From, class To>
  __device__ __forceinline__ void copy(uint32_t rows, uint32_t row_bytes, From&& from, To&& to) {
    const uint32_t per_row = ceil_div(row_bytes, kChunkBytes), all = rows * per_row, turns = ceil_div(all, kAtOnce);
    uint8_t* last_to = nullptr;
    uint32_t last_bytes = 0;
    FLASHMOE_NO_UNROLL
    for (uint32_t turn = 0; turn <= turns; ++turn) {
      uint8_t* next_to = nullptr;
      uint32_t next_bytes = 0;
      if (turn < turns) {
        const uint32_t i = turn * kAtOnce + P::lane() % kAtOnce, row = i < all ? i / per_row : 0;
        const uint32_t at = (i - row * per_row) * kChunkBytes;
        const uint8_t* const next_from = from(row) + at;
        next_to = to(row) + at;
        if (P::lane() < kAtOnce) {
          if (i < all) next_bytes = min_of(row_bytes - at, kChunkBytes);
          bulk_wait_read();
          arrive_expect_tx(barrier(turn), next_bytes);
          if (next_bytes != 0) bulk_load(buffer(turn), next_from, next_bytes, barrier(turn));
        }
      }
      if (turn != 0) {
        wait(barrier(turn - 1), (turns_ + turn - 1) / 2 % 2);
        if (last_bytes != 0) bulk_store(last_to, buffer(turn - 1), last_bytes);
        bulk_commit();
      }
      last_to = next_to, last_bytes = next_bytes;
    }
    turns_ += turns;
    bulk_wait();
    P::sync();
  }

 private:
  __device__ __forceinline__ uint32_t buffer(uint32_t turn) const {
    return memory_ + (turns_ + turn) % 2 * (kAtOnce * kChunkBytes);
  }
  __device__ __forceinline__ uint32_t barrier(uint32_t turn) const { return barriers_ + (turns_ + turn) % 2 * 8; }

  const uint32_t memory_, barriers_;
  uint32_t turns_ = 0;  // of earlier copies
};

// One warp's part: of all packets' parts, those of a destination side by side, the parts first, first + step, ... All lanes.
template <class Dtype, class Trace>
class RowSender {
  using P = Platform;

 public:
  __device__ __forceinline__ RowSender(const KernelArgs& args, const Call& call, const RowCopies& copies,
                                       const Trace& trace)
      : args_(args), c_(call), copies_(copies), trace_(trace) {}

  // False if the call was aborted.
  __device__ __forceinline__ bool run(uint32_t first, uint32_t step) {
    if (first == 0 && !announce()) return false;
    const uint32_t parts = ceil_div(c_.block_tokens(), P::kLanes), of_rank = c_.blocks() * parts;
    FLASHMOE_NO_UNROLL
    for (uint32_t i = first; i < of_rank * (c_.ranks - 1); i += step) {
      const uint32_t q = (c_.rank + 1 + i / of_rank) % c_.ranks, b = i % of_rank / parts, part = i % parts;
      if (!await_routing(c_, b)) return false;
      trace_.begin();
      const uint32_t entries = c_.out_offsets(q, b)[c_.owned(q)];
      if (part == 0) copy_packet(b, q, entries);
      copy_rows(b, q, part * P::kLanes);
      P::sync();  // all lanes' writes before the count
      if (P::lane() == 0) count_part(b, q, parts, entries);
      trace_.end(TracePhase::kDispatch, b, q);
    }
    return true;
  }

 private:
  // Once this SM has signalled its own packet: the release would wait for these words, a call's first to its peers, for
  // 0.1 ms. (So would the OS warp's, whenever it publishes tasks.) No peer has use for them sooner.
  __device__ __forceinline__ bool announce() const {
    if (blockIdx.x < c_.blocks() && !await_routing(c_, blockIdx.x)) return false;
    announce_to_peers<P>(c_);
    return true;
  }

  // The rows that rank q needs of the block's 32 tokens from `base` on.
  __device__ __forceinline__ void copy_rows(uint32_t b, uint32_t q, uint32_t base) {
    const uint32_t first = b << c_.log2_block, t = base + P::lane();
    const bool exists = t < c_.tokens_in_block(b);
    const uint32_t n = exists ? c_.out_counts(q, first)[t] : 0;
    if (c_.reduced() && exists) c_.packet_counts(q, c_.rank, first)[t] = static_cast<uint16_t>(n);
    const uint32_t needed = P::ballot(n != 0);
    const uint32_t token = first + base + __fns(needed, 0, static_cast<int>(P::lane() + 1));  // of row lane()
    copies_.copy(
        P::popcount(needed), c_.hidden * Dtype::kBytes,
        [&](uint32_t row) { return args_.x + __shfl_sync(kFullWarp, token, row) * args_.x_row_bytes; },
        [&](uint32_t row) { return c_.dispatched_row(q, c_.rank, __shfl_sync(kFullWarp, token, row)); });
  }

  // Who has sent the last part of a packet signals it. One lane.
  __device__ __forceinline__ void count_part(uint32_t b, uint32_t q, uint32_t parts, uint32_t entries) const {
    if (parts != 1) {
      uint32_t* const sent = c_.out_sent(q, b);
      if (P::fetch_add_acq_rel(sent, 1u) + 1 != parts) return;
      P::store_relaxed(sent, 0u);
    }
    signal_packet<P>(c_, q, b, entries);
  }

  __device__ __forceinline__ void copy_packet(uint32_t b, uint32_t q, uint32_t entries) const {
    const uint32_t first = b << c_.log2_block;
    copy_words(c_.packet_offsets(q, c_.rank, b), c_.out_offsets(q, b), c_.owned(q) + 1);
    static_assert(sizeof(Entry) % 4 == 0);
    copy_words(reinterpret_cast<uint32_t*>(c_.packet_entries(q, c_.rank, first)),
               reinterpret_cast<const uint32_t*>(c_.out_entries(q, first)), entries * (sizeof(Entry) / 4));
  }

  // One word a lane: packets begin anywhere.
  template <class Word>
  __device__ __forceinline__ void copy_words(Word* to, const Word* from, uint32_t n) const {
    constexpr uint32_t kAtOnce = 2;
    FLASHMOE_NO_UNROLL
    for (uint32_t i = P::lane(); i < n; i += kAtOnce * P::kLanes) {
      Word word[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (i + j * P::kLanes < n) word[j] = from[i + j * P::kLanes];
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (i + j * P::kLanes < n) to[i + j * P::kLanes] = word[j];
      }
    }
  }

  const KernelArgs& args_;
  const Call& c_;
  RowCopies copies_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

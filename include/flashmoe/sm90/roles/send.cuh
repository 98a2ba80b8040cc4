// Copies token rows to other ranks whose heaps this GPU has mapped: the engine of a Sender (actors/sender.h). Run by
// all 12 warps of the last blocks of the grid, after the choice of experts and before these warps take their roles.
// Reads this rank's token rows: x, or the rows that dispatch has quantised, with their scales; in a backward pass dY,
// and also x if x is dispatched again.
// Writes, by TMA's bulk copies, the warp's own 16 KiB of the stages (shared memory), and from there rows of other
// ranks' heaps (at Call::dispatched_row). Uses two barriers of the warp's own, Shared::send_barriers. Never touches
// weights, y or the task ring. The Sender, on the same threads, writes the packets' entries, counts and signals to
// the same heaps.
//
// Only some blocks send, because a block's first stores to a peer take 0.1 ms, and its clerk's loads wait behind
// these stores. If a warp of every block sent, nearly all blocks would have no task until 0.16 ms after the call
// begins. Rows go through the stages, because these are free until a block computes. So a few blocks have enough
// bytes in flight to fill the link.
#pragma once

#include "flashmoe/actors/sender.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/machine/barrier.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90 {

// One warp's copies of rows, by the copy engine through the warp's own shared memory: half of it is loaded while the
// other half is stored. The first kAtOnce lanes have a chunk each; the others take part in the waits.
class RowCopies {
  using P = Platform;

 public:
  // A few large chunks that just fill the memory, because the copy engine takes chunks one by one.
  static constexpr uint32_t kChunkBytes = 2048, kAtOnce = 4;  // bytes of a lane's chunk; lanes that have one
  static constexpr uint32_t kBytes = 2 * kAtOnce * kChunkBytes;
  static constexpr uint32_t kBarriers = 2;

  // memory: kBytes of shared memory; barriers: kBarriers barriers. No other warp uses either.
  __device__ __forceinline__ RowCopies(uint32_t memory, uint32_t barriers)
      : memory_(memory + P::lane() % kAtOnce * kChunkBytes), barriers_(barriers) {
    if (P::lane() == 0) {
      for (uint32_t i = 0; i < kBarriers; ++i) barrier_init(barriers + i * 8, kAtOnce);
      fence_barrier_init();
    }
    P::sync();
  }

  // Copies rows 0 .. rows - 1, of `row_bytes` each, from from(row) to to(row). All lanes call from() and to(), each
  // lane for a row of its own. When copy() returns, the rows are written. Run by all lanes.
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
  uint32_t turns_ = 0;  // of all earlier calls of copy()
};

// The GPU's engine of a Sender.
template <class Dtype, class Pass, class Trace>
class RowEngine : public Spans<Trace> {
  using P = Platform;

 public:
  __device__ __forceinline__ RowEngine(const KernelArgs& args, const Call& call, const RowCopies& copies,
                                       const Trace& trace)
      : Spans<Trace>(trace), args_(args), c_(call), copies_(copies) {}

  __device__ __forceinline__ void send_rows(uint32_t q, uint32_t token, uint32_t rows) {
    // Quantised rows were stored by other blocks, through the generic proxy.
    if constexpr (kQuantised<Dtype>) fence_proxy_async_global();
    if constexpr (kInTurn) return Pass::send_rows(args_, c_, copies_, q, token, rows);
    copies_.copy(
        rows, c_.memory.token_row_bytes,
        [&](uint32_t row) -> const uint8_t* {
          if constexpr (kQuantised<Dtype>) return c_.out_row(P::broadcast(token, row));
          return args_.x + P::broadcast(token, row) * args_.x_row_bytes;
        },
        [&](uint32_t row) { return c_.dispatched_row(q, c_.rank, P::broadcast(token, row)); });
  }

 private:
  const KernelArgs& args_;
  const Call& c_;
  RowCopies copies_;
};
static_assert(SendsRows<RowEngine<Bf16, void, Tracer<false, 32>>>);

}  // namespace flashmoe::sm90

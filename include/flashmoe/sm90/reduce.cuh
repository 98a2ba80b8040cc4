// Reduce: the rows that this rank's experts made for a token, summed and sent home as one (COMET, section 3.1). Only with the
// reduced return, and only as far as a token has rows here.
//
// By whatever warps are free: return group by return group, in each the other ranks' tokens before the own. Pieces are
// taken from one counter of the whole GPU, since the last of a (group, source) says that all have gone home: none may lie
// with a block that has no warp free before its last task.
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// Of a warp: the piece that it has taken.
struct ReducePlace {
  uint32_t stage;   // (group, source)
  uint32_t base;    // pieces of the stages before
  uint32_t ticket;  // counts the pieces of all stages
  uint32_t begun, ready;
};

// One warp's part. All functions by all lanes.
template <class Dtype, class Trace>
class Reducer {
  using P = Platform;

 public:
  __device__ __forceinline__ Reducer(const Call& call, PlaceOfWarp<ReducePlace>& place, const Trace& trace)
      : c_(call), place_(place), trace_(trace) {}

  // Whether the next piece's rows are computed: then it is to be summed. kDone: there are none left.
  __device__ __forceinline__ Step look() {
    if (!c_.reduced() || c_.local_experts == 0) return Step::kDone;
    ReducePlace at = place_.load();
    const uint32_t stages = c_.groups * c_.ranks;
    if (at.stage == stages) return Step::kDone;
    if (at.begun == 0) {
      if (!has_heard()) return Step::kIdle;
      at = {.stage = 0, .base = 0, .ticket = take(), .begun = 1, .ready = 0};
    }
    while (at.stage != stages && at.ticket - at.base >= pieces(at.stage)) {
      at.base += pieces(at.stage++);
      at.ready = 0;
    }
    if (at.stage != stages && at.ready == 0) at.ready = is_computed(at.stage);
    place_.save(at);
    if (at.stage == stages) return Step::kDone;
    return at.ready != 0 ? Step::kProgress : Step::kIdle;
  }

  __device__ __forceinline__ SumPiece piece() const {
    trace_.begin();
    const ReducePlace at = place_.load();
    const uint32_t all = items(at.stage);
    SumPiece piece(span(at.stage), at.ticket - at.base, items_of_piece(all), all);
    if (piece.exists) {
      const uint32_t rows = *c_.packet_counts(c_.rank, source(at.stage), piece.token);
      piece.used = rows == 32 ? 0xffffffffu : (1u << rows) - 1;
    }
    return piece;
  }

  // After the piece is summed.
  __device__ __forceinline__ void done() {
    ReducePlace at = place_.load();
    const uint32_t p = source(at.stage), g = group(at.stage);
    P::sync();  // all lanes' rows before the count
    if (P::lane() == 0 && P::fetch_add_acq_rel(c_.reduce_done(p, g), 1u) + 1 == pieces(at.stage)) {
      P::store_relaxed(c_.reduce_done(p, g), 0u);
      signal_return<P>(c_, p, g);
    }
    trace_.end(TracePhase::kReduce, at.ticket - at.base, p << 8 | g);
    at.ticket = take();
    place_.save(at);
  }

 private:
  static constexpr uint32_t kMostItems = 16;

  __device__ __forceinline__ uint32_t group(uint32_t stage) const { return stage / c_.ranks; }
  // The own rank last.
  __device__ __forceinline__ uint32_t source(uint32_t stage) const {
    return (c_.rank + 1 + stage % c_.ranks) % c_.ranks;
  }

  __device__ __forceinline__ uint32_t take() const {
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = P::fetch_add(&c_.control()->reduces[c_.parity()].value, uint64_t{1});
    return static_cast<uint32_t>(P::broadcast(ticket, 0));
  }

  // How many tokens each rank has is known.
  __device__ __forceinline__ bool has_heard() const {
    bool all = true;
    for (uint32_t p = P::lane(); p < c_.ranks; p += P::kLanes) {
      all &= Signal::epoch(P::load_acquire(c_.call_signal(c_.rank, p), kSystem)) == c_.epoch;
    }
    const bool heard = P::ballot(!all) == 0;
    P::sync();
    return heard;
  }

  __device__ __forceinline__ uint32_t is_computed(uint32_t stage) const {
    const uint64_t* signal = c_.reduce_signal(source(stage), group(stage));
    if (Signal::epoch(P::broadcast(P::poll(signal, kDevice), 0)) != c_.epoch) return 0;
    P::acquire(signal, kDevice);
    P::sync();
    return 1;
  }

  __device__ __forceinline__ SumSpan span(uint32_t stage) const {
    constexpr uint32_t kColumnBytes = kReturnColumns * Dtype::kBytes;
    const uint32_t g = group(stage), p = source(stage);
    const uint32_t row_bytes = c_.hidden * Dtype::kBytes, begin = c_.group_first[g] * kColumnBytes;
    const uint32_t offset = begin + P::lane() * 16;
    const auto& staged = c_.work_layout.stride[static_cast<uint32_t>(WorkField::kStaging)];
    const auto& returned = c_.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    SumSpan span{.rows = c_.staged_row(p, 0, 0) + offset,
                 .token_bytes = static_cast<uint32_t>(staged[1]),
                 .slot_bytes = static_cast<uint32_t>(staged[2]),
                 .out = c_.return_row(p, 0, c_.rank) + offset,
                 .out_bytes = static_cast<uint32_t>(returned[0]),
                 .bytes = min_of(c_.group_first[g + 1] * kColumnBytes, row_bytes) - begin,
                 .writes_all = false};
    if constexpr (!P::kPeersMapped) {
      // Senders take it from here. In place: a lane has loaded its chunk of every slot before it stores the sum.
      if (p != c_.rank) {
        span.out = c_.staged_row(p, 0, 0) + offset;
        span.out_bytes = static_cast<uint32_t>(staged[1]);
      }
    }
    return span;
  }

  // Of a stage: enough for every block to have one, where that many are to be had. Loaders have no time for long ones.
  __device__ __forceinline__ static uint32_t items_of_piece(uint32_t items) {
    return min_of(max_of(ceil_div(items, gridDim.x), 1u), kMostItems);
  }
  __device__ __forceinline__ uint32_t items(uint32_t stage) const {
    return c_.tokens_of(source(stage)) * span(stage).per_token();
  }
  __device__ __forceinline__ uint32_t pieces(uint32_t stage) const {
    const uint32_t all = items(stage);
    return ceil_div(all, items_of_piece(all));
  }

  const Call& c_;
  PlaceOfWarp<ReducePlace>& place_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

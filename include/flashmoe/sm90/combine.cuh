// Combine: out[token] = sum of the rows that came back for it, over k (direct) or over ranks (reduced), in ascending
// order in fp32 (FlashDMoE, equation 5.3).
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// Items are a token's columns of one return group, 512 bytes at a time; a piece is some items in a row. Pieces go round the
// blocks, so that few tokens keep as many blocks busy as there are. Any warp of a block that has nothing else to do takes its
// next piece; `next` lies in shared memory.
struct CombinePieces {
  static constexpr uint32_t kItems = 10;  // most of a piece: what a warp loads at a time, once or a few times over
  uint32_t next;
};

// Of a warp: the piece of its block that it has taken.
struct CombinePlace {
  uint32_t group, piece;
  uint32_t held;          // 1: not combined yet
  uint32_t ready_groups;  // leading groups known to be here
};

// A warp's part in the combines of its block. All functions by all lanes.
template <class Dtype, class Trace>
class Combiner {
  using P = Platform;

 public:
  __device__ __forceinline__ Combiner(const Call& call, uint8_t* out, CombinePieces& pieces,
                                      PlaceOfWarp<CombinePlace>& place, const Trace& trace)
      : c_(call), out_(out), pieces_(pieces), place_(place), trace_(trace) {}

  // Whether the next piece's return group is here: then it is to be summed. kDone: there are none left.
  __device__ __forceinline__ Step look() {
    CombinePlace at = place_.load();
    if (at.held == 0) take(at);
    if (at.group >= at.ready_groups && at.group != c_.groups && has_returned(at.group)) at.ready_groups = at.group + 1;
    place_.save(at);
    if (at.group == c_.groups) return Step::kDone;
    return at.group < at.ready_groups ? Step::kProgress : Step::kIdle;
  }

  __device__ __forceinline__ SumPiece piece() const {
    trace_.begin();
    const CombinePlace at = place_.load();
    const SumSpan span = span_of(at.group);
    const uint32_t all = c_.tokens * span.per_token();
    SumPiece piece(span, blockIdx.x + at.piece * gridDim.x, items_of_piece(all), all);
    if (piece.exists) piece.used = used_slots(piece.token);
    return piece;
  }

  // After the piece is summed.
  __device__ __forceinline__ void done() {
    CombinePlace at = place_.load();
    trace_.end(TracePhase::kCombine, at.piece, at.group);
    at.held = 0;
    place_.save(at);
  }

 private:
  // Bit s: slot s of the token's return rows holds something.
  __device__ __forceinline__ uint32_t used_slots(uint32_t token) const {
    if (!c_.reduced() && c_.capacity == 0) return c_.top_k == 32 ? 0xffffffffu : (1u << c_.top_k) - 1;
    const uint32_t slots = c_.reduced() ? c_.ranks : c_.top_k;
    uint32_t used = 0;
#pragma unroll 4
    for (uint32_t s = 0; s < slots; ++s) {
      const bool holds = c_.reduced() ? *c_.out_counts(s, token) != 0 : c_.routing(token)[s] >= 0;
      used |= holds ? 1u << s : 0;
    }
    return used;
  }
  // The block's next piece, groups in turn; none left: group is their number.
  __device__ __forceinline__ void take(CombinePlace& at) const {
    uint32_t piece = 0;
    if (P::lane() == 0) piece = atomicAdd(&pieces_.next, 1u);
    at.piece = P::broadcast(piece, 0);
    FLASHMOE_NO_UNROLL
    for (at.group = 0; at.group < c_.groups; ++at.group) {
      const uint32_t pieces = pieces_of_block(at.group);
      if (at.piece < pieces) break;
      at.piece -= pieces;
    }
    at.held = 1;
  }
  // Two pieces for every warp of the GPU, where that many are to be had.
  __device__ __forceinline__ static uint32_t items_of_piece(uint32_t items) {
    return min_of(max_of(ceil_div(items, gridDim.x * kWarps * 2), 1u), CombinePieces::kItems);
  }
  __device__ __forceinline__ uint32_t pieces_of_block(uint32_t g) const {
    const uint32_t items = c_.tokens * span_of(g).per_token(), pieces = ceil_div(items, items_of_piece(items));
    return blockIdx.x < pieces ? ceil_div(pieces - blockIdx.x, gridDim.x) : 0;
  }
  __device__ __forceinline__ SumSpan span_of(uint32_t g) const {
    constexpr uint32_t kColumnBytes = kReturnColumns * Dtype::kBytes;
    const uint32_t row_bytes = c_.hidden * Dtype::kBytes, begin = c_.group_first[g] * kColumnBytes;
    const uint32_t offset = begin + P::lane() * 16;
    const auto& stride = c_.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    return {.rows = c_.return_row(c_.rank, 0, 0) + offset,
            .token_bytes = static_cast<uint32_t>(stride[0]),
            .slot_bytes = static_cast<uint32_t>(stride[1]),
            .out = out_ + offset,
            .out_bytes = row_bytes,
            .bytes = min_of(c_.group_first[g + 1] * kColumnBytes, row_bytes) - begin,
            .writes_all = true};
  }
  __device__ __forceinline__ bool has_returned(uint32_t g) const {
    bool all = true;
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) {
      all &= Signal::epoch(P::poll(c_.return_signal(c_.rank, q, g), kSystem)) == c_.epoch;
    }
    if (P::ballot(!all) != 0) return false;
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) P::acquire(c_.return_signal(c_.rank, q, g), kSystem);
    P::sync();
    return true;
  }

  const Call& c_;
  uint8_t* out_;
  CombinePieces& pieces_;
  PlaceOfWarp<CombinePlace>& place_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

// What a Returner (actors/returner.h) sums on a GPU: pieces of Reduce and of Combine. An item is 512 bytes of a row.
#pragma once

#include "flashmoe/actors/returner.h"
#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// The GPU's engine of a Returner: a block is a processor, its warps are the workers.
template <class Dtype, class Trace, bool kBrief = false>
class SumEngine {
  using P = Platform;

 public:
  using Piece = SumPiece;

  __device__ __forceinline__ SumEngine(const Call& call, uint8_t* out, const Trace& trace)
      : c_(call), out_(out), trace_(trace) {}

  __device__ __forceinline__ static uint32_t processor() { return blockIdx.x; }
  __device__ __forceinline__ static uint32_t processors() { return gridDim.x; }

  __device__ __forceinline__ uint32_t items(uint32_t tokens, uint32_t g) const {
    return tokens * ceil_div(group_bytes(g), SumSpan::kStep);
  }
  // Pieces are so small that every block can have one, if there are so many items; and they are short, since loaders
  // have no time for long ones.
  __device__ __forceinline__ static uint32_t items_of_reduce(uint32_t items) {
    constexpr uint32_t kMost = 16;
    return min_of(max_of(ceil_div(items, gridDim.x), 1u), kMost);
  }
  // Pieces are so small that every warp of the GPU can have two, if there are so many items; and of at most what a warp
  // loads at a time (ItemSums), once or a few times over.
  __device__ __forceinline__ static uint32_t items_of_combine(uint32_t items) {
    constexpr uint32_t kMost = 10;
    return min_of(max_of(ceil_div(items, gridDim.x * kWarps * 2), 1u), kMost);
  }

  __device__ __forceinline__ SumPiece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each,
                                                   uint32_t all) const {
    SumPiece piece(reduce_span(p, g), n, each, all);
    if (piece.exists) {
      const uint32_t rows = *c_.packet_counts(c_.rank, p, piece.token);
      piece.used = rows == 32 ? 0xffffffffu : (1u << rows) - 1;
    }
    return piece;
  }
  __device__ __forceinline__ SumPiece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    SumPiece piece(combine_span(g), n, each, all);
    if (piece.exists) piece.used = used_slots(piece.token);
    return piece;
  }
  __device__ __forceinline__ void sum(const SumPiece& piece) const { ItemSums<Dtype, kBrief>(piece).run(); }

  __device__ __forceinline__ void begin() const { trace_.begin(); }
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column) const {
    trace_.end(phase, index, column);
  }

 private:
  static constexpr uint32_t kColumnBytes = kReturnColumns * Dtype::kBytes;

  __device__ __forceinline__ uint32_t group_bytes(uint32_t g) const {
    return min_of(c_.policy.group_first[g + 1] * kColumnBytes, c_.memory.return_row_bytes) -
           c_.policy.group_first[g] * kColumnBytes;
  }

  __device__ __forceinline__ SumSpan reduce_span(uint32_t p, uint32_t g) const {
    const uint32_t offset = c_.policy.group_first[g] * kColumnBytes + P::lane() * 16;
    const auto& staged = c_.memory.work_layout.stride[static_cast<uint32_t>(WorkField::kStaging)];
    const auto& returned = c_.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    SumSpan span{.rows = c_.staged_row(p, 0, 0) + offset,
                 .token_bytes = static_cast<uint32_t>(staged[1]),
                 .slot_bytes = static_cast<uint32_t>(staged[2]),
                 .out = c_.return_row(p, 0, c_.rank) + offset,
                 .out_bytes = static_cast<uint32_t>(returned[0]),
                 .bytes = group_bytes(g),
                 .writes_all = false};
    if constexpr (!P::kPeersMapped) {
      // Senders put the sum from where slot 0 was: a lane has loaded its chunk of every slot before it stores its sum.
      if (p != c_.rank) {
        span.out = c_.staged_row(p, 0, 0) + offset;
        span.out_bytes = static_cast<uint32_t>(staged[1]);
      }
    }
    return span;
  }

  __device__ __forceinline__ SumSpan combine_span(uint32_t g) const {
    const uint32_t offset = c_.policy.group_first[g] * kColumnBytes + P::lane() * 16;
    const auto& stride = c_.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    return {.rows = c_.return_row(c_.rank, 0, 0) + offset,
            .token_bytes = static_cast<uint32_t>(stride[0]),
            .slot_bytes = static_cast<uint32_t>(stride[1]),
            .out = out_ + offset,
            .out_bytes = c_.memory.return_row_bytes,
            .bytes = group_bytes(g),
            .writes_all = true};
  }

  // Bit s: slot s of the token's return rows holds something.
  __device__ __forceinline__ uint32_t used_slots(uint32_t token) const {
    // (A backward pass has the drops of the forward's capacity.)
    if (!kIsBackward && !c_.reduced() && c_.shape.capacity == 0)
      return c_.shape.top_k == 32 ? 0xffffffffu : (1u << c_.shape.top_k) - 1;
    const uint32_t slots = c_.reduced() ? c_.shape.ranks : c_.shape.top_k;
    uint32_t used = 0;
#pragma unroll 4
    for (uint32_t s = 0; s < slots; ++s) used |= is_returned(c_, token, s) ? 1u << s : 0;
    return used;
  }

  const Call& c_;
  uint8_t* out_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

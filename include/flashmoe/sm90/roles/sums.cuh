// Sums rows that return, in pieces of Reduce and Combine. A Returner (actors/returner.h) calls it. An item is 512
// bytes of a row. Each piece is summed by one warp: in a forward pass of ranks on one machine by the second loader
// warp, between tasks; and at the end by warps whose roles have ended.
// Reduce reads staged rows (this rank's workspace) and packets' counts (its heap). It writes a token's sum to the
// return row in the heap of the token's home, over NVLink if that is another rank. If peers are not mapped, it writes
// the sum over the staged row, from which senders put it. A sum for a token of another machine goes in fp32 to the
// heap of a relay. The relay adds the sums of its machine, writes the return row, and counts the tokens for which it
// has done so.
// Combine reads return rows and counts (this rank's heap), routing and the outbox's counts (workspace). It writes the
// output y.
// Touches no barrier. Of shared memory it reads the call's parameters. In a block whose tasks are over, Reduce passes
// its rows through the stages (ring_sums.cuh). The Returner takes the pieces, and signals.
#pragma once

#include "flashmoe/actors/returner.h"
#include "flashmoe/gpu/machine_sums.cuh"
#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/roles/ring_sums.cuh"

namespace flashmoe::sm90 {

// The Stages of a SumEngine that does not use the memory of its block's stages.
struct NoStages {};

// The GPU's engine of a Returner: a block is a processor, its warps are the workers. Stages: IdleStages (ring.cuh) of a
// block whose tasks may be over.
template <class Dtype, class Trace, bool kBrief = false, class P = Platform, class Stages = NoStages>
class SumEngine : public Spans<Trace> {
  static constexpr bool kHasStages = !std::is_same_v<Stages, NoStages>;

 public:
  using Piece = std::conditional_t<SpansMachines<P>, MachinePiece, SumPiece>;

  __device__ __forceinline__ SumEngine(const Call& call, uint8_t* out, const Trace& trace, Stages stages = {})
      : Spans<Trace>(trace), c_(call), out_(out), stages_(stages) {}

  __device__ __forceinline__ static uint32_t processor() { return blockIdx.x; }
  __device__ __forceinline__ static uint32_t processors() { return gridDim.x; }

  __device__ __forceinline__ uint32_t items(uint32_t tokens, uint32_t g) const {
    return tokens * ceil_div(group_bytes(g), SumSpan::kStep);
  }
  // The items of a piece of Reduce. Pieces are so small that every block can have one, if there are enough items. If
  // loaders take pieces between tasks (link_clusters is 0), pieces are shorter, since loaders have no time for long
  // ones.
  __device__ __forceinline__ uint32_t items_of_reduce(uint32_t items) const {
    const uint32_t most = c_.policy.order.link_clusters != 0 ? 32 : 16;
    return min_of(max_of(ceil_div(items, gridDim.x), 1u), most);
  }
  // The items of a piece of Combine. Pieces are so small that every warp of the GPU can have two, if there are enough
  // items. The most is one or a few times what a warp loads at a time (ItemSums).
  __device__ __forceinline__ static uint32_t items_of_combine(uint32_t items) {
    constexpr uint32_t kMost = 10;
    return min_of(max_of(ceil_div(items, gridDim.x * kWarps * 2), 1u), kMost);
  }

  __device__ __forceinline__ Piece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    const SumSpan span = reduce_span(p, g);
    Piece piece(span, n, each, all);
    if (piece.exists) {
      const uint32_t rows = *c_.packet_counts(c_.rank, p, piece.token);
      piece.used = rows == 32 ? 0xffffffffu : (1u << rows) - 1;
    }
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      if (m.sums && !m.together(p, c_.rank)) {
        const uint32_t column = piece.from - piece.token * (span.token_bytes / 16);
        piece.wide = MachinePiece::kSum;
        piece.out = sums_of(m.relay(p, m.of[c_.rank]), p, m.place[c_.rank], g);
        piece.to = piece.token * sum_chunks() + column * kWiden;
      }
    }
    return piece;
  }
  // A piece that this rank sums as a relay: of the sums that the ranks of this machine have left here for p's tokens.
  __device__ __forceinline__ Piece machine_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each,
                                                 uint32_t all) const {
    const Machines& m = *c_.machines;
    const SumSpan span = reduce_span(p, g);
    Piece piece(span, n, each, all);
    const RelayPlace from(c_, m, c_.rank, p);
    const uint32_t column = piece.to - piece.token * (span.out_bytes / 16);
    piece.wide = MachinePiece::kRows;
    piece.rows = sums_of(c_.rank, p, 0, g);
    piece.from = piece.token * sum_chunks() + column * kWiden;
    piece.slot_chunks = static_cast<uint32_t>(m.layout.stride[static_cast<uint32_t>(RelayField::kSums)][1] / 16);
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 0; i < m.size(m.of[c_.rank]); ++i) {
      if (piece.exists && *from.counts(i, piece.token) != 0) piece.used |= 1u << i;
    }
    const uint32_t tokens = P::popcount(P::ballot(g == 0 && column == 0 && piece.used != 0));
    if (P::lane() == 0) P::add(&m.counts[c_.parity()].sums_sent, tokens);
    return piece;
  }
  __device__ __forceinline__ Piece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    Piece piece(combine_span(g), n, each, all);
    if (piece.exists) piece.used = used_slots(piece.token);
    return piece;
  }
  __device__ __forceinline__ void sum(const Piece& piece) const {
    if constexpr (SpansMachines<P>) {
      if (piece.wide != MachinePiece::kNone) return WideSums<Dtype>(piece).run();
    }
    if constexpr (kHasStages) {
      // (Not Combine: any of its slots may be empty. And when all blocks do their last pieces at the same time, the
      // speed of memory is the limit.)
      const bool reduces = !piece.writes_all;
      if (reduces && P::broadcast(stages_.are_free() ? 1u : 0u, 0) != 0)
        return RingSums<Dtype>(piece, stages_.memory_of_warp(RingSums<Dtype>::kBytes)).run();
    }
    ItemSums<Dtype, kBrief>(piece).run();
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
      // The sum overwrites slot 0, from where senders put it. It may, because a lane has loaded its chunk of every
      // slot before it stores its sum.
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

  // How many times as many bytes a sum has in fp32 as in y's type.
  static constexpr uint32_t kWiden = 4 / Dtype::kBytes;

  // Where the rank at place `place` of its machine leaves its sums of p's tokens with `relay`: the address of the
  // first token's sum, at this lane's first chunk.
  __device__ __forceinline__ uint8_t* sums_of(uint32_t relay, uint32_t p, uint32_t place, uint32_t g) const {
    const RelayPlace at(c_, *c_.machines, relay, p);
    return reinterpret_cast<uint8_t*>(at.sum(place, 0) + c_.policy.group_first[g] * kReturnColumns) +
           P::lane() * (16 * kWiden);
  }
  // From one token's sum to the next token's, in units of 16 bytes.
  __device__ __forceinline__ uint32_t sum_chunks() const {
    return static_cast<uint32_t>(c_.machines->layout.stride[static_cast<uint32_t>(RelayField::kSums)][2] / 16);
  }

  // Bit s: slot s of the token's return rows holds a row.
  __device__ __forceinline__ uint32_t used_slots(uint32_t token) const {
    // (Not in a backward pass, where choices may be missing that the forward pass's capacity has dropped.)
    if (!kIsBackward && !c_.reduced() && c_.shape.capacity == 0)
      return c_.shape.top_k == 32 ? 0xffffffffu : (1u << c_.shape.top_k) - 1;
    const uint32_t slots = c_.reduced() ? c_.shape.ranks : c_.shape.top_k;
    uint32_t used = 0;
#pragma unroll 4
    for (uint32_t s = 0; s < slots; ++s) used |= holds(token, s) ? 1u << s : 0;
    return used;
  }

  __device__ __forceinline__ bool holds(uint32_t token, uint32_t slot) const {
    if constexpr (SpansMachines<P>) {
      if (c_.reduced()) return is_returned(c_, *c_.machines, token, slot);
    }
    return is_returned(c_, token, slot);
  }

  const Call& c_;
  uint8_t* out_;
  [[no_unique_address]] Stages stages_;
};
static_assert(SumsForMachines<SumEngine<Bf16, Tracer<false, 32>>>);

}  // namespace flashmoe::sm90

// Combine: out[token] = sum of the rows that came back for it, over k (direct) or over ranks (reduced), in ascending
// order in fp32 (FlashDMoE, equation 5.3).
#pragma once

#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/sm90/dtype.cuh"
#include "flashmoe/sm90/kernel_args.h"
#include "flashmoe/sm90/platform.cuh"

namespace flashmoe::stages {

// Items are a token's columns of one return group, 512 bytes at a time; a piece is some items in a row. Pieces go round the
// blocks, so that few tokens keep as many blocks busy as there are. Any warp of a block that has nothing else to do takes its
// next piece; `next` lies in shared memory.
struct CombinePieces {
  static constexpr uint32_t kItems = 10;  // most of a piece: what a warp loads at a time, once or a few times over
  uint32_t next;
};

__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Bit s: slot s of the token's return rows holds something. All lanes.
__device__ __forceinline__ uint32_t used_slots(const Call& c, uint32_t token) {
  using P = sm90::Platform;
  if (!c.reduced() && c.capacity == 0) return c.top_k == 32 ? 0xffffffffu : (1u << c.top_k) - 1;
  const uint32_t slot = P::lane();
  if (c.reduced()) return P::ballot(slot < c.ranks && goes_to(c, token, slot));
  return P::ballot(slot < c.top_k && c.routing(token)[slot] >= 0);
}

// The columns of one return group of all tokens, cut into items of 16 bytes per lane.
struct CombineSpan {
  static constexpr uint32_t kStep = 32 * 16;  // bytes of an item
  const uint8_t* rows;                        // the first token's row of slot 0, at this lane's first chunk
  uint32_t token_bytes, slot_bytes;           // from one to the next; 32 bits, since registers are short
  uint8_t* out;                               // of the first token
  uint32_t out_bytes;
  uint32_t bytes;  // of the columns
  uint32_t slots;

  FLASHMOE_HD uint32_t per_token() const { return ceil_div(bytes, kStep); }
};

// Loads a lane's chunk of kSlots slots from `slot` on; zeros for those that hold nothing.
template <uint32_t kSlots>
__device__ __forceinline__ void load_slots(uint4 (&chunk)[kSlots], const uint8_t* from, uint32_t slot_bytes,
                                           uint32_t used) {
#pragma unroll
  for (uint32_t k = 0; k < kSlots; ++k) {
    chunk[k] = {};
    if (used >> k & 1u) chunk[k] = load_once(from + uint64_t{slot_bytes} * k);
  }
}

// Items first to last - 1, with so many at once that 10 to 16 loads of a lane are on their way: a memory round trip is what
// this stage's time is made of. kSlots: at least as many as there are.
template <class Dtype, uint32_t kSlots>
__device__ __forceinline__ void combine_items(const Call& c, const CombineSpan& span, uint32_t first, uint32_t last) {
  constexpr uint32_t kAtOnce = kSlots == 2 ? 5 : 16 / kSlots, kElements = 16 / Dtype::kBytes;  // as registers allow
  const uint32_t per_token = span.per_token();
  FLASHMOE_NO_UNROLL
  for (uint32_t base = first; base < last; base += kAtOnce) {
    uint4 chunk[kAtOnce][kSlots];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t t = (base + i) / per_token, at = (base + i) % per_token * CombineSpan::kStep;
      const bool exists = base + i < last && at + sm90::Platform::lane() * 16 < span.bytes;
      const uint32_t used = base + i < last ? used_slots(c, t) : 0;
      load_slots<kSlots>(chunk[i], span.rows + uint64_t{t} * span.token_bytes + at, span.slot_bytes, exists ? used : 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t t = (base + i) / per_token, at = (base + i) % per_token * CombineSpan::kStep;
      float sum[kElements] = {};
#pragma unroll
      for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[i][k]);
      if (base + i < last && at + sm90::Platform::lane() * 16 < span.bytes) {
        *reinterpret_cast<uint4*>(span.out + uint64_t{t} * span.out_bytes + at) = Dtype::round(sum);
      }
    }
  }
}

// The same for any number of slots, eight at a time.
template <class Dtype>
__device__ __forceinline__ void combine_wide_items(const Call& c, const CombineSpan& span, uint32_t first,
                                                   uint32_t last) {
  constexpr uint32_t kSlots = 8, kElements = 16 / Dtype::kBytes;
  FLASHMOE_NO_UNROLL
  for (uint32_t item = first; item < last; ++item) {
    const uint32_t t = item / span.per_token(), at = item % span.per_token() * CombineSpan::kStep;
    const uint32_t used = used_slots(c, t);
    if (at + sm90::Platform::lane() * 16 >= span.bytes) continue;
    float sum[kElements] = {};
    FLASHMOE_NO_UNROLL
    for (uint32_t slot = 0; slot < span.slots; slot += kSlots) {
      uint4 chunk[kSlots];
      load_slots<kSlots>(chunk, span.rows + uint64_t{t} * span.token_bytes + uint64_t{slot} * span.slot_bytes + at,
                         span.slot_bytes, used >> slot);
#pragma unroll
      for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[k]);
    }
    *reinterpret_cast<uint4*>(span.out + uint64_t{t} * span.out_bytes + at) = Dtype::round(sum);
  }
}

// A warp's part in the combines of its block. All functions by all lanes.
template <class Dtype, class Trace>
class Combiner {
 public:
  __device__ __forceinline__ Combiner(const Call& call, uint8_t* out, CombinePieces& pieces, const Trace& trace)
      : c_(call), out_(out), pieces_(pieces), trace_(trace) {}

  // Combines the next piece if its return group is here. kDone: there are none left.
  __device__ __forceinline__ Step step() {
    if (!held_) take();
    if (group_ == c_.groups) return Step::kDone;
    if (group_ >= ready_groups_ && !has_returned(group_)) return Step::kIdle;
    trace_.begin();
    const CombineSpan span = span_of(group_);
    const uint32_t all = c_.tokens * span.per_token(), each = items_of_piece(all);
    const uint32_t first = (blockIdx.x + piece_ * gridDim.x) * each, last = min_of(first + each, all);
    if (span.slots <= 2) {
      combine_items<Dtype, 2>(c_, span, first, last);
    } else if (span.slots <= 4) {
      combine_items<Dtype, 4>(c_, span, first, last);
    } else if (span.slots <= 8) {
      combine_items<Dtype, 8>(c_, span, first, last);
    } else {
      combine_wide_items<Dtype>(c_, span, first, last);
    }
    trace_.end(sm90::TracePhase::kCombine, first / span.per_token() >> c_.log2_block, group_);
    held_ = false;
    return Step::kProgress;
  }

  // Until none are left; false if the call was aborted.
  __device__ __forceinline__ bool run() {
    const WaitEnd end = wait_until<sm90::Platform>(
        c_,
        [&] {
          const Step s = step();
          if (s == Step::kIdle)
            __nanosleep(500);  // a group takes long, and every block of the GPU looks at the same word
          return s;
        },
        OsLiveness<sm90::Platform>{c_});
    return end == WaitEnd::kDone;
  }

 private:
  // The block's next piece, groups in turn; none left: group_ is their number.
  __device__ __forceinline__ void take() {
    if (sm90::Platform::lane() == 0) piece_ = atomicAdd(&pieces_.next, 1u);
    piece_ = sm90::Platform::broadcast(piece_, 0);
    FLASHMOE_NO_UNROLL
    for (group_ = 0; group_ < c_.groups; ++group_) {
      const uint32_t pieces = pieces_of_block(group_);
      if (piece_ < pieces) break;
      piece_ -= pieces;
    }
    held_ = true;
  }
  // Two pieces for every warp of the GPU, where that many are to be had.
  __device__ __forceinline__ static uint32_t items_of_piece(uint32_t items) {
    return min_of(max_of(ceil_div(items, gridDim.x * sm90::kWarps * 2), 1u), CombinePieces::kItems);
  }
  __device__ __forceinline__ uint32_t pieces_of_block(uint32_t g) const {
    const uint32_t items = c_.tokens * span_of(g).per_token(), pieces = ceil_div(items, items_of_piece(items));
    return blockIdx.x < pieces ? ceil_div(pieces - blockIdx.x, gridDim.x) : 0;
  }
  __device__ __forceinline__ CombineSpan span_of(uint32_t g) const {
    constexpr uint32_t kColumnBytes = sm90::kGemm1ColumnsPerTask * Dtype::kBytes;
    const uint32_t row_bytes = c_.hidden * Dtype::kBytes, begin = c_.group_first[g] * kColumnBytes;
    const uint32_t offset = begin + sm90::Platform::lane() * 16;
    const auto& stride = c_.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    return {.rows = c_.return_row(c_.rank, 0, 0) + offset,
            .token_bytes = static_cast<uint32_t>(stride[0]),
            .slot_bytes = static_cast<uint32_t>(stride[1]),
            .out = out_ + offset,
            .out_bytes = row_bytes,
            .bytes = min_of(c_.group_first[g + 1] * kColumnBytes, row_bytes) - begin,
            .slots = c_.reduced() ? c_.ranks : c_.top_k};
  }
  __device__ __forceinline__ bool has_returned(uint32_t g) {
    using P = sm90::Platform;
    bool all = true;
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) {
      all &= Signal::epoch(P::poll(c_.return_signal(c_.rank, q, g), kSystem)) == c_.epoch;
    }
    if (P::ballot(!all) != 0) return false;
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) P::acquire(c_.return_signal(c_.rank, q, g), kSystem);
    P::sync();
    ready_groups_ = g + 1;
    return true;
  }

  const Call& c_;
  uint8_t* out_;
  CombinePieces& pieces_;
  const Trace& trace_;
  uint32_t group_ = 0, piece_ = 0;  // that this warp has taken, of its block's
  bool held_ = false;               // and not combined yet
  uint32_t ready_groups_ = 0;
};

}  // namespace flashmoe::stages

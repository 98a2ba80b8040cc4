// Combine: out[token] = sum of the rows that came back for it, over k (direct) or over ranks (reduced), in ascending
// order in fp32 (FlashDMoE, equation 5.3).
#pragma once

#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/sm90/dtype.cuh"
#include "flashmoe/sm90/kernel_args.h"
#include "flashmoe/sm90/platform.cuh"

namespace flashmoe::stages {

// A block's combines: a piece is kTokens tokens of one of its token blocks in one return group. Any warp that has
// nothing else to do takes the next piece; `next` lies in shared memory.
struct CombinePieces {
  static constexpr uint32_t kTokens = 4;
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

// The columns of one return group of some tokens, cut into chunks of 16 bytes per lane.
struct CombineSpan {
  static constexpr uint32_t kStep = 32 * 16;  // bytes that a warp loads of a row at a time
  const uint8_t* rows;                        // the first token's row of slot 0, at this lane's first chunk
  uint64_t token_bytes, slot_bytes;           // from one to the next
  uint8_t* out;                               // of the first token
  uint64_t out_bytes;
  uint32_t bytes;  // of the columns
  uint32_t slots;
};

// Loads a lane's chunk of kSlots slots from `slot` on; zeros for those that hold nothing.
template <uint32_t kSlots>
__device__ __forceinline__ void load_slots(uint4 (&chunk)[kSlots], const uint8_t* from, uint64_t slot_bytes,
                                           uint32_t used) {
#pragma unroll
  for (uint32_t k = 0; k < kSlots; ++k) {
    chunk[k] = {};
    if (used >> k & 1u) chunk[k] = load_once(from + k * slot_bytes);
  }
}

// All chunks of the span, with so many at once that 10 to 16 loads of a lane are on their way: a memory round trip is what
// this stage's time is made of. kSlots: at least as many as there are.
template <class Dtype, uint32_t kSlots>
__device__ __forceinline__ void combine_span(const Call& c, const CombineSpan& span, uint32_t token, uint32_t tokens) {
  constexpr uint32_t kChunks = kSlots == 2 ? 5 : 16 / kSlots, kElements = 16 / Dtype::kBytes;  // as registers allow
  const uint32_t per_token = ceil_div(span.bytes, CombineSpan::kStep);
  FLASHMOE_NO_UNROLL
  for (uint32_t base = 0; base < tokens * per_token; base += kChunks) {
    uint4 chunk[kChunks][kSlots];
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      const uint32_t t = (base + i) / per_token, at = (base + i) % per_token * CombineSpan::kStep;
      const uint32_t used = t < tokens ? used_slots(c, token + t) : 0;
      load_slots<kSlots>(chunk[i], span.rows + t * span.token_bytes + at, span.slot_bytes,
                         at + sm90::Platform::lane() * 16 < span.bytes ? used : 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      const uint32_t t = (base + i) / per_token, at = (base + i) % per_token * CombineSpan::kStep;
      float sum[kElements] = {};
#pragma unroll
      for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[i][k]);
      if (t < tokens && at + sm90::Platform::lane() * 16 < span.bytes) {
        *reinterpret_cast<uint4*>(span.out + t * span.out_bytes + at) = Dtype::round(sum);
      }
    }
  }
}

// The same for any number of slots, eight at a time.
template <class Dtype>
__device__ __forceinline__ void combine_wide_span(const Call& c, const CombineSpan& span, uint32_t token,
                                                  uint32_t tokens) {
  constexpr uint32_t kSlots = 8, kElements = 16 / Dtype::kBytes;
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint32_t used = used_slots(c, token + t);
    FLASHMOE_NO_UNROLL
    for (uint32_t at = 0; at + sm90::Platform::lane() * 16 < span.bytes; at += CombineSpan::kStep) {
      float sum[kElements] = {};
      FLASHMOE_NO_UNROLL
      for (uint32_t slot = 0; slot < span.slots; slot += kSlots) {
        uint4 chunk[kSlots];
        load_slots<kSlots>(chunk, span.rows + t * span.token_bytes + slot * span.slot_bytes + at, span.slot_bytes,
                           used >> slot);
#pragma unroll
        for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[k]);
      }
      *reinterpret_cast<uint4*>(span.out + t * span.out_bytes + at) = Dtype::round(sum);
    }
  }
}

// Tokens token .. token + tokens - 1, all of one block, in return group g. One warp.
template <class Dtype>
__device__ __forceinline__ void combine_tokens(const Call& c, uint8_t* out, uint32_t token, uint32_t tokens,
                                               uint32_t g) {
  constexpr uint32_t kColumnBytes = sm90::kGemm1ColumnsPerTask * Dtype::kBytes;
  const uint32_t row_bytes = c.hidden * Dtype::kBytes, begin = c.group_first[g] * kColumnBytes;
  const uint32_t offset = begin + sm90::Platform::lane() * 16;
  const auto& stride = c.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
  const CombineSpan span{.rows = c.return_row(c.rank, token, 0) + offset,
                         .token_bytes = stride[0],
                         .slot_bytes = stride[1],
                         .out = out + uint64_t{token} * row_bytes + offset,
                         .out_bytes = row_bytes,
                         .bytes = min_of(c.group_first[g + 1] * kColumnBytes, row_bytes) - begin,
                         .slots = c.reduced() ? c.ranks : c.top_k};
  if (span.slots <= 2) {
    combine_span<Dtype, 2>(c, span, token, tokens);
  } else if (span.slots <= 4) {
    combine_span<Dtype, 4>(c, span, token, tokens);
  } else if (span.slots <= 8) {
    combine_span<Dtype, 8>(c, span, token, tokens);
  } else {
    combine_wide_span<Dtype>(c, span, token, tokens);
  }
}

// Takes pieces until there are none left; false if the call was aborted. One warp. `trace(group, block, start)` is
// called after each piece.
template <class Dtype, class Trace>
__device__ __forceinline__ bool combine_pieces(const Call& c, uint8_t* out, CombinePieces& pieces, Trace&& trace) {
  using P = sm90::Platform;
  const uint32_t own_blocks = blockIdx.x < c.blocks() ? ceil_div(c.blocks() - blockIdx.x, gridDim.x) : 0;
  const uint32_t per_block = ceil_div(c.block_tokens(), CombinePieces::kTokens);
  const uint32_t per_group = own_blocks * per_block;
  uint32_t ready_groups = 0;
  while (true) {
    uint32_t piece = 0;
    if (P::lane() == 0) piece = atomicAdd(&pieces.next, 1u);
    piece = P::broadcast(piece, 0);
    if (piece >= per_group * c.groups) return true;
    const uint32_t g = piece / per_group;
    const uint32_t b = blockIdx.x + piece % per_group / per_block * gridDim.x;
    if (g >= ready_groups) {
      const WaitEnd end = wait_until<P>(
          c,
          [&] {
            bool all = true;
            for (uint32_t q = P::lane(); q < c.ranks; q += P::kLanes) {
              all &= Signal::epoch(P::poll(c.return_signal(c.rank, q, g), kSystem)) == c.epoch;
            }
            if (P::ballot(!all) == 0) return Step::kDone;
            __nanosleep(500);  // a group takes long, and every block of the GPU looks at the same word
            return Step::kIdle;
          },
          OsLiveness<P>{c});
      if (end != WaitEnd::kDone) return false;
      P::acquire_fence(kSystem);
      P::sync();
      ready_groups = g + 1;
    }
    const uint64_t start = trace.now();
    const uint32_t first = piece % per_block * CombinePieces::kTokens;
    const uint32_t token = (b << c.log2_block) + first;
    const uint32_t end = c.tokens_in_block(b);  // the last block may end before its last piece begins
    const uint32_t tokens = first < end ? min_of(CombinePieces::kTokens, end - first) : 0;
    combine_tokens<Dtype>(c, out, token, tokens, g);
    trace.add(sm90::TracePhase::kCombine, start, b, g);
  }
}

}  // namespace flashmoe::stages

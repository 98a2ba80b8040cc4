// Sums of a token's rows in ascending order in fp32, rounded once: what Reduce and Combine have in common.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/protocol/machines.h"

namespace flashmoe::gpu {

// A return group's columns of a rank's tokens, cut into items. An item is 512 bytes of a token's columns, 16 bytes
// for each lane. Items are numbered token by token.
struct SumSpan {
  static constexpr uint32_t kStep = 32 * 16;  // bytes of an item
  const uint8_t* rows;                        // the first token's row of slot 0, at this lane's first chunk
  uint32_t token_bytes, slot_bytes;           // from one token, or slot, to the next; 32 bits, to save registers
  uint8_t* out;                               // the first token's sum, at this lane's first chunk
  uint32_t out_bytes;
  uint32_t bytes;   // of a token's columns
  bool writes_all;  // a token without rows gets zeros; else nothing

  __device__ __forceinline__ uint32_t per_token() const { return ceil_div(bytes, kStep); }
};

// A cursor for each warp. It is kept in shared memory between two pieces, because it is long and registers are few.
// S: a struct of words, which are the same in all lanes.
template <class S>
class CursorOfWarp {
  using P = Platform;

 public:
  // One thread, before the block's first synchronization.
  __device__ void init() {
    for (Aligned& a : states_) a.state = {};
  }
  // The calling warp's own cursor. Called by all lanes.
  __device__ __forceinline__ S load() const { return states_[warp()].state; }
  __device__ __forceinline__ void save(const S& s) {
    P::sync();
    if (P::lane() == 0) states_[warp()].state = s;
    P::sync();
  }

 private:
  __device__ __forceinline__ static uint32_t warp() { return thread_anew() / P::kLanes; }

  // Without this alignment, ptxas would load 16 bytes that begin in the previous warp's state, while that warp may be
  // writing there.
  struct alignas(16) Aligned {
    S state;
  };
  Aligned states_[kWarps];
};

// Some items of a span, at most one for each lane. Offsets count units of 16 bytes, so that 32 bits are enough.
struct SumPiece {
  const uint8_t* rows;
  uint8_t* out;
  uint32_t slot_bytes;
  bool writes_all;  // as in SumSpan
  bool inside;      // whether this lane has a chunk of a token's last item, which may be short of 512 bytes
  // In lane i, these are of the i-th item:
  uint32_t token;
  uint32_t from, to;        // where the item's slot 0 and its sum are
  uint32_t used;            // bit s: slot s holds something
  uint32_t exists, narrow;  // whether there is such an item; whether it is its token's last

  // The n-th piece, of `each` items a piece and `all` in the span.
  __device__ __forceinline__ SumPiece(const SumSpan& span, uint32_t n, uint32_t each, uint32_t all)
      : rows(span.rows), out(span.out), slot_bytes(span.slot_bytes), writes_all(span.writes_all), used(0) {
    const uint32_t lane = Platform::lane(), item = n * each + lane, per_token = span.per_token();
    const uint32_t column = item % per_token, at = column * (SumSpan::kStep / 16);
    token = item / per_token;
    from = token * (span.token_bytes / 16) + at;
    to = token * (span.out_bytes / 16) + at;
    exists = lane < each && item < all;
    narrow = column + 1 == per_token;
    inside = (per_token - 1) * SumSpan::kStep + lane * 16 < span.bytes;
  }
};

// Loads a lane's chunk of kSlots slots, `step` bytes apart; zeros for those that hold nothing.
template <uint32_t kSlots>
__device__ __forceinline__ void load_slots(uint4 (&chunk)[kSlots], const uint8_t* from, uint32_t step, uint32_t used) {
#pragma unroll
  for (uint32_t k = 0; k < kSlots; ++k) {
    chunk[k] = {};
    if (used >> k & 1u) chunk[k] = load_once(from + uint64_t{step} * k);
  }
}

// Sums a piece, several items at once. Its time is that of round trips to memory. So a lane has as many loads in
// flight as registers allow: 10 to 16, if items have few slots. (To go through the rows of all items, 8 rows at a
// time, would be half as fast.) Run by all lanes. kBrief: fewer loads in flight, for warps that have fewer registers
// left.
template <class Dtype, bool kBrief>
class ItemSums {
  using P = Platform;
  static constexpr uint32_t kElements = 16 / Dtype::kBytes;

 public:
  __device__ __forceinline__ explicit ItemSums(const SumPiece& piece)
      : piece_(piece), items_(P::popcount(P::ballot(piece.exists != 0))) {}

  __device__ __forceinline__ void run() const {
    // Beside the sums of machines, which lie in the same loop, experts in FP8 leave fewer registers still.
    constexpr uint32_t kLess = kQuantised<Dtype> && SpansMachines<P> ? 1 : 0;
    constexpr uint32_t kOfTwo = 5 - kLess, kOfFour = (Dtype::kBytes == 2 ? 4 : 3) - kLess,
                       kOfEight = Dtype::kBytes == 2 && !kBrief ? 2 : 1;
    uint32_t i = 0;
    FLASHMOE_NO_UNROLL
    while (i < items_) {
      const bool near = P::lane() >= i && P::lane() < i + kOfTwo;
      const uint32_t any = __reduce_or_sync(kFullWarp, near ? piece_.used : 0);
      if (any < 1u << 2) {
        sum<2, kOfTwo>(i);
        i += kOfTwo;
      } else if (any < 1u << 4) {
        sum<4, kOfFour>(i);
        i += kOfFour;
      } else if (any < 1u << 8) {
        sum<8, kOfEight>(i);
        i += kOfEight;
      } else {
        sum_many(i);
        i += 1;
      }
    }
  }

 private:
  // Whether this lane has a chunk of the item.
  __device__ __forceinline__ bool has(uint32_t item) const {
    return item < items_ && (P::broadcast(piece_.narrow, item) == 0 || piece_.inside);
  }
  __device__ __forceinline__ const uint8_t* rows(uint32_t item) const {
    return piece_.rows + uint64_t{P::broadcast(piece_.from, item)} * 16;
  }
  __device__ __forceinline__ void store(uint32_t item, const float (&sum)[kElements]) const {
    const uint64_t to = P::broadcast(piece_.to, item);
    const uint32_t used = P::broadcast(piece_.used, item);
    if (!has(item) || (used == 0 && !piece_.writes_all)) return;
    *reinterpret_cast<uint4*>(piece_.out + to * 16) = Dtype::round(sum);
  }

  template <uint32_t kSlots, uint32_t kAtOnce>
  __device__ __forceinline__ void sum(uint32_t first) const {
    uint4 chunk[kAtOnce][kSlots];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t used = P::broadcast(piece_.used, first + i);
      load_slots<kSlots>(chunk[i], rows(first + i), piece_.slot_bytes, has(first + i) ? used : 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      float sum[kElements] = {};
#pragma unroll
      for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[i][k]);
      store(first + i, sum);
    }
  }

  // Sums an item of any number of slots, eight slots at a time.
  __device__ __forceinline__ void sum_many(uint32_t item) const {
    constexpr uint32_t kSlots = 8;
    const uint8_t* from = rows(item);
    float sum[kElements] = {};
    const uint32_t used = P::broadcast(piece_.used, item);
    FLASHMOE_NO_UNROLL
    for (uint32_t left = has(item) ? used : 0; left != 0; left >>= kSlots) {
      uint4 chunk[kSlots];
      load_slots<kSlots>(chunk, from, piece_.slot_bytes, left);
#pragma unroll
      for (uint32_t k = 0; k < kSlots; ++k) Dtype::accumulate(sum, chunk[k]);
      from += uint64_t{piece_.slot_bytes} * kSlots;
    }
    store(item, sum);
  }

  const SumPiece& piece_;
  const uint32_t items_;
};

}  // namespace flashmoe::gpu

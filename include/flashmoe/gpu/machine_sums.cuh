// Two sums where ranks are on several machines (protocol/machines.h). The first is over one rank's rows for a token of
// another machine, and stays in fp32. The second is over these sums of all ranks of the machine, and is rounded once.
// Both add in ascending order in fp32, as ItemSums does.
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/protocol/machines.h"

namespace flashmoe::gpu {

// A piece of Reduce or Combine if ranks may be on several machines. An item always has the columns that take 512
// bytes in y's type. In fp32, the same columns take twice as many bytes if y is of 16 bits.
struct MachinePiece : SumPiece {
  enum Wide : uint32_t { kNone, kSum, kRows };  // what is in fp32, whatever y's type is: nothing; the sum; the rows

  Wide wide = kNone;
  uint32_t slot_chunks = 0;  // with kRows: from one slot to the next, in units of 16 bytes (in place of slot_bytes)

  using SumPiece::SumPiece;
};

// Sums such a piece, item by item. A lane has only four loads in flight, because the warps that run this have no
// registers for more. Run by all lanes.
template <class Dtype>
class WideSums {
  using P = Platform;
  // kElements: a lane's elements of an item. kChunks: the chunks of 16 bytes that these take in fp32.
  static constexpr uint32_t kElements = 16 / Dtype::kBytes, kChunks = kElements / 4;

 public:
  __device__ __forceinline__ explicit WideSums(const MachinePiece& piece)
      : piece_(piece), items_(P::popcount(P::ballot(piece.exists != 0))) {}

  __device__ __forceinline__ void run() const {
    if (piece_.wide == MachinePiece::kSum) {
      sum<false>();
    } else {
      sum<true>();
    }
  }

 private:
  static __device__ __forceinline__ void add(float (&sum)[kElements], const uint4 (&row)[kChunks]) {
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      sum[i * 4] += __uint_as_float(row[i].x), sum[i * 4 + 1] += __uint_as_float(row[i].y);
      sum[i * 4 + 2] += __uint_as_float(row[i].z), sum[i * 4 + 3] += __uint_as_float(row[i].w);
    }
  }
  static __device__ __forceinline__ void add(float (&sum)[kElements], const uint4 (&row)[1])
    requires(kChunks != 1)
  {
    Dtype::accumulate(sum, row[0]);
  }

  template <bool kWideRows>
  __device__ __forceinline__ void sum() const {
    constexpr uint32_t kRow = kWideRows ? kChunks : 1, kSlots = 4 / kRow;
    const uint64_t slot = kWideRows ? uint64_t{piece_.slot_chunks} * 16 : uint64_t{piece_.slot_bytes};
    FLASHMOE_NO_UNROLL
    for (uint32_t item = 0; item < items_; ++item) {
      const bool whole = P::broadcast(piece_.narrow, item) == 0;
      const uint32_t all = P::broadcast(piece_.used, item), used = whole || piece_.inside ? all : 0;
      const uint8_t* from = piece_.rows + uint64_t{P::broadcast(piece_.from, item)} * 16;
      uint8_t* const to = piece_.out + uint64_t{P::broadcast(piece_.to, item)} * 16;
      float sum[kElements] = {};
      FLASHMOE_NO_UNROLL
      for (uint32_t left = used; left != 0; left >>= kSlots) {
        uint4 row[kSlots][kRow];
#pragma unroll
        for (uint32_t k = 0; k < kSlots; ++k) {
#pragma unroll
          for (uint32_t j = 0; j < kRow; ++j) {
            row[k][j] = {};
            if (left >> k & 1u) row[k][j] = load_once(from + slot * k + j * 16);
          }
        }
#pragma unroll
        for (uint32_t k = 0; k < kSlots; ++k) add(sum, row[k]);
        from += slot * kSlots;
      }
      if (used != 0) store<kWideRows>(to, sum);  // a token without rows gets nothing
    }
  }

  template <bool kWideRows>
  static __device__ __forceinline__ void store(uint8_t* to, const float (&sum)[kElements]) {
    if constexpr (kWideRows) {
      *reinterpret_cast<uint4*>(to) = Dtype::round(sum);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        reinterpret_cast<uint4*>(to)[i] = {__float_as_uint(sum[i * 4]), __float_as_uint(sum[i * 4 + 1]),
                                           __float_as_uint(sum[i * 4 + 2]), __float_as_uint(sum[i * 4 + 3])};
      }
    }
  }

  const MachinePiece& piece_;
  const uint32_t items_;
};

}  // namespace flashmoe::gpu

// Sums a piece of Reduce, with many more loads on their way than registers would hold. Warps use it when the tasks of
// their block are over, because the memory of the block's stages is then free. ItemSums (gpu/sum.cuh) makes the same
// bits without that memory.
//
// Run by one warp. Reads rows (this rank's workspace) and writes sums (any rank's heap) as the piece says. Rows pass
// through the warp's own 16 KiB of the stages: cp.async brings 512 bytes of a row, and each lane asks for 16 of them.
// Later each lane reads only the bytes that it asked for. So the ring needs no barrier, and no lane waits for another.
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90 {

template <class Dtype>
class RingSums {
  using P = Platform;
  static constexpr uint32_t kElements = 16 / Dtype::kBytes;
  // kRows: rows of the ring, each of which one lane describes. kBatch: rows that are waited for together.
  static constexpr uint32_t kRows = P::kLanes, kBatch = 8, kBatches = kRows / kBatch;

 public:
  static constexpr uint32_t kBytes = kRows * SumSpan::kStep;  // of a warp's memory

  // In each item, the slots that hold a row must come first, as in Reduce. memory: the warp's part of the stages.
  __device__ __forceinline__ RingSums(const SumPiece& piece, uint32_t memory)
      : piece_(piece), memory_(memory + P::lane() * 16), first_(P::exclusive_scan(P::popcount(piece.used), rows_)) {}

  __device__ __forceinline__ void run() const {
    float sum[kElements] = {};
    Window last{}, now{};
    // A batch is summed when kBatches - 1 later ones are on their way.
    FLASHMOE_NO_UNROLL
    for (uint32_t row = 0; row < rows_ + kRows; row += kRows) {
      now = describe(row);
#pragma unroll
      for (uint32_t i = 0; i < kBatches; ++i) {
        load(now, i);
        cp_async_wait<kBatches - 1>();
        if (i + 1 < kBatches) {
          add(last, i + 1, sum);
        } else {
          add(now, 0, sum);
        }
      }
      last = now;
    }
    cp_async_wait<0>();
  }

 private:
  // kRows rows of the piece, item after item. Lane i has `from` and `to` of the i-th row. Bit i of the other words is
  // of the i-th row.
  struct Window {
    uint32_t from, to;  // where the row is, and where its item's sum goes, as in SumPiece
    uint32_t exist;
    uint32_t ends;    // the row is its item's last
    uint32_t narrow;  // as in SumPiece
  };

  // Describes rows row, row + 1, ...
  __device__ __forceinline__ Window describe(uint32_t row) const {
    const uint32_t own = row + P::lane();
    // A row's item is that of the last lane whose first row is not after the row. (An item without rows has the same
    // first row as the next item.)
    uint32_t item = 0;
#pragma unroll
    for (uint32_t step = P::kLanes / 2; step != 0; step /= 2) {
      const uint32_t first = __shfl_sync(kFullWarp, first_, static_cast<int>(item + step));
      if (first <= own) item += step;
    }
    const uint32_t slot = own - __shfl_sync(kFullWarp, first_, static_cast<int>(item));
    const uint32_t from = __shfl_sync(kFullWarp, piece_.from, static_cast<int>(item)) + slot * (piece_.slot_bytes / 16);
    const uint32_t to = __shfl_sync(kFullWarp, piece_.to, static_cast<int>(item));
    const uint32_t used = __shfl_sync(kFullWarp, piece_.used, static_cast<int>(item));
    const uint32_t narrow = __shfl_sync(kFullWarp, piece_.narrow, static_cast<int>(item));
    const bool exists = own < rows_;
    return {.from = from,
            .to = to,
            .exist = P::ballot(exists),
            .ends = P::ballot(exists && slot + 1 == P::popcount(used)),
            .narrow = P::ballot(narrow != 0)};
  }
  __device__ __forceinline__ uint32_t place_of(uint32_t row) const { return memory_ + row * SumSpan::kStep; }
  // Whether this lane has a chunk of the row.
  __device__ __forceinline__ bool has(const Window& w, uint32_t row) const {
    return (w.exist >> row & 1u) != 0 && ((w.narrow >> row & 1u) == 0 || piece_.inside);
  }

  // Asks for the rows of a batch. After the last row, batches are empty.
  __device__ __forceinline__ void load(const Window& w, uint32_t batch) const {
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t row = batch * kBatch + i, from = P::broadcast(w.from, row);
      if (has(w, row)) cp_async16(place_of(row), piece_.rows + uint64_t{from} * 16);
    }
    cp_async_commit();
  }

  // Adds the rows of a batch that has arrived, and stores the sums of items that end in it.
  __device__ __forceinline__ void add(const Window& w, uint32_t batch, float (&sum)[kElements]) const {
    if ((w.exist >> batch * kBatch & 1u) == 0) return;
    uint4 chunk[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) chunk[i] = load_shared16(place_of(batch * kBatch + i));
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t row = batch * kBatch + i;
      Dtype::accumulate(sum, chunk[i]);
      if ((w.ends >> row & 1u) == 0) continue;
      const uint64_t to = P::broadcast(w.to, row);
      if (has(w, row)) *reinterpret_cast<uint4*>(piece_.out + to * 16) = Dtype::round(sum);
#pragma unroll
      for (float& each : sum) each = 0.0f;
    }
  }

  const SumPiece& piece_;
  const uint32_t memory_;
  uint32_t rows_;   // of all items
  uint32_t first_;  // number of the first row of this lane's item
};

}  // namespace flashmoe::sm90

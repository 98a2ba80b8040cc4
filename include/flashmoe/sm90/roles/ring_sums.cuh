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
      : piece_(piece),
        rows_at_(piece.rows),
        sums_at_(piece.out),
        memory_(memory + P::lane() * 16),
        first_(P::exclusive_scan(P::popcount(piece.used), rows_)) {
    // Opaque, so that an address is one multiplication and addition. The compiler would add the lane's part and the
    // array's beginning one after the other, for each row.
    asm volatile("" : "+l"(rows_at_), "+l"(sums_at_));
  }

  // The loop has one batch, although a loop of kBatches would need no advance(): its instructions fit into the cache.
  __device__ __forceinline__ void run() const {
    float sum[kElements] = {};
    Loads loads{};
    Sums sums{}, next{};
    // A batch is summed when kBatches - 1 later ones are on their way.
    FLASHMOE_NO_UNROLL
    for (uint32_t first = 0; first < align_up(rows_, kRows) + kRows; first += kBatch) {
      const uint32_t place = first % kRows;
      if (place == 0) describe(first, loads, next);
      load(loads, place);
      loads.advance();
      cp_async_wait<kBatches - 1>();
      if (place == kRows - kBatch) sums = next;
      add(sums, (place + kBatch) % kRows, sum);
      sums.advance();
    }
    cp_async_wait<0>();
  }

 private:
  // kRows rows of the piece, item after item, from the next batch on. Bit i of a mask is of the i-th row.
  struct Loads {
    uint32_t from;  // in lane i: where the i-th row is, as in SumPiece
    uint32_t mine;  // this lane has a chunk of the row

    __device__ __forceinline__ void advance() {
      from = __shfl_down_sync(kFullWarp, from, kBatch);
      mine >>= kBatch;
    }
  };
  struct Sums {
    uint32_t to;  // in lane i: where the sum of the i-th row's item goes, as in SumPiece
    uint32_t exist;
    uint32_t ends;    // the row is its item's last
    uint32_t stored;  // and this lane has a chunk of it

    __device__ __forceinline__ void advance() {
      to = __shfl_down_sync(kFullWarp, to, kBatch);
      exist >>= kBatch, ends >>= kBatch, stored >>= kBatch;
    }
  };

  // Describes rows row, row + 1, ...
  __device__ __forceinline__ void describe(uint32_t row, Loads& loads, Sums& sums) const {
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
    const uint32_t from = __shfl_sync(kFullWarp, piece_.from, static_cast<int>(item));
    const uint32_t used = __shfl_sync(kFullWarp, piece_.used, static_cast<int>(item));
    const uint32_t narrow = __shfl_sync(kFullWarp, piece_.narrow, static_cast<int>(item));
    const bool exists = own < rows_;
    sums.to = __shfl_sync(kFullWarp, piece_.to, static_cast<int>(item));
    sums.exist = P::ballot(exists);
    sums.ends = P::ballot(exists && slot + 1 == P::popcount(used));
    const uint32_t wide = P::ballot(narrow == 0);
    loads.from = from + slot * (piece_.slot_bytes / 16);
    loads.mine = piece_.inside ? sums.exist : sums.exist & wide;
    sums.stored = sums.ends & loads.mine;
  }

  // Asks for the rows of a batch, for `place` and the places behind it. After the last row, batches are empty.
  __device__ __forceinline__ void load(const Loads& loads, uint32_t place) const {
    uint32_t to = memory_ + place * SumSpan::kStep;
    asm volatile("" : "+r"(to));  // otherwise the compiler computes each row's place anew
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t from = P::broadcast(loads.from, i);
      if ((loads.mine >> i & 1u) != 0) cp_async16(to + i * SumSpan::kStep, rows_at_ + uint64_t{from} * 16);
    }
    cp_async_commit();
  }

  // Adds the rows of a batch that has arrived, and stores the sums of items that end in it.
  __device__ __forceinline__ void add(const Sums& sums, uint32_t place, float (&sum)[kElements]) const {
    if ((sums.exist & 1u) == 0) return;
    const uint32_t from = memory_ + place * SumSpan::kStep;
    uint4 chunk[kBatch];
    uint32_t to[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      chunk[i] = load_shared16(from + i * SumSpan::kStep);
      to[i] = P::broadcast(sums.to, i);
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      Dtype::accumulate(sum, chunk[i]);
      if ((sums.ends >> i & 1u) == 0) continue;
      store_if((sums.stored >> i & 1u) != 0, sums_at_ + uint64_t{to[i]} * 16, Dtype::round(sum));
      // In place. After an assignment, the compiler would copy all sums of each row that is not its item's last.
#pragma unroll
      for (float& each : sum) asm volatile("mov.b32 %0, 0;" : "+f"(each));
    }
  }

  // One predicated instruction. (For an if statement, the compiler makes a branch, and a meeting of the lanes behind it.)
  __device__ __forceinline__ static void store_if(bool stores, uint8_t* to, const uint4& v) {
    asm volatile(
        "{\n"
        ".reg .pred stores;\n"
        "setp.ne.u32 stores, %0, 0;\n"
        "@stores st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
        "}" ::"r"(stores ? 1u : 0u),
        "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
  }

  const SumPiece& piece_;
  const uint8_t* rows_at_;  // as in SumPiece
  uint8_t* sums_at_;
  const uint32_t memory_;
  uint32_t rows_;   // of all items
  uint32_t first_;  // number of the first row of this lane's item
};

}  // namespace flashmoe::sm90

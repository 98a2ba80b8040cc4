// Sums a piece of Reduce, with many more loads on their way than registers would hold. Warps use it when the tasks of
// their block are over, because the memory of the block's stages is then free. ItemSums (gpu/sum.cuh) makes the same
// bits without that memory.
//
// Run by one warp. Reads rows (this rank's workspace) and writes sums (any rank's heap) as the piece says. Rows pass
// through the warp's own memory in the stages: cp.async brings 512 bytes of a row, and each lane asks for 16 of them.
// Later each lane reads only the bytes that it asked for. So the ring of rows needs no barrier, and no lane waits for
// another. Behind the ring lies a table of addresses, which the lanes write for one another.
//
// The speed is that of instructions: a block's warps have some 35 for 512 bytes of a row. (With the addresses in
// registers, from which lanes got them by shuffles, it was a tenth to an eighth slower; with cp.async.bulk for each
// row, a third; with rows in registers, half.)
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90 {

template <class Dtype>
class RingSums {
  using P = Platform;
  static constexpr uint32_t kElements = 16 / Dtype::kBytes;
  // kBatch: rows that are waited for together. The ring has kBehind + 1 batches. kWindow: rows that are described at a
  // time, each by one lane.
  static constexpr uint32_t kBatch = 8, kBehind = 2, kWindow = P::kLanes, kOfWindow = kWindow / kBatch;
  static constexpr uint32_t kBatchBytes = kBatch * SumSpan::kStep;
  // The tables: where each row of a window is; where its item's sum goes, of two windows (both as in SumPiece); items.
  static constexpr uint32_t kFrom = (kBehind + 1) * kBatchBytes, kTo = kFrom + kWindow * 4,
                            kItems = kTo + 2 * kWindow * 4, kEnd = kItems + P::kLanes * 16;

 public:
  static constexpr uint32_t kBytes = kEnd;  // of a warp's memory

  // In each item, the slots that hold a row must come first, as in Reduce. memory: the warp's part of the stages.
  __device__ __forceinline__ RingSums(const SumPiece& piece, uint32_t memory)
      : rows_at_(piece.rows),
        sums_at_(piece.out),
        slot_chunks_(piece.slot_bytes / 16),
        memory_(memory),
        inside_(piece.inside) {
    const uint32_t rows = P::popcount(piece.used), first = P::exclusive_scan(rows, rows_);
    P::sync();  // all lanes have read the items of the piece before
    store_shared16(memory_ + kItems + P::lane() * 16, {first, piece.from, piece.to, rows << 1 | piece.narrow});
    P::sync();
    // Opaque, so that an address is one multiplication and addition. Otherwise the compiler adds the lane's part and the
    // array's beginning one after the other, for each row.
    asm volatile("" : "+l"(rows_at_), "+l"(sums_at_));
  }

  // The loop has one batch, although a loop over a window would need no shifts: so its instructions fit into the cache.
  __device__ __forceinline__ void run() const {
    float sum[kElements] = {};
    uint32_t loads = 0;  // bit i: this lane has a chunk of the i-th row from here on, in the window
    Ends ends{}, next{};
    uint32_t place = 0;
    // A batch is summed when kBehind later ones are on their way.
    FLASHMOE_NO_UNROLL
    for (uint32_t batch = 0; batch < ceil_div(rows_, kBatch) + kBehind; ++batch) {
      if (batch % kOfWindow == 0) describe(batch * kBatch, loads, next);
      load(loads, memory_ + kFrom + batch % kOfWindow * (kBatch * 4), memory_ + place * kBatchBytes + P::lane() * 16);
      loads >>= kBatch;
      place = place == kBehind ? 0 : place + 1;  // where the batch to be summed is, and the next one will be
      cp_async_wait<kBehind>();
      if (batch < kBehind) continue;
      const uint32_t summed = batch - kBehind;
      if (summed % kOfWindow == 0) ends = next;
      add(ends, memory_ + kTo + summed % (2 * kOfWindow) * (kBatch * 4), memory_ + place * kBatchBytes + P::lane() * 16,
          sum);
      ends.all >>= kBatch, ends.mine >>= kBatch;
    }
    cp_async_wait<0>();
  }

 private:
  // Bit i: the i-th row from here on, in the window, is its item's last.
  struct Ends {
    uint32_t all, mine;  // mine: those of which this lane has a chunk
  };
  // A batch's entries in a table, from `entries` on.
  struct Entries {
    uint32_t of[kBatch];

    __device__ __forceinline__ explicit Entries(uint32_t entries) {
#pragma unroll
      for (uint32_t i = 0; i < kBatch; i += 4) {
        const uint4 v = load_shared16(entries + i * 4);
        of[i] = v.x, of[i + 1] = v.y, of[i + 2] = v.z, of[i + 3] = v.w;
      }
    }
  };

  // An item of the piece: its first row, where its slot 0 and its sum are, and its rows times 2 plus `narrow`.
  __device__ __forceinline__ uint4 item(uint32_t i) const { return load_shared16(memory_ + kItems + i * 16); }

  // Describes rows row, row + 1, ...
  __device__ __forceinline__ void describe(uint32_t row, uint32_t& loads, Ends& ends) const {
    const uint32_t own = row + P::lane();
    // A row's item is the last one whose first row is not after the row. (An item without rows has the same first row
    // as the next item.)
    uint32_t i = 0;
#pragma unroll
    for (uint32_t step = P::kLanes / 2; step != 0; step /= 2) {
      if (item(i + step).x <= own) i += step;
    }
    const uint4 found = item(i);
    const uint32_t slot = own - found.x, rows = found.w >> 1;
    const uint32_t exist = P::ballot(own < rows_), wide = P::ballot((found.w & 1u) == 0);
    loads = inside_ ? exist : exist & wide;
    ends.all = exist & P::ballot(slot + 1 == rows);
    ends.mine = ends.all & loads;
    P::sync();  // all lanes have read the entries that are overwritten
    store_shared(memory_ + kFrom + P::lane() * 4, found.y + slot * slot_chunks_);
    store_shared(memory_ + kTo + own % (2 * kWindow) * 4, found.z);
    P::sync();
  }

  // Asks for the rows of a batch. After the last row, batches are empty.
  __device__ __forceinline__ void load(uint32_t loads, uint32_t entries, uint32_t to) const {
    const Entries from(entries);
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      if ((loads >> i & 1u) != 0) cp_async16(to + i * SumSpan::kStep, rows_at_ + uint64_t{from.of[i]} * 16);
    }
    cp_async_commit();
  }

  // Adds the rows of a batch that has arrived, and stores the sums of items that end in it.
  __device__ __forceinline__ void add(const Ends& ends, uint32_t entries, uint32_t from,
                                      float (&sum)[kElements]) const {
    const Entries to(entries);
    uint4 chunk[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) chunk[i] = load_shared16(from + i * SumSpan::kStep);
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      Dtype::accumulate(sum, chunk[i]);
      if ((ends.all >> i & 1u) == 0) continue;
      store_if((ends.mine >> i & 1u) != 0, sums_at_ + uint64_t{to.of[i]} * 16, Dtype::round(sum));
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

  const uint8_t* rows_at_;  // as in SumPiece
  uint8_t* sums_at_;
  const uint32_t slot_chunks_, memory_;
  const bool inside_;  // as in SumPiece
  uint32_t rows_;      // of all items
};

}  // namespace flashmoe::sm90

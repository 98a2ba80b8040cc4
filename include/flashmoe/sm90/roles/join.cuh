// Adds the two result rows of a token and writes the sum to the output y. A Joiner (actors/joiner.h) calls it, in a
// joined call (a rank alone) with two rows a token. One warp joins a row by itself. During GEMM1's tasks this is the
// second loader warp. At the end, every warp of the block joins rows.
// Reads return rows of this rank's heap. Writes y: a token's columns of one task.
// Touches no barrier and no other rank's heap, and of shared memory only reads the call's parameters. The queue of
// rows to join (shared memory) and the words that count a token's rows (workspace) are the Joiner's.
#pragma once

#include "flashmoe/actors/joiner.h"
#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// The GPU's engine of a Joiner: a block is a processor, its warps are the workers.
template <class Dtype, class Trace>
class JoinEngine : public Spans<Trace> {
  using P = Platform;

 public:
  // Rows that are joined together. A lane has two loads in flight for each, and registers allow no more.
  static constexpr uint32_t kJoinedAtOnce = Dtype::kBytes == 2 ? 6 : 4;

  __device__ __forceinline__ JoinEngine(const KernelArgs& args, const Call& call, const Trace& trace)
      : Spans<Trace>(trace), args_(args), c_(call) {}

  // Adds the two rows of each late row that the first `count` lanes name, and writes the output.
  __device__ __forceinline__ void join(uint32_t row, uint32_t count) const {
    constexpr uint32_t kColumnBytes = kTaskFeatures * Dtype::kBytes, kStep = 32 * 16;
    // Looked up once: otherwise the compiler reads the call again after every load.
    const uint8_t* const rows = c_.return_row(c_.rank, 0, 0);
    const auto& stride = c_.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    const auto token_bytes = static_cast<uint32_t>(stride[0]), slot_bytes = static_cast<uint32_t>(stride[1]);
    const uint32_t out_bytes = c_.shape.hidden * Dtype::kBytes;
    uint32_t token[kJoinedAtOnce], at[kJoinedAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kJoinedAtOnce; ++i) {  // beyond `count`, the last late row again
      const uint32_t r = P::broadcast(row, min_of(i, count - 1));
      token[i] = LateRow::token(r);
      at[i] = LateRow::column(r) * kColumnBytes + P::lane() * 16;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < kColumnBytes / kStep; ++step) {
      uint4 piece[kJoinedAtOnce][2];
#pragma unroll
      for (uint32_t i = 0; i < kJoinedAtOnce; ++i) {
        const uint8_t* const from = rows + uint64_t{token[i]} * token_bytes + at[i];
        piece[i][0] = piece[i][1] = {};
        if (at[i] >= out_bytes) continue;
        piece[i][0] = load_once(from);
        piece[i][1] = load_once(from + slot_bytes);
      }
#pragma unroll
      for (uint32_t i = 0; i < kJoinedAtOnce; ++i) {
        float sum[16 / Dtype::kBytes] = {};
        Dtype::accumulate(sum, piece[i][0]);
        Dtype::accumulate(sum, piece[i][1]);
        if (at[i] < out_bytes) {
          *reinterpret_cast<uint4*>(args_.out + uint64_t{token[i]} * out_bytes + at[i]) = Dtype::round(sum);
        }
        at[i] += kStep;
      }
    }
  }

 private:
  const KernelArgs& args_;
  const Call& c_;
};
static_assert(JoinsRows<JoinEngine<Bf16, Tracer<false, 32>>>);

}  // namespace flashmoe::sm90

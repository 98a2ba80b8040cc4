// Sends the rows of a few tokens to the other ranks of a group (decode/send.cuh), and quantises them to e4m3 on the
// way.
//
// All threads of the blocks that build packets run it. It reads x, and its scales if x has some. It stores to peers'
// heaps and, for the own experts, behind the own workspace (Call::out_row). It needs no shared memory.
#pragma once

#include "flashmoe/sm90/decode/rows_quantised.cuh"
#include "flashmoe/sm90/decode/send.cuh"

namespace flashmoe::sm90::few {

// All threads: quantise the rows of token block n, from x in type From, and store them to all other ranks, and to this
// rank's own memory (Call::out_row), where all its blocks read them. So where an expert is changes no bit, and no row
// is quantised twice. A thread has 16 elements at a time, and 8 neighbouring threads have the elements that share a
// scale.
template <class From>
__device__ __forceinline__ void quantise_rows(const Block& b, uint32_t n) {
  constexpr uint32_t kAtOnce = 4;
  const Call& c = b.c;
  const uint32_t hidden = c.shape.hidden, blocks = scale_blocks(hidden), of_row = blocks * kParts;
  const uint32_t first = n << c.policy.log2_block, all = c.tokens_in_block(n) * of_row;
  const uint32_t pitch = sent_row_pitch(c);
  for (uint32_t base = 0; base < all; base += kAtOnce * kFewThreads) {
    RowPart<From> parts[kAtOnce];
    uint32_t row[kAtOnce], column[kAtOnce];  // row within the token block
    float scale[kAtOnce], largest[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint32_t i = min_of(base + j * kFewThreads + threadIdx.x, all - 1);
      row[j] = i / of_row;
      const uint64_t token = first + row[j];
      column[j] = i % of_row * kPartElements;
      parts[j] = {};
      if (column[j] < hidden) parts[j].load(b.args.x + token * b.args.x_row_bytes + column[j] * From::kBytes);
      if constexpr (RowPart<From>::kGiven) scale[j] = b.args.x_scale[token * blocks + column[j] / kScaleBlock];
    }
    largest_of_blocks(parts, largest);
    uint4 elements[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const BlockScale of_block(largest[j]);
      elements[j] = parts[j].packed(of_block.inverse);
      if constexpr (!RowPart<From>::kGiven) scale[j] = of_block.scale;
    }
    for (uint32_t i = 1; i <= c.shape.ranks; ++i) {
      const uint32_t q = (c.rank + i) % c.shape.ranks;
      uint8_t* const rows = q == c.rank ? c.out_row(first) : c.dispatched_row(q, c.rank, first);
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (base + j * kFewThreads + threadIdx.x >= all) break;
        uint8_t* const to = rows + row[j] * pitch;
        if (column[j] < hidden) *reinterpret_cast<uint4*>(to + column[j]) = elements[j];
        if (column[j] % kScaleBlock != 0) continue;
        reinterpret_cast<float*>(to + scales_offset(hidden))[column[j] / kScaleBlock] = scale[j];
      }
    }
  }
}

}  // namespace flashmoe::sm90::few

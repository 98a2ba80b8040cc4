// Sends the rows of a few tokens to the other ranks of a group (sm90/decode/group.cuh). The blocks that build the
// packets run it.
//
// Rows go to all ranks before any expert is chosen, because most ranks need most of them. So rows are on their way
// while logits are computed. A rank does not read a row that none of its entries names. The same block later signals
// the packet, with a release that covers the rows.
//
// All threads of these blocks run it. It reads x, stores to peers' heaps, and needs no shared memory.
#pragma once

#include "flashmoe/sm90/decode/block.cuh"

namespace flashmoe::sm90::few {

// Whether the block builds any packets, see for_own_token_blocks().
__device__ __forceinline__ bool builds_packets(const Block& b) {
  return gridDim.x - 1 - blockIdx.x < b.c.blocks();
}

// Calls f(n) for each token block n whose packets this block builds. The last thread blocks build packets, because the
// first ones compute logits.
template <class F>
__device__ __forceinline__ void for_own_token_blocks(const Block& b, F&& f) {
  for (uint32_t n = gridDim.x - 1 - blockIdx.x; n < b.c.blocks(); n += gridDim.x) f(n);
}

// Bytes from a row to the next one in the heap of the rank to which rows are sent, which are the same on any rank. (If
// each store computed its address anew, everything that it is made of would be loaded again after the store before.)
__device__ __forceinline__ uint32_t sent_row_pitch(const Call& c) {
  return static_cast<uint32_t>(c.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kRows)][1]);
}

// All threads: copy the rows of token block n to all other ranks. A thread loads 16 bytes once and stores them to all
// of these ranks, so that the stores begin soon: packets are built only after them.
__device__ __forceinline__ void copy_rows(const Block& b, uint32_t n) {
  constexpr uint32_t kAtOnce = 6;  // pieces of 16 bytes of a thread: eight rows of 2048 elements take one round trip
  const Call& c = b.c;
  const uint32_t chunks = c.memory.token_row_bytes / 16, all = c.tokens_in_block(n) * chunks;
  const uint32_t first = n << c.policy.log2_block;
  const uint32_t pitch = sent_row_pitch(c);
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < all; base += kAtOnce * kFewThreads) {
    uint4 pieces[kAtOnce];
    uint32_t to[kAtOnce];  // bytes from the token block's first row
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint32_t i = min_of(base + j * kFewThreads, all - 1), row = i / chunks, chunk = i % chunks;
      to[j] = row * pitch + chunk * 16;
      pieces[j] = load_row16(b.args.x + (first + row) * b.args.x_row_bytes + chunk * 16);
    }
#pragma unroll 1
    for (uint32_t i = 1; i < c.shape.ranks; ++i) {
      uint8_t* const rows = c.dispatched_row((c.rank + i) % c.shape.ranks, c.rank, first);
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        if (base + j * kFewThreads < all) *reinterpret_cast<uint4*>(rows + to[j]) = pieces[j];
      }
    }
  }
}

}  // namespace flashmoe::sm90::few

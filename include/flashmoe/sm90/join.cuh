// Joined return: no combine. Where a token has two rows at most and all of them are computed here, whoever finds that a row
// is the later one of its token has the two added and the output written, while other tasks run. Else every block would have
// nothing but combines to do after its last GEMM1 task.
//
// A word per token and column of tasks counts what has been stored of the token's rows: a task of all its features adds 2,
// each block of a pair that halves them 1. Who brings it to 4 is last, and resets it. The sum of two does not depend on which
// came first: the bits are those of combine.
#pragma once

#include "flashmoe/gpu/sum.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// The block's late rows, in shared memory: a queue that one warp fills and any warp empties, by atomics throughout.
struct LateRows {
  static constexpr uint32_t kCapacity = 512;

  uint32_t row[kCapacity];  // token, and column of tasks << 16
  uint32_t found, taken;    // ever put in the queue, and taken out of it
  uint32_t closed;          // 1: no more will be found

  // One thread, before the block's first synchronization.
  __device__ void init() { found = taken = closed = 0; }
};

// One warp's side of it. All functions by all lanes.
template <class Dtype, class Trace>
class Joiner {
  using P = Platform;

 public:
  __device__ __forceinline__ Joiner(const KernelArgs& args, const Call& call, LateRows& late, const Trace& trace)
      : args_(args), c_(call), late_(late), trace_(trace) {}

  // Joins a few late rows; false if there are none.
  __device__ __forceinline__ bool step() {
    uint32_t first = 0, count = 0;
    if (P::lane() == 0) {
      first = look(late_.taken);
      count = min_of(look(late_.found) - first, kAtOnce);
    }
    first = P::broadcast(first, 0);
    count = P::broadcast(count, 0);
    if (count == 0) return false;
    __threadfence_block();
    // Read before they are taken: the filling warp overwrites nothing that is not.
    uint32_t row = 0;
    if (P::lane() < count) row = look(late_.row[(first + P::lane()) % LateRows::kCapacity]);
    P::sync();
    const bool mine = P::lane() == 0 && atomicCAS(&late_.taken, first, first + count) == first;
    if (P::ballot(mine) == 0) return true;  // another warp has taken some of them
    trace_.begin();
    join(row, count);
    row = P::broadcast(row, 0);
    trace_.end(Phase::kCombine, (row & kTokenBits) >> c_.log2_block, row >> 16);
    return true;
  }

  // Until no more will be found.
  __device__ __forceinline__ void run() {
    while (true) {
      const bool closed = P::broadcast(P::lane() == 0 ? look(late_.closed) : 0u, 0) != 0;
      if (step()) continue;
      if (closed) return;
      __nanosleep(500);
    }
  }

  // The warp that fills the queue: records rows that the block's consumers have stored, and finds the late ones. tokens:
  // whose they are. part: what the task adds.
  template <uint32_t kMost>
  __device__ __forceinline__ void find(const uint32_t (&tokens)[kMost], uint32_t rows, uint32_t column, uint32_t part) {
    constexpr uint32_t kEach = kMost / P::kLanes, kAll = 4;
    uint32_t found = P::broadcast(P::lane() == 0 ? look(late_.found) : 0u, 0);
    while (P::broadcast(P::lane() == 0 ? found - look(late_.taken) : 0u, 0) > LateRows::kCapacity - kMost) step();
    uint32_t* const words = c_.joint_word(column, 0);
    uint32_t token[kEach], stored[kEach] = {};
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) token[i] = tokens[P::lane() + i * P::kLanes];
    P::release_fence(kDevice);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (P::lane() + i * P::kLanes < rows) stored[i] = part + P::fetch_add(words + token[i], part);
    }
    P::acquire_fence(kDevice);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const bool late = stored[i] == kAll;
      uint32_t total;
      const uint32_t place = found + count_before<P>(late, total);
      found += total;
      if (!late) continue;
      P::store_relaxed(words + token[i], 0u);
      atomicExch(&late_.row[place % LateRows::kCapacity], token[i] | column << 16);
    }
    __threadfence_block();
    P::sync();
    if (P::lane() == 0) atomicExch(&late_.found, found);
  }

  // Nothing will be found any more.
  __device__ __forceinline__ void close() {
    if (P::lane() == 0) atomicExch(&late_.closed, 1u);
  }

 private:
  static constexpr uint32_t kTokenBits = kMaxJoinedTokens - 1;
  // Rows of a step, twice as many loads of a lane on their way. As registers allow.
  static constexpr uint32_t kAtOnce = Dtype::kBytes == 2 ? 6 : 4;

  __device__ __forceinline__ static uint32_t look(uint32_t& word) { return atomicOr(&word, 0u); }

  // Adds the rows that the first `count` lanes name.
  __device__ __forceinline__ void join(uint32_t row, uint32_t count) {
    constexpr uint32_t kColumnBytes = kTaskFeatures * Dtype::kBytes, kStep = 32 * 16;
    // Looked up once: behind every load the compiler would read again what the call says.
    const uint8_t* const rows = c_.return_row(c_.rank, 0, 0);
    const auto& stride = c_.heap_layout.stride[static_cast<uint32_t>(HeapField::kReturnRows)];
    const auto token_bytes = static_cast<uint32_t>(stride[0]), slot_bytes = static_cast<uint32_t>(stride[1]);
    const uint32_t out_bytes = c_.hidden * Dtype::kBytes;
    uint32_t token[kAtOnce], at[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {  // too few: the last one more than once
      const uint32_t r = P::broadcast(row, min_of(i, count - 1));
      token[i] = r & kTokenBits;
      at[i] = (r >> 16) * kColumnBytes + P::lane() * 16;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < kColumnBytes / kStep; ++step) {
      uint4 piece[kAtOnce][2];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint8_t* const from = rows + uint64_t{token[i]} * token_bytes + at[i];
        piece[i][0] = piece[i][1] = {};
        if (at[i] >= out_bytes) continue;
        piece[i][0] = load_once(from);
        piece[i][1] = load_once(from + slot_bytes);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
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

  const KernelArgs& args_;
  const Call& c_;
  LateRows& late_;
  const Trace& trace_;
};

}  // namespace flashmoe::sm90

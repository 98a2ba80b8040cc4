// Which part of a product's accumulators a thread of a consumer warpgroup has. Epilogues use it.
#pragma once

#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::sm90 {

using namespace gpu;

// A consumer thread's place: its warpgroup (0 or 1), its warp among the four of the warpgroup, and its lane. tokens:
// if rows of the accumulators are tokens (kTokensDown), the warpgroup's first token is number 64 * tokens of the
// block.
struct Lane {
  uint32_t group, warp, lane, tokens;

  // The thread's number is read anew, because the mainloop's accumulators leave no register to keep it.
  static __device__ __forceinline__ Lane of_thread(uint32_t group, uint32_t tokens) {
    const uint32_t thread = thread_anew();
    return {group, thread / 32 % 4, thread % 32, tokens};
  }
  static __device__ __forceinline__ Lane of_thread(uint32_t group) { return of_thread(group, group); }
  __device__ __forceinline__ uint32_t row() const { return lane / 4; }        // of each 8 rows
  __device__ __forceinline__ uint32_t token() const { return lane % 4 * 2; }  // of each 8 tokens: this one and the next
};

}  // namespace flashmoe::sm90

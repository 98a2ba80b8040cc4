// Rows of weights times a few tokens' rows, in fp32 on the CUDA cores. It takes no longer than reading the weights, if
// these are multiplied by all tokens, up to kFewTokens, as fast as they come: at 19 bytes a clock and SM, a lane has 13
// instructions for each element.
#pragma once

#include <utility>

#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/protocol/heap_layout.h"

namespace flashmoe::gpu {

namespace detail {

// Weights: loaded once, by one SM, and never written while the kernel runs.
__device__ __forceinline__ uint4 load_weights16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// Tokens' rows: loaded by every warp of an SM; maybe written earlier in this kernel.
__device__ __forceinline__ uint4 load_operand16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

}  // namespace detail

// One warp's jobs first, first + apart, ... below last. A job is kRows rows of weights times some tokens. A lane has
// every 32nd chunk of 16 bytes of a row. A step is 4 KiB of a warp's weights; while they are multiplied, the next
// step's, of this job or the next, are on their way.
//
// Jobs says what the rows are and takes the sums:
//   uint32_t chunks()                             chunks of a row
//   Job job(i)                                    what the functions below need of the i-th job
//   const uint8_t* weights(job, row)
//   uint32_t tokens(job)                          1 .. kFewTokens
//   const uint8_t* operands(), uint32_t operand(job, token)
//                                                 a token's row begins 16 * operand() bytes behind operands()
//   void finish(job, token, const float (&sum)[kRows])    by one lane for each token
template <class Dtype, uint32_t kRows, class Jobs>
class Dots {
 public:
  __device__ __forceinline__ Dots(const Jobs& jobs, uint32_t first, uint32_t last, uint32_t apart)
      : jobs_(jobs), next_job_(first), last_(last), apart_(apart) {}

  // Starts to load the first step.
  __device__ __forceinline__ void begin() {
    if (next_job_ < last_) load();
  }
  // After begin().
  __device__ __forceinline__ void run() {
    while (next_job_ < last_) run_job();
  }

 private:
  static constexpr uint32_t kDeep = 8 / kRows;  // chunks of a row in a step, of a lane
  static constexpr uint32_t kElements = 16 / Dtype::kBytes;
  using Job = decltype(std::declval<Jobs>().job(0));
  using Weights = uint4[kRows][kDeep];
  using Sums = float[kRows][kFewTokens];

  __device__ __forceinline__ static uint32_t chunk(uint32_t step, uint32_t d) {
    return (step * kDeep + d) * 32 + Platform::lane();
  }
  __device__ __forceinline__ void load() {
    const Job job = jobs_.job(next_job_);
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint8_t* const row = jobs_.weights(job, r);
#pragma unroll
      for (uint32_t d = 0; d < kDeep; ++d) {
        const uint32_t c = chunk(next_step_, d);
        next_[r][d] = {};
        if (c < jobs_.chunks()) next_[r][d] = detail::load_weights16(row + c * 16);
      }
    }
  }

  __device__ __forceinline__ void run_job() {
    const Job job = jobs_.job(next_job_);
    const uint32_t tokens = jobs_.tokens(job), steps = ceil_div(jobs_.chunks(), kDeep * 32);
    uint32_t operand[kFewTokens];
#pragma unroll
    for (uint32_t n = 0; n < kFewTokens; ++n) operand[n] = jobs_.operand(job, n < tokens ? n : 0);
    Sums sum = {};
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      Weights weights;
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (uint32_t d = 0; d < kDeep; ++d) weights[r][d] = next_[r][d];
      }
      next_step_ = step + 1 == steps ? 0 : step + 1;
      if (next_step_ == 0) next_job_ += apart_;
      begin();
#pragma unroll
      for (uint32_t d = 0; d < kDeep; ++d) {
        if (chunk(step, d) < jobs_.chunks()) multiply(weights, d, operand, tokens, chunk(step, d), sum);
      }
    }
    finish(job, tokens, sum);
  }

  // Chunk d of each row by the tokens' chunks `at`.
  __device__ __forceinline__ void multiply(const Weights& weights, uint32_t d, const uint32_t (&operand)[kFewTokens],
                                           uint32_t tokens, uint32_t at, Sums& sum) const {
    float wide[kRows][kElements];
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) Dtype::spread(wide[r], weights[r][d]);
#pragma unroll
    for (uint32_t n = 0; n < kFewTokens; ++n) {
      if (n >= tokens) break;
      float v[kElements];
      Dtype::spread(v, detail::load_operand16(jobs_.operands() + uint64_t{operand[n] + at} * 16));
#pragma unroll
      for (uint32_t i = 0; i < kElements; ++i) {
#pragma unroll
        for (uint32_t r = 0; r < kRows; ++r) sum[r][n] = fmaf(wide[r][i], v[i], sum[r][n]);
      }
    }
  }

  __device__ __forceinline__ void finish(const Job& job, uint32_t tokens, Sums& sum) const {
    float mine[kRows];
#pragma unroll
    for (uint32_t n = 0; n < kFewTokens; ++n) {
      if (n >= tokens) break;
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (uint32_t apart = 16; apart != 0; apart /= 2) {
          sum[r][n] += __shfl_xor_sync(kFullWarp, sum[r][n], apart);
        }
        if (Platform::lane() == n) mine[r] = sum[r][n];
      }
    }
    if (Platform::lane() < tokens) jobs_.finish(job, Platform::lane(), mine);
  }

  const Jobs& jobs_;
  uint32_t next_job_, next_step_ = 0;  // the step whose weights are on their way, and its job
  uint32_t last_, apart_;
  Weights next_;
};

}  // namespace flashmoe::gpu

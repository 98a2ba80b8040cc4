// The mainloop of 16-bit products over an expert's rows (gradients/weights.cuh). Both operands are MN-major. A stage
// has 64 rows of both, in spans of 64 columns:
//   at 0       4 spans, the task's 256 columns
//   at 32 KiB  2 spans, one for each consumer warpgroup
#pragma once

#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/wgmma.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kStageRows = kSpanRows;
inline constexpr uint32_t kGroupSpansAt = kTaskFeatures / kSpanColumns * kSpanBytes;
static_assert(kGroupSpansAt + kConsumers * kSpanBytes == kStageBytes);

namespace detail {

// As multiply_stage() in machine/mainloop.cuh.
template <class Dtype, bool kFirst>
__device__ __forceinline__ void multiply_rows_of_stage(const Pipeline& ring, uint64_t a, uint64_t b,
                                                       float (&acc)[128]) {
  constexpr uint32_t kStep = kWgmmaBytes / Dtype::kBytes * kRowBytes;  // 16 rows: a wgmma's K
  wait(ring.full(), ring.parity);
  fence_proxy_async_shared();  // cp.async writes through the generic proxy
  wgmma_fence();
  const uint64_t stage = descriptor_step(ring.stage * Pipeline::kBytes);
#pragma unroll
  for (uint32_t k = 0; k < kSpanBytes; k += kStep) {
    Wgmma<Dtype, 256, Major::kMn, Major::kMn>::issue(acc, a + stage + descriptor_step(k),
                                                     b + stage + descriptor_step(k), !kFirst || k != 0);
  }
  wgmma_commit();
}

}  // namespace detail

// acc = the sum of products over the rows of `stages` stages: the warpgroup's 64 columns by the task's 256 columns.
template <class Dtype>
__device__ __forceinline__ void multiply_rows(Pipeline& ring, uint32_t group, uint32_t stages, float (&acc)[128]) {
  const uint64_t a = mn_major_descriptor<kSpanBytes>(ring.stages + kGroupSpansAt + group * kSpanBytes);
  const uint64_t b = mn_major_descriptor<kSpanBytes>(ring.stages);
  detail::multiply_rows_of_stage<Dtype, true>(ring, a, b, acc);
  uint32_t in_flight = ring.empty();
  ring.advance();
#pragma unroll 1
  for (uint32_t s = 1; s < stages; ++s) {
    detail::multiply_rows_of_stage<Dtype, false>(ring, a, b, acc);
    wgmma_wait<1>();
    release_stage<Dtype, Wide>(in_flight);
    in_flight = ring.empty();
    ring.advance();
  }
  wgmma_wait<0>();
  pin_accumulators(acc);
  release_stage<Dtype, Wide>(in_flight);
}

}  // namespace flashmoe::sm90

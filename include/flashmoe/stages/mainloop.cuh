// Consumer warpgroups: a task's product, 64 features by N tokens each, out of the stages that the producer fills.
#pragma once

#include "flashmoe/sm90/pipeline.cuh"
#include "flashmoe/sm90/wgmma.cuh"

namespace flashmoe::sm90 {

// Calls f, a lambda `[&]<uint32_t N>() {..}`, with the smallest N that covers `rows` tokens. In steps of 32 from 32 on:
// wgmma's time goes with N, its code does not shrink. Two k-blocks per stage up to N = 64, one above.
template <class F>
__device__ __forceinline__ void with_tokens(uint32_t rows, F&& f) {
  if (rows <= 8) return f.template operator()<8>();
  if (rows <= 16) return f.template operator()<16>();
  switch (ceil_div(rows, 32u)) {
    case 1: return f.template operator()<32>();
    case 2: return f.template operator()<64>();
    case 3: return f.template operator()<96>();
    case 4: return f.template operator()<128>();
    case 5: return f.template operator()<160>();
    case 6: return f.template operator()<192>();
    case 7: return f.template operator()<224>();
    default: return f.template operator()<256>();
  }
}

namespace detail {

// Issues the products of one stage as one group, not waited for. kFirst: the first overwrites acc. That this is known
// at compile time matters: else ptxas sees accumulators read that nothing wrote, keeps those of all N alive from task
// to task, and runs out of registers.
template <class Dtype, uint32_t N, uint32_t kBlocks, bool kFirst>
__device__ __forceinline__ void multiply_stage(const Pipeline& ring, uint64_t features, uint64_t tokens, bool gathered,
                                               float (&acc)[N / 2]) {
  wait(ring.full(), ring.parity);
  // cp.async writes through the generic proxy, wgmma reads through the async proxy.
  if (gathered) fence_proxy_async_shared();
  wgmma_fence();
  const uint64_t stage = descriptor_step(ring.stage * kStageBytes);
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (uint32_t k = 0; k < kRowBytes; k += kWgmmaBytes) {
      const uint64_t f = features + stage + descriptor_step(feature_offset(b) + k);
      const uint64_t t = tokens + stage + descriptor_step(b * kSmallTile * kRowBytes + k);
      Wgmma<Dtype, N>::issue(acc, f, t, !kFirst || b + k != 0);
    }
  }
  wgmma_commit();
}

__device__ __forceinline__ float4 load_shared4(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
// Where chunk `chunk` of a row lies. Eight rows further it lies 8 kRowBytes further.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, uint32_t row, uint32_t chunk) {
  return tile + row * kRowBytes + (chunk ^ row % 8) * 16;
}
__device__ __forceinline__ float dot(float sum, const float4& a, const float4& b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// The products of one stage without the tensor cores, in the same places of acc: a thread has features r and r + 8, and
// of each 8 tokens two. Its operands are rows of shared memory that 8 and 4 lanes of a warp read alike.
template <uint32_t N, uint32_t kBlocks>
__device__ __forceinline__ void multiply_stage_exactly(const Pipeline& ring, uint32_t group, float (&acc)[N / 2]) {
  const uint32_t thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const uint32_t feature = group * kGroupFeatures + thread / 32 * 16 + lane / 4, token = lane % 4 * 2;
#pragma unroll 1
  for (uint32_t i = 0; i < kBlocks * (kRowBytes / 16); ++i) {
    const uint32_t block = i / (kRowBytes / 16), chunk = i % (kRowBytes / 16);
    const uint32_t features = chunk_address(ring.data() + feature_offset(block), feature, chunk);
    const uint32_t tokens = ring.data() + token_offset(kBlocks, block);
    const uint32_t even = chunk_address(tokens, token, chunk), odd = chunk_address(tokens, token + 1, chunk);
    const float4 low = load_shared4(features), high = load_shared4(features + 8 * kRowBytes);
#pragma unroll
    for (uint32_t j = 0; j < N / 8; ++j) {
      const float4 x = load_shared4(even + j * 8 * kRowBytes), y = load_shared4(odd + j * 8 * kRowBytes);
      acc[4 * j] = dot(acc[4 * j], low, x);
      acc[4 * j + 1] = dot(acc[4 * j + 1], low, y);
      acc[4 * j + 2] = dot(acc[4 * j + 2], high, x);
      acc[4 * j + 3] = dot(acc[4 * j + 3], high, y);
      if (j % 4 == 3) __syncwarp();  // else ptxas loads so far ahead that it spills
    }
  }
}

template <uint32_t N, uint32_t kBlocks>
__device__ __forceinline__ void multiply_exactly(Pipeline& ring, uint32_t group, uint32_t stages, float (&acc)[N / 2]) {
#pragma unroll
  for (uint32_t i = 0; i < N / 2; ++i) acc[i] = 0.0f;
#pragma unroll 1
  for (uint32_t s = 0; s < stages; ++s) {
    wait(ring.full(), ring.parity);
    multiply_stage_exactly<N, kBlocks>(ring, group, acc);
    named_barrier_sync(1 + group);  // every thread has read the stage
    if (threadIdx.x % kWarpgroup == 0) arrive(ring.empty());
    ring.advance();
  }
}

}  // namespace detail

// acc = features * tokens^T over all K. `group` is 0 or 1: which 64 of the 128 features. `gathered`: the tokens were
// written by cp.async. All 128 threads of the warpgroup, converged. One group of wgmma stays in flight while the next
// is issued: a stage is released when the one after it is under way.
template <class Dtype, uint32_t N, uint32_t kBlocks = k_blocks_per_stage(N)>
__device__ __forceinline__ void multiply(Pipeline& ring, uint32_t group, uint32_t k_bytes, bool gathered,
                                         float (&acc)[N / 2]) {
  const uint32_t stages = stages_of_task(k_bytes, kBlocks);
  if constexpr (Dtype::kTensorCores) {
    const bool elected = threadIdx.x % kWarpgroup == 0;
    const uint64_t features = matrix_descriptor(ring.stages + group * kGroupFeatures * kRowBytes);
    const uint64_t tokens = matrix_descriptor(ring.stages + token_offset(kBlocks, 0));
    detail::multiply_stage<Dtype, N, kBlocks, true>(ring, features, tokens, gathered, acc);
    uint32_t in_flight = ring.empty();
    ring.advance();
#pragma unroll 1
    for (uint32_t s = 1; s < stages; ++s) {
      detail::multiply_stage<Dtype, N, kBlocks, false>(ring, features, tokens, gathered, acc);
      wgmma_wait<1>();
      if (elected) arrive(in_flight);
      in_flight = ring.empty();
      ring.advance();
    }
    wgmma_wait<0>();
    pin_accumulators(acc);
    if (elected) arrive(in_flight);
  } else {
    detail::multiply_exactly<N, kBlocks>(ring, group, stages, acc);
  }
}

}  // namespace flashmoe::sm90

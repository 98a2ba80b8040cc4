// From a token's router logits to its experts: softmax over all E, the K largest (ties: the lower expert), optionally
// renormalised to sum 1 (FlashDMoE, equation 5.1).
#pragma once

#include "flashmoe/sm90/platform.cuh"

namespace flashmoe::stages {

// Monotonic in the float's value; 0 is below every number.
__device__ __forceinline__ uint32_t order_key(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// One warp, one token. A lane has the experts lane, lane + 32, ... of logits[E], at most kPerLane of them. False if one is
// not finite.
template <uint32_t kPerLane>
__device__ __forceinline__ bool choose_among(const float* logits, uint32_t experts, uint32_t top_k, bool renormalize,
                                             int32_t* ids, float* weights) {
  using P = sm90::Platform;
  const uint32_t lane = P::lane();
  uint32_t key[kPerLane];  // 0: chosen already, or no expert
  bool finite = true;
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) {
    const bool exists = i * 32 + lane < experts;
    const float v = exists ? logits[i * 32 + lane] : 0.0f;
    finite &= isfinite(v);
    key[i] = exists ? order_key(v) : 0;
  }
  if (P::ballot(!finite) != 0) return false;

  float largest = 0.0f, mine = 0.0f;  // mine: logit of the lane-th choice
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t best = 0, expert = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {  // the first of equals
      if (key[i] > best) {
        best = key[i];
        expert = i * 32 + lane;
      }
    }
    const uint32_t top = __reduce_max_sync(sm90::kFullWarp, best);
    const uint32_t winner = __reduce_min_sync(sm90::kFullWarp, best == top ? expert : 0xffffffffu);
    if (k == 0) largest = value_of(top);
    if (lane == k) {
      ids[k] = static_cast<int32_t>(winner);
      mine = value_of(top);
    }
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) key[i] = winner == i * 32 + lane ? 0 : key[i];
  }
  // The normalisation over all experts cancels where the chosen ones are normalised.
  float sum = 0.0f;
  if (renormalize) {
    sum = lane < top_k ? expf(mine - largest) : 0.0f;
  } else {
    for (uint32_t e = lane; e < experts; e += 32) sum += expf(logits[e] - largest);
  }
#pragma unroll
  for (uint32_t d = 16; d != 0; d /= 2) sum += __shfl_xor_sync(sm90::kFullWarp, sum, d);
  if (lane < top_k) weights[lane] = expf(mine - largest) / sum;
  return true;
}

__device__ __forceinline__ bool choose_experts(const float* logits, uint32_t experts, uint32_t top_k, bool renormalize,
                                               int32_t* ids, float* weights) {
  if (experts <= 64) return choose_among<2>(logits, experts, top_k, renormalize, ids, weights);
  if (experts <= 128) return choose_among<4>(logits, experts, top_k, renormalize, ids, weights);
  if (experts <= 512) return choose_among<16>(logits, experts, top_k, renormalize, ids, weights);
  return choose_among<32>(logits, experts, top_k, renormalize, ids, weights);
}

}  // namespace flashmoe::stages

// From tokens' router logits to their experts: softmax over all E, the K largest (ties: the lower expert), optionally
// renormalised to sum 1 (FlashDMoE, equation 5.1).
#pragma once

#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// A key that grows with the float's value; 0 is below every number's.
__device__ __forceinline__ uint32_t order_key(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// A token's logits, and where its chosen experts and their weights go.
struct TokenChoice {
  const float* logits;  // [E]
  int32_t* ids;         // [K]
  float* weights;       // [K]
};

// One warp chooses for kTokens tokens side by side: for each, a chain of reductions over the warp, whose latencies the
// other tokens' chains fill. A lane has the experts lane, lane + 32, ... of each token, at most kPerLane of them. Bit t
// of what it returns: a logit of the t-th token is not finite, and nothing is chosen for it.
template <uint32_t kPerLane, uint32_t kTokens>
__device__ __forceinline__ uint32_t choose_among(const TokenChoice (&token)[kTokens], uint32_t experts, uint32_t top_k,
                                                 bool renormalize) {
  using P = Platform;
  const uint32_t lane = P::lane();
  uint32_t key[kTokens][kPerLane];  // 0: chosen already, or no expert
  uint32_t bad = 0;
#pragma unroll
  for (uint32_t t = 0; t < kTokens; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      const bool exists = i * 32 + lane < experts;
      const float v = exists ? token[t].logits[i * 32 + lane] : 0.0f;
      if (!isfinite(v)) bad |= 1u << t;
      key[t][i] = exists ? order_key(v) : 0;
    }
  }
  bad = __reduce_or_sync(kFullWarp, bad);

  float largest[kTokens], mine[kTokens];  // mine: logit of the lane-th choice
  uint32_t chosen[kTokens];               // the lane-th choice
#pragma unroll 1
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t top[kTokens], expert[kTokens];
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) {
      uint32_t best = 0;
      expert[t] = 0;
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) {  // the first of equals
        if (key[t][i] > best) {
          best = key[t][i];
          expert[t] = i * 32 + lane;
        }
      }
      top[t] = __reduce_max_sync(kFullWarp, best);
      expert[t] = best == top[t] ? expert[t] : 0xffffffffu;
    }
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) {
      const uint32_t winner = __reduce_min_sync(kFullWarp, expert[t]);
      if (k == 0) largest[t] = value_of(top[t]);
      if (lane == k) {
        chosen[t] = winner;
        mine[t] = value_of(top[t]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) key[t][i] = winner == i * 32 + lane ? 0 : key[t][i];
    }
  }
  // Where the chosen weights are renormalised, the softmax's sum over all experts cancels: theirs is enough.
  float sum[kTokens];
#pragma unroll
  for (uint32_t t = 0; t < kTokens; ++t) {
    mine[t] = lane < top_k ? expf(mine[t] - largest[t]) : 0.0f;
    sum[t] = mine[t];
    if (!renormalize) {
      sum[t] = 0.0f;
      for (uint32_t e = lane; e < experts; e += 32) sum[t] += expf(token[t].logits[e] - largest[t]);
    }
  }
#pragma unroll
  for (uint32_t d = 16; d != 0; d /= 2) {
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) sum[t] += __shfl_xor_sync(kFullWarp, sum[t], d);
  }
#pragma unroll
  for (uint32_t t = 0; t < kTokens; ++t) {
    if (lane >= top_k || (bad >> t & 1u)) continue;
    token[t].ids[lane] = static_cast<int32_t>(chosen[t]);
    token[t].weights[lane] = mine[t] / sum[t];
  }
  return bad;
}

template <uint32_t kTokens>
__device__ __forceinline__ uint32_t choose_experts(const TokenChoice (&token)[kTokens], uint32_t experts,
                                                   uint32_t top_k, bool renormalize) {
  if (experts <= 64) return choose_among<2>(token, experts, top_k, renormalize);
  if (experts <= 128) return choose_among<4>(token, experts, top_k, renormalize);
  if (experts <= 512) return choose_among<16>(token, experts, top_k, renormalize);
  return choose_among<32>(token, experts, top_k, renormalize);
}

// The same where there are at most kFewLanes experts: so many lanes have a token, and a warp chooses for four in the
// time of one. `token`: the one of this lane, the warp's number lane / kFewLanes; logits null: none. Returns only the
// first bit that choose_among() would.
inline constexpr uint32_t kFewLanes = 8;

__device__ __forceinline__ uint32_t choose_few(const TokenChoice& token, uint32_t experts, uint32_t top_k,
                                               bool renormalize) {
  using P = Platform;
  const uint32_t own = P::lane() % kFewLanes, first = P::lane() - own;
  const bool exists = token.logits != nullptr && own < experts;
  const float logit = exists ? token.logits[own] : 0.0f;
  const uint32_t bad = P::ballot(!isfinite(logit));
  uint32_t key = exists ? order_key(logit) : 0;
  float largest, mine = 0.0f;  // as in choose_among
  uint32_t chosen = 0;
#pragma unroll 1
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t top = key;
#pragma unroll
    for (uint32_t d = kFewLanes / 2; d != 0; d /= 2) top = max_of(top, __shfl_xor_sync(kFullWarp, top, d));
    const uint32_t winner = __ffs(P::ballot(key == top) >> first) - 1;  // the first of equals
    if (k == 0) largest = value_of(top);
    if (own == k) {
      chosen = winner;
      mine = value_of(top);
    }
    if (own == winner) key = 0;
  }
  mine = own < top_k ? expf(mine - largest) : 0.0f;
  float sum = mine;
  if (!renormalize) sum = exists ? expf(logit - largest) : 0.0f;
#pragma unroll
  for (uint32_t d = kFewLanes / 2; d != 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
  if (exists && own < top_k && (bad >> first & ((1u << kFewLanes) - 1)) == 0) {
    token.ids[own] = static_cast<int32_t>(chosen);
    token.weights[own] = mine / sum;
  }
  return bad == 0 ? 0 : 1u << (__ffs(bad) - 1) / kFewLanes;
}

}  // namespace flashmoe::gpu

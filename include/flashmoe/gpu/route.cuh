// Chooses a token's experts from its router logits, and computes their weights. The experts are those with the K
// largest scores (if scores are equal, the lower expert). The rules are those of FlashDMoE, equation 5.1. Groups of
// experts, sigmoids and the bias of the choice are those of DeepSeek-V3, section 2.1.2.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/protocol/packet.h"

namespace flashmoe::gpu {

// Weight i of those that the caller has given.
template <class Dtype>
__device__ __forceinline__ float given_weight(const KernelArgs& args, uint64_t i) {
  if (args.topk_weights_as_x == 0) return static_cast<const float*>(args.topk_weights)[i];
  return Dtype::widen(static_cast<const typename Dtype::Element*>(args.topk_weights)[i]);
}

__device__ __forceinline__ int32_t given_id(const KernelArgs& args, uint64_t i) {
  return ExpertId::given(args.topk_ids_64 != 0 ? static_cast<const int64_t*>(args.topk_ids)[i]
                                               : static_cast<const int32_t*>(args.topk_ids)[i]);
}

// Run by kThreads threads: copies the ids and weights of token block b that the caller has given to where packets are
// built from.
template <class Dtype, uint32_t kThreads>
__device__ __forceinline__ void copy_given(const KernelArgs& args, const Call& c, uint32_t b, int32_t* ids,
                                           float* weights) {
  const uint32_t top_k = c.shape.gate_top_k;
  const uint64_t first = uint64_t{b << c.policy.log2_block} * top_k;
  for (uint32_t i = threadIdx.x; i < c.tokens_in_block(b) * top_k; i += kThreads) {
    const uint32_t to = i + i / top_k * (c.shape.top_k - top_k);
    ids[to] = given_id(args, first + i);
    weights[to] = ids[to] == ExpertId::kNone ? 0.0f : given_weight<Dtype>(args, first + i);
  }
}

// A key that grows with the float's value. 0 is below the key of every number.
__device__ __forceinline__ uint32_t order_key(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// A token's logits, and where its chosen experts and their weights go.
struct TokenChoice {
  float* logits;   // [E]
  int32_t* ids;    // [K]
  float* weights;  // [K]
};

// A logit as it is stored, from which scores are computed.
template <class Dtype>
__device__ __forceinline__ float rounded_logit(const RouterRule& rule, float v) {
  return rule.rounds_logits != 0 ? Dtype::widen(Dtype::narrow(v)) : v;
}

// Copies logits to the caller's memory: logit `first`, and every step-th logit after it. This must be done before
// experts are chosen, because some rules put scores in the place of logits.
__device__ __forceinline__ void write_logits(float* to, const float* logits, uint32_t count, uint32_t first,
                                             uint32_t step) {
#pragma unroll 1
  for (uint32_t i = first; i < count; i += step) to[i] = logits[i];
}

// ---- by any rule: one token of a warp after the other --------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float logit) {
  return 1.0f / (1.0f + expf(-logit));
}

// Whether a choice can be made if this is one of the values: it is finite or -inf. (-inf is chosen when nothing else
// is left.)
__device__ __forceinline__ bool can_be_chosen_by(float v) {
  return v < INFINITY;  // false of NaN
}

// If scores decide, puts a token's scores in the place of its logits, except that a logit of -inf stays. False if no
// choice can be made.
__device__ __forceinline__ bool prepare_token(const RouterRule& rule, float* logits, uint32_t experts) {
  using P = Platform;
  float largest = -INFINITY, sum = 0.0f;
  bool good = true;
  for (uint32_t e = P::lane(); e < experts; e += P::kLanes) {
    const float v = logits[e];
    good &= can_be_chosen_by(v);
    largest = max_of(largest, v);
    logits[e] = rule.by_scores() && rule.sigmoid != 0 && v != -INFINITY ? sigmoid(v) : v;
  }
  if (P::ballot(!good) != 0 || P::ballot(largest != -INFINITY) == 0) return false;
  if (rule.by_scores() && rule.sigmoid == 0) {
#pragma unroll
    for (uint32_t d = 16; d != 0; d /= 2) largest = max_of(largest, __shfl_xor_sync(kFullWarp, largest, d));
    for (uint32_t e = P::lane(); e < experts; e += P::kLanes) {
      const float score = expf(logits[e] - largest);
      sum += score;
      if (logits[e] != -INFINITY) logits[e] = score;
    }
#pragma unroll
    for (uint32_t d = 16; d != 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
    for (uint32_t e = P::lane(); e < experts; e += P::kLanes) logits[e] /= sum;
  }
  P::sync();
  return true;
}

// The value by which expert e is chosen.
__device__ __forceinline__ float choice_value(const RouterRule& rule, const float* values, uint32_t e) {
  return values[e] + (rule.choice_bias == nullptr ? 0.0f : rule.choice_bias[e]);
}

// Bit g is set if experts of group g may be chosen. These are the groups whose two best experts have the largest
// sums. Each lane has a group.
__device__ __forceinline__ uint32_t best_groups(const RouterRule& rule, const float* values, uint32_t experts) {
  using P = Platform;
  const uint32_t each = experts / rule.groups, own = P::lane();
  float best = -INFINITY, second = each == 1 ? 0.0f : -INFINITY;
  for (uint32_t i = 0; own < rule.groups && i < each; ++i) {
    const float v = choice_value(rule, values, own * each + (i + own) % each);  // lanes read different banks
    if (each != 1) second = fmaxf(second, fminf(best, v));
    best = fmaxf(best, v);
  }
  const float sum = best + second;
  uint32_t better = 0;
  for (uint32_t g = 0; g < rule.groups; ++g) {
    const float other = __shfl_sync(kFullWarp, sum, static_cast<int>(g));
    better += other > sum || (other == sum && g < own) ? 1 : 0;
  }
  return P::ballot(own < rule.groups && better < rule.top_groups);
}

// Sets `chosen` of lane k to the k-th choice. False if no choice can be made.
__device__ __forceinline__ bool choose_by_values(const RouterRule& rule, const float* values, uint32_t experts,
                                                 uint32_t top_k, uint32_t& chosen) {
  using P = Platform;
  const uint32_t each = experts / rule.groups;
  const uint32_t groups = rule.groups == 1 ? 1 : best_groups(rule, values, experts);
  uint32_t taken = 0;  // bit i: expert 32 i + lane
  bool good = true;
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t best = 0, expert = 0xffffffffu;
    for (uint32_t i = 0; i * P::kLanes + P::lane() < experts; ++i) {
      const uint32_t e = i * P::kLanes + P::lane();
      const float v = choice_value(rule, values, e);
      good &= can_be_chosen_by(v);
      const uint32_t key = (taken >> i & 1u) == 0 && (groups >> e / each & 1u) != 0 ? order_key(v) : 0;
      if (key > best) best = key, expert = e;  // the first of equals
    }
    const uint32_t top = __reduce_max_sync(kFullWarp, best);
    const uint32_t winner = __reduce_min_sync(kFullWarp, best == top ? expert : 0xffffffffu);
    if (P::lane() == k) chosen = winner;
    if (winner % P::kLanes == P::lane()) taken |= 1u << winner / P::kLanes;
  }
  return P::ballot(!good) == 0;
}

// Chooses a token's experts, and computes their weights. False if no choice can be made: a logit, or a score with its
// bias, is NaN or +inf, or all logits are -inf.
__device__ __forceinline__ bool choose_if_good(const RouterRule& rule, const TokenChoice& token, uint32_t experts,
                                               uint32_t top_k) {
  using P = Platform;
  const uint32_t lane = P::lane();
  uint32_t chosen = 0;
  if (!prepare_token(rule, token.logits, experts)) return false;
  if (!choose_by_values(rule, token.logits, experts, top_k, chosen)) return false;
  float mine = lane < top_k ? token.logits[chosen] : 0.0f, sum = 0.0f;
  if (rule.by_scores()) mine = fmaxf(mine, 0.0f);  // the score of a logit of -inf is 0
  const bool of_softmax = rule.sigmoid == 0 && !rule.by_scores();
  if (of_softmax) {  // the first choice's logit is the largest
    const float largest = __shfl_sync(kFullWarp, mine, 0);
    mine = lane < top_k ? expf(mine - largest) : 0.0f;
    for (uint32_t e = lane; rule.renormalize == 0 && e < experts; e += P::kLanes)
      sum += expf(token.logits[e] - largest);
  } else if (rule.sigmoid != 0 && !rule.by_scores()) {
    mine = lane < top_k ? sigmoid(mine) : 0.0f;
  }
  if (rule.renormalize != 0) sum = mine;
#pragma unroll
  for (uint32_t d = 16; d != 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
  if (rule.sigmoid != 0) sum += kLeastSum;
  if (!of_softmax && rule.renormalize == 0) sum = 1.0f;
  if (lane < top_k) {
    token.ids[lane] = static_cast<int32_t>(chosen);
    token.weights[lane] = mine / sum * rule.routed_scale;
  }
  return true;
}

// The same. If no choice can be made, it also marks the token's row as bad, in its ids.
__device__ __forceinline__ bool choose_by_rule(const RouterRule& rule, const TokenChoice& token, uint32_t experts,
                                               uint32_t top_k) {
  if (choose_if_good(rule, token, experts, top_k)) return true;
  if (Platform::lane() < top_k) {
    token.ids[Platform::lane()] = ExpertId::kBad;
    token.weights[Platform::lane()] = 0.0f;
  }
  return false;
}

// ---- by a plain rule (softmax, top-k): several tokens of a warp side by side ----------------------------------------

// One warp chooses for kTokens tokens side by side. Each token needs a chain of reductions over the warp, and while
// one chain waits, the other tokens' chains go on. A lane has the experts lane, lane + 32, ... of each token, at most
// kPerLane of them. Returns a word whose bit t is set if no choice can be made for the t-th token; the token's ids
// say so, too.
template <uint32_t kPerLane, uint32_t kTokens>
__device__ __forceinline__ uint32_t choose_among(const RouterRule& rule, const TokenChoice (&token)[kTokens],
                                                 uint32_t experts, uint32_t top_k) {
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
      if (!can_be_chosen_by(v)) bad |= 1u << t;
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
  // If the chosen weights are renormalised, the softmax's sum over all experts cancels, so the sum over the chosen
  // experts is enough.
  float sum[kTokens];
#pragma unroll
  for (uint32_t t = 0; t < kTokens; ++t) {
    if (largest[t] == -INFINITY) bad |= 1u << t;
    mine[t] = lane < top_k ? expf(mine[t] - largest[t]) : 0.0f;
    sum[t] = mine[t];
    if (rule.renormalize == 0) {
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
    if (lane >= top_k) continue;
    const bool good = (bad >> t & 1u) == 0;
    token[t].ids[lane] = good ? static_cast<int32_t>(chosen[t]) : ExpertId::kBad;
    token[t].weights[lane] = good ? mine[t] / sum[t] * rule.routed_scale : 0.0f;
  }
  return bad;
}

template <uint32_t kTokens>
__device__ __forceinline__ uint32_t choose_experts(const RouterRule& rule, const TokenChoice (&token)[kTokens],
                                                   uint32_t experts, uint32_t top_k) {
  if (experts <= 64) return choose_among<2>(rule, token, experts, top_k);
  if (experts <= 128) return choose_among<4>(rule, token, experts, top_k);
  if (experts <= 512) return choose_among<16>(rule, token, experts, top_k);
  return choose_among<32>(rule, token, experts, top_k);
}

// The same if there are at most kTokenLanes experts: kTokenLanes lanes have a token, so a warp chooses for four
// tokens in the time of one. `token`: this lane's token, which is number lane / kTokenLanes of the warp's four; its
// logits are null if there is no such token.
inline constexpr uint32_t kTokenLanes = 8;

__device__ __forceinline__ uint32_t choose_four(const RouterRule& rule, const TokenChoice& token, uint32_t experts,
                                                uint32_t top_k) {
  using P = Platform;
  const uint32_t own = P::lane() % kTokenLanes, first = P::lane() - own;
  const bool exists = token.logits != nullptr && own < experts;
  const float logit = exists ? token.logits[own] : 0.0f;
  uint32_t bad = P::ballot(!can_be_chosen_by(logit));
  uint32_t key = exists ? order_key(logit) : 0;
  float largest, mine = 0.0f;  // as in choose_among
  uint32_t chosen = 0;
#pragma unroll 1
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t top = key;
#pragma unroll
    for (uint32_t d = kTokenLanes / 2; d != 0; d /= 2) top = max_of(top, __shfl_xor_sync(kFullWarp, top, d));
    const uint32_t winner = __ffs(P::ballot(key == top) >> first) - 1;  // the first of equals
    if (k == 0) largest = value_of(top);
    if (own == k) {
      chosen = winner;
      mine = value_of(top);
    }
    if (own == winner) key = 0;
  }
  bad |= P::ballot(largest == -INFINITY);
  mine = own < top_k ? expf(mine - largest) : 0.0f;
  float sum = mine;
  if (rule.renormalize == 0) sum = exists ? expf(logit - largest) : 0.0f;
#pragma unroll
  for (uint32_t d = kTokenLanes / 2; d != 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
  constexpr uint32_t kOfToken = (1u << kTokenLanes) - 1;
  if (exists && own < top_k) {
    const bool good = (bad >> first & kOfToken) == 0;
    token.ids[own] = good ? static_cast<int32_t>(chosen) : ExpertId::kBad;
    token.weights[own] = good ? mine / sum * rule.routed_scale : 0.0f;
  }
  uint32_t tokens = 0;
#pragma unroll
  for (uint32_t t = 0; t < P::kLanes / kTokenLanes; ++t)
    tokens |= (bad >> t * kTokenLanes & kOfToken) != 0 ? 1u << t : 0;
  return tokens;
}

}  // namespace flashmoe::gpu

// The gradients of a router's logits, from those of combine weights: behind a backward pass, a warp a token.
//
// As cpu/router_backward.cpp has them: in float64, rounded to float32 once, and nothing large cancels where a score is near 1.
// They are stored as kLogitParts bfloat16 numbers each, whose sum they are: so that the products with the router and with x can
// be tensor cores', exact but for the sums.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"

namespace flashmoe::gpu {

namespace detail {

// Sums and maxima over a warp's lanes, in an order that does not change.
__device__ __forceinline__ double sum_of_lanes(double v) {
#pragma unroll
  for (uint32_t apart = 16; apart != 0; apart /= 2) v += __shfl_xor_sync(kFullWarp, v, apart);
  return v;
}
__device__ __forceinline__ float max_of_lanes(float v) {
#pragma unroll
  for (uint32_t apart = 16; apart != 0; apart /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, apart));
  return v;
}

// A token's scores, from its logits.
struct TokenScores {
  const float* logits;
  bool sigmoid;
  double largest = 0.0, all = 1.0;  // of a softmax: the largest logit, and what makes the scores' sum 1

  // All lanes.
  static __device__ TokenScores of(const float* logits, uint32_t experts, bool sigmoid, uint32_t lane) {
    TokenScores s{logits, sigmoid};
    if (sigmoid) return s;
    float largest = -INFINITY;
    for (uint32_t e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    s.largest = max_of_lanes(largest);
    double sum = 0.0;
    for (uint32_t e = lane; e < experts; e += 32) sum += exp(logits[e] - s.largest);
    s.all = sum_of_lanes(sum);
    return s;
  }
  __device__ double operator()(uint32_t e) const {
    return sigmoid ? 1.0 / (1.0 + exp(-double{logits[e]})) : exp(logits[e] - largest) / all;
  }
};

}  // namespace detail

// All lanes of a warp.
__device__ inline void differentiate_logits(const KernelArgs& args, uint32_t token, uint32_t lane) {
  using namespace detail;
  const BackwardArgs& b = args.backward;
  const CallShape& shape = args.call.shape;
  const RouterRule& rule = args.rule;
  const uint32_t experts = shape.experts, choices = shape.top_k;
  const bool sigmoid = rule.sigmoid != 0, renormalize = rule.renormalize != 0;
  const uint64_t first_choice = uint64_t{token} * choices, first_logit = uint64_t{token} * experts;
  const TokenScores score = TokenScores::of(b.logits + first_logit, experts, sigmoid, lane);
  const auto expert = [&](uint32_t k) {
    const int32_t id = b.kept.ids[first_choice + k];
    return static_cast<uint32_t>(id >= 0 ? id : ~id);
  };
  const auto of_weight = [&](uint32_t k) {
    const double of_bias = b.weights_by_bias == nullptr ? 0.0 : b.weights_by_bias[first_choice + k];
    return b.weights[first_choice + k] + of_bias;
  };
  double sum = 0.0, weighted = 0.0;  // of the chosen scores; of these times of_weight
  for (uint32_t k = lane; k < choices; k += 32) {
    const double s = score(expert(k));
    sum += s;
    weighted += s * of_weight(k);
  }
  sum = sum_of_lanes(sum) + (sigmoid ? double{kLeastSum} : 0.0);
  weighted = sum_of_lanes(weighted);
  // The gradient of a chosen score is (of_weight - common) / divisor. With a softmax each logit moves all scores; but
  // where the chosen ones are divided by their sum, what they lose together cancels.
  const double divisor = renormalize ? sum : 1.0, common = renormalize ? weighted / sum : 0.0;
  const double moved = sigmoid || renormalize ? 0.0 : weighted;
  const auto store = [&](uint32_t e, double gradient) {
    auto rest = static_cast<float>(rule.routed_scale * gradient);
    if (b.of_logits != nullptr) rest += b.of_logits[first_logit + e];
    uint16_t* const to = b.logit_parts + first_logit * kLogitParts + e;
#pragma unroll
    for (uint32_t p = 0; p < kLogitParts; ++p) {
      const Bf16::Element part = Bf16::narrow(rest);
      to[p * experts] = __bfloat16_as_ushort(part);
      rest -= Bf16::widen(part);
    }
  };
  for (uint32_t e = lane; e < experts; e += 32) store(e, moved == 0.0 ? 0.0 : -score(e) * moved);
  __syncwarp();  // the chosen ones' are stored once more
  for (uint32_t k = lane; k < choices; k += 32) {
    const uint32_t e = expert(k);
    const double s = score(e), slope = sigmoid ? s * (1.0 - s) : s;
    store(e, slope * (of_weight(k) - common) / divisor - s * moved);  // may cancel nearly all: a score near 1
  }
}

}  // namespace flashmoe::gpu

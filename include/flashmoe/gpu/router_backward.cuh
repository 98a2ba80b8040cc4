// The gradients of a router's logits, from those of combine weights: of a backward pass, a warp a token.
//
// As cpu/router_backward.cpp has them: in float64, and nothing large cancels where a score is near 1. They are rounded once,
// to x's type, since tensor cores multiply by them, as by dZ.
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
  static __device__ __forceinline__ TokenScores of(const float* logits, uint32_t experts, bool sigmoid, uint32_t lane) {
    TokenScores s{logits, sigmoid};
    if (sigmoid) return s;
    float largest = -INFINITY;
    for (uint32_t e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    s.largest = max_of_lanes(largest);
    double sum = 0.0;
#pragma unroll 1
    for (uint32_t e = lane; e < experts; e += 32) sum += score(logits[e] - s.largest, false);
    s.all = sum_of_lanes(sum);
    return s;
  }
  __device__ __forceinline__ double operator()(uint32_t e) const {
    return score(logits[e] - largest, sigmoid) / all;
  }

 private:
  static __device__ __forceinline__ double score(double logit, bool sigmoid) {
    const double e = exp(sigmoid ? -logit : logit);
    return sigmoid ? 1.0 / (1.0 + e) : e;
  }
};

// The gradient of a combine weight: its parts' sum, and what the biases owe to it.
__device__ __forceinline__ double weight_gradient(const BackwardArgs& b, uint64_t choice, uint64_t choices,
                                                  uint32_t parts) {
  float sum = 0.0f;
#pragma unroll 2
  for (uint32_t p = 0; p < parts; ++p) sum += b.weight_parts[p * choices + choice];
  return b.weights_by_bias == nullptr ? sum : sum + b.weights_by_bias[choice];
}

}  // namespace detail

// All lanes of a warp, of which each has one of the token's choices, of at most as many. parts: of a combine weight's gradient.
template <class Dtype>
__device__ __forceinline__ void differentiate_logits(const KernelArgs& args, uint32_t token, uint32_t parts,
                                                     uint32_t lane) {
  using namespace detail;
  const BackwardArgs& b = args.backward;
  const CallShape& shape = args.call.shape;
  const RouterRule& rule = args.rule;
  const uint32_t experts = shape.experts;
  const bool sigmoid = rule.sigmoid != 0, renormalize = rule.renormalize != 0, chose = lane < shape.top_k;
  const uint64_t choices = uint64_t{shape.tokens} * shape.top_k, choice = uint64_t{token} * shape.top_k + lane;
  const uint64_t first_logit = uint64_t{token} * experts;
  const int32_t id = chose ? b.kept.ids[choice] : 0;
  const auto expert = static_cast<uint32_t>(id >= 0 ? id : ~id);
  const double of_weight = chose && id >= 0 ? weight_gradient(b, choice, choices, parts) : 0.0;
  const TokenScores score = TokenScores::of(b.logits + first_logit, experts, sigmoid, lane);
  const double s = chose ? score(expert) : 0.0;
  const double sum = sum_of_lanes(s) + (sigmoid ? double{kLeastSum} : 0.0);
  const double weighted = sum_of_lanes(s * of_weight);
  // The gradient of a chosen score is (of_weight - common) / divisor. With a softmax each logit moves all scores; but
  // where the chosen ones are divided by their sum, what they lose together cancels.
  const double divisor = renormalize ? sum : 1.0, common = renormalize ? weighted / sum : 0.0;
  const double moved = sigmoid || renormalize ? 0.0 : weighted;
  auto* const to = reinterpret_cast<typename Dtype::Element*>(b.logit_gradients) +
                   uint64_t{token} * logit_pitch(experts);
  const auto store = [&](uint32_t e, double gradient) {
    auto rounded = static_cast<float>(rule.routed_scale * gradient);
    if (b.of_logits != nullptr) rounded += b.of_logits[first_logit + e];
    to[e] = Dtype::narrow(rounded);
  };
#pragma unroll 1
  for (uint32_t e = lane; e < experts; e += 32) store(e, moved == 0.0 ? 0.0 : -score(e) * moved);
  __syncwarp();  // the chosen ones' are stored once more
  if (!chose) return;
  const double slope = sigmoid ? s * (1.0 - s) : s;
  store(expert, slope * (of_weight - common) / divisor - s * moved);  // may cancel nearly all: a score near 1
}

}  // namespace flashmoe::gpu

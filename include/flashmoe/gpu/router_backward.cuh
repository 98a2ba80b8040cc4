// Computes the gradients of a router's logits from those of the combine weights, in a backward pass. A few lanes share
// a token.
//
// Exponentials are in float32, and scores keep their relative errors. Everything that is computed from scores is in
// float64, as in cpu/router_backward.cpp, because terms of a gradient nearly cancel if a score is near 1. The results
// are rounded once, to x's type, since tensor cores multiply by them, as by dZ.
#pragma once

#include "flashmoe/gpu/choice_gradient.cuh"
#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/protocol/packet.h"

namespace flashmoe::gpu {

// How many lanes share a token. A warp takes some 20 us for the tokens that it has side by side, however little they
// are, because its code comes from the L2 each time, and then its operands. So a token has as few lanes as possible:
// 2 to 8, so that a lane has at most 16 logits and one choice, if 8 lanes are enough for that.
__device__ __forceinline__ uint32_t lanes_of_token(const CallShape& shape) {
  uint32_t lanes = 2;
#pragma unroll 1
  while (lanes < 8 && (lanes < gate_top_k_of(shape) || lanes * 16 < gate_experts_of(shape))) lanes *= 2;
  return lanes;
}

namespace detail {

// Sums and maxima over a token's lanes, in an order that does not change.
__device__ __forceinline__ double sum_of_lanes(double v, uint32_t lanes) {
#pragma unroll 1
  for (uint32_t apart = lanes / 2; apart != 0; apart /= 2) v += __shfl_xor_sync(kFullWarp, v, apart);
  return v;
}
__device__ __forceinline__ float max_of_lanes(float v, uint32_t lanes) {
#pragma unroll 1
  for (uint32_t apart = lanes / 2; apart != 0; apart /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, apart));
  return v;
}

// A token's scores, from its logits.
struct TokenScores {
  const float* logits;
  bool sigmoid;
  float largest = 0.0f;  // of a softmax: the largest logit,
  double per_sum = 1.0;  // and 1 over the sum of exponentials

  // All lanes.
  static __device__ __forceinline__ TokenScores of(const float* logits, uint32_t experts, bool sigmoid, uint32_t lane,
                                                   uint32_t lanes) {
    TokenScores s{logits, sigmoid};
    if (sigmoid) return s;
    float largest = -INFINITY;
#pragma unroll 4
    for (uint32_t e = lane; e < experts; e += lanes) largest = fmaxf(largest, logits[e]);
    s.largest = max_of_lanes(largest, lanes);
    double sum = 0.0;
#pragma unroll 4
    for (uint32_t e = lane; e < experts; e += lanes) sum += expf(logits[e] - s.largest);
    s.per_sum = 1.0 / sum_of_lanes(sum, lanes);
    return s;
  }
  __device__ __forceinline__ double operator()(uint32_t e) const {
    if (sigmoid) return 1.0 / (1.0 + expf(-logits[e]));
    return expf(logits[e] - largest) * per_sum;
  }
};

}  // namespace detail

// Computes the gradients of the logits of tokens first, first + 1, ..., each by `lanes` lanes. Run by all lanes of a
// warp. parts: how many parts a combine weight's gradient has.
template <class Dtype>
__device__ __forceinline__ void differentiate_logits(const KernelArgs& args, uint32_t first, uint32_t lanes,
                                                     uint32_t parts) {
  using namespace detail;
  const BackwardArgs& b = args.backward;
  const CallShape& shape = args.call.shape;
  const RouterRule& rule = args.rule;
  const uint32_t lane = Platform::lane() % lanes, own = first + Platform::lane() / lanes;
  const bool exists = own < shape.tokens;
  const uint64_t token = exists ? own : first;
  const uint32_t experts = gate_experts_of(shape);
  const bool sigmoid = rule.sigmoid != 0, renormalize = rule.renormalize != 0;
  const uint64_t first_choice = token * gate_top_k_of(shape), first_logit = token * experts;
  const auto kept_id = [&](uint32_t k) {
    return b.kept.ids[kBuild.sliced ? token * shape.top_k + k * shape.slices : first_choice + k];
  };
  const bool bad = kept_id(0) == ExpertId::kBad;  // no choice could be made by the logits: all gradients are NaN
  const auto expert = [&](uint32_t k) {
    const int32_t id = bad ? 0 : kept_id(k);
    const auto chosen = static_cast<uint32_t>(id >= 0 ? id : ~id);
    return kBuild.sliced ? chosen / shape.slices : chosen;
  };
  const auto of_weight = [&](uint32_t k) {  // the gradient of weight k, with the part that comes from down_bias
    const double of_experts = choice_gradient(args, static_cast<uint32_t>(token), k, parts);
    return b.weights_by_bias == nullptr ? of_experts : of_experts + b.weights_by_bias[first_choice + k];
  };
  // The gradient of the weight of the lane's first choice is kept, because it takes a handful of round trips to
  // memory. In most models this is the lane's only choice.
  const double of_first = lane < gate_top_k_of(shape) ? of_weight(lane) : 0.0;
  const TokenScores score = TokenScores::of(b.logits + first_logit, experts, sigmoid, lane, lanes);
  double sum = 0.0, weighted = 0.0;  // sums of the chosen scores, and of these times their weights' gradients
#pragma unroll 1
  for (uint32_t k = lane; k < gate_top_k_of(shape); k += lanes) {
    const double s = score(expert(k));
    sum += s;
    weighted += s * (k == lane ? of_first : of_weight(k));
  }
  sum = sum_of_lanes(sum, lanes) + (sigmoid ? double{kLeastSum} : 0.0);
  weighted = sum_of_lanes(weighted, lanes);
  // The gradient of a chosen score is (its weight's gradient - common) * per_sum. With a softmax, each logit also
  // changes all other scores, which `moved` accounts for. But if the chosen scores are divided by their sum, this
  // change cancels.
  const double per_sum = renormalize ? 1.0 / sum : 1.0, common = renormalize ? weighted / sum : 0.0;
  const double moved = sigmoid || renormalize ? 0.0 : weighted;
  auto* const to = reinterpret_cast<typename Dtype::Element*>(b.logit_gradients) + token * logit_pitch(experts);
  const auto store = [&](uint32_t e, double gradient) {
    auto rounded = static_cast<float>(rule.routed_scale * gradient);
    if (b.given_logit_gradients != nullptr) rounded += b.given_logit_gradients[first_logit + e];
    if (exists) to[e] = Dtype::narrow(bad ? NAN : rounded);
  };
#pragma unroll 1
  for (uint32_t e = lane; e < experts; e += lanes) store(e, moved == 0.0 ? 0.0 : -score(e) * moved);
  __syncwarp();  // the gradients of the chosen experts' logits are stored again below
#pragma unroll 1
  for (uint32_t k = lane; k < gate_top_k_of(shape); k += lanes) {
    const uint32_t e = expert(k);
    const double s = score(e), slope = sigmoid ? s * (1.0 - s) : s;
    const double of_score = ((k == lane ? of_first : of_weight(k)) - common) * per_sum;
    store(e, slope * of_score - s * moved);  // the terms nearly cancel if the score is near 1
  }
}

}  // namespace flashmoe::gpu

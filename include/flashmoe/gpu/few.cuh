// The layer of a few tokens (kFewTokens) on a rank that is alone: one cooperative launch, one block per SM, 12 warps a block.
//
// Such a call takes the time to read its experts' weights once, plus every round trip to memory before and between.
// Through the actors of sm90/kernel.cuh these are a chain of some twenty, for tiles of a few rows that are handed out
// one by one. Here each block works out the routing for itself, and warps go over rows of weights (gpu/dots.cuh).
//
//   gate    experts are dealt out to all warps of all blocks; a logit and its call's epoch are one word, its own signal
//   choose  every block, for itself, from all logits: cheaper than to choose once and pass it on
//   GEMM0   an expert's feature rows, dealt out to all warps; intermediate rows to device memory
//           all blocks meet, while the first weights of GEMM1 are on their way
//   GEMM1   each block has some columns of the output, for all experts, and sums them over k. No return, no Combine
//
// Bits: products are summed in fp32 in another order than by the tensor cores, so a token's row here and in a larger call
// may differ in the last place. It is the same in every call of so few tokens, whatever the others are.
//
// Waits: for the logits and at the meeting, both bounded (wait_until). The protocol's queues and signals are left alone.
#pragma once

#include "flashmoe/gpu/activate.cuh"
#include "flashmoe/gpu/dots.cuh"
#include "flashmoe/gpu/leave.cuh"
#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/gpu/route.cuh"
#include "flashmoe/gpu/shared_expert.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/protocol/packet.h"

namespace flashmoe::gpu {

// What a block knows of the call once the experts are chosen. Choice p is (token p / n, k = p % n), where n is few_choices:
// the shared expert's slices are choices here. A unit is an expert that has tokens; units are numbered in the order of their
// first choices.
struct FewShared {
  int32_t ids[kFewChoices];  // -1: dropped
  float weights[kFewChoices];
  uint32_t units;                            // their number
  uint32_t tokens[kFewChoices];              // of a unit
  uint16_t expert[kFewChoices];              // of a unit
  uint16_t choice[kFewChoices][kFewTokens];  // of a unit
  uint16_t unit[kFewChoices];                // of a choice; kNoUnit: dropped
  uint32_t failed;                           // not zero: the call is over
  Fault fault;                               // why, if this block is to post that
  Call call;                                 // to post it with: the given one, but with the call's epoch
  uint32_t trace_events;
  TraceStarts trace_starts;
  union {
    float logits[kFewTokens * kMaxExperts];  // [token][expert]
    float results[kFewResults];              // [column][choice] weighted results of GEMM1
  };
};
static_assert(sizeof(FewShared) <= kFewSharedBytes);

namespace few {

using P = Platform;

// Liveness where a rank is alone and its blocks wait for one another: there is nobody else whose progress counts.
struct NoOthers {
  __device__ void sample() const {}
  __device__ bool moved() const { return false; }
};

inline constexpr uint16_t kNoUnit = 0xffff;

struct Block {
  const KernelArgs& args;
  const Call& c;  // as the host passed it: with another epoch than the call's
  FewShared& s;
  uint64_t epoch;

  __device__ __forceinline__ uint32_t choices() const { return c.shape.tokens * args.few_choices; }
  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ bool is_shared(uint32_t expert) const { return expert >= c.shape.routed_experts(); }
  // Where a token's row begins, in units of 16 bytes behind x.
  __device__ __forceinline__ uint32_t token_at(uint32_t token) const {
    return static_cast<uint32_t>(token * (args.x_row_bytes / 16));
  }
};

// By one thread: ends the call for this block. The first that fails decides which fault the block posts (kNone: none).
__device__ __forceinline__ void fail(const Block& b, Fault fault) {
  if (atomicExch(&b.s.failed, 1u) != 0) return;
  fault.actor = Actor::kProcessor;
  fault.awaited = fault.culprit = b.c.rank;
  b.s.fault = fault;
}
// For a fault that every block finds by itself: only block 0 posts it.
__device__ __forceinline__ void fail_everywhere(const Block& b, Fault fault) {
  if (blockIdx.x != 0) fault.kind = FaultKind::kNone;
  fail(b, fault);
}

// One warp.
template <class StepFn>
__device__ __forceinline__ void wait_for_blocks(const Block& b, StepFn&& step) {
  const WaitEnd end = wait_until<P>(b.c, step, NoOthers{});
  if (end == WaitEnd::kDone || P::lane() != 0) return;
  fail(b, {.kind = end == WaitEnd::kExpired ? FaultKind::kLocal : FaultKind::kNone});
}

// All threads: whether the block is to go on.
__device__ __forceinline__ bool all_well(const Block& b) {
  // Barrier and vote in one: read behind a barrier, `failed` may be set by a faster thread's next step, for some alone.
  return __syncthreads_or(static_cast<int>(b.s.failed)) == 0;
}

// ---- gate -----------------------------------------------------------------------------------------------------------

// Job: an expert.
template <class Dtype>
struct GateJobs {
  const Block& b;

  __device__ __forceinline__ uint32_t chunks() const { return b.c.shape.hidden * Dtype::kBytes / 16; }
  __device__ __forceinline__ uint32_t job(uint32_t i) const { return i; }
  __device__ __forceinline__ uint32_t tokens(uint32_t) const { return b.c.shape.tokens; }
  __device__ __forceinline__ const uint8_t* weights(uint32_t expert, uint32_t) const {
    return b.args.router_rows.row(0, expert);
  }
  __device__ __forceinline__ const uint8_t* operands() const { return b.args.x; }
  __device__ __forceinline__ uint32_t operand(uint32_t, uint32_t token) const { return b.token_at(token); }
  __device__ __forceinline__ void finish(uint32_t expert, uint32_t token, const float (&sum)[1]) const {
    const float logit = sum[0] + bias_at<Dtype>(b.args.router_bias, expert, true);
    P::store_relaxed(b.c.logit(token, expert), b.epoch << 32 | __float_as_uint(logit));
  }
};

// All logits of the call, from all blocks.
__device__ __forceinline__ void collect_logits(const Block& b) {
  const uint32_t experts = b.c.shape.routed_experts(), all = b.c.shape.tokens * experts;
  for (uint32_t base = b.warp() * 32; base < all; base += kFewThreads) {
    const uint32_t i = base + P::lane();
    const bool exists = i < all;
    const uint64_t* const from = b.c.logit(exists ? i / experts : 0, exists ? i % experts : 0);
    uint64_t word = 0;
    wait_for_blocks(b, [&] {
      word = P::load_relaxed(from);
      return P::ballot(word >> 32 != (b.epoch & 0xffffffffu)) == 0 ? Step::kDone : Step::kIdle;
    });
    if (exists) b.s.logits[i] = __uint_as_float(static_cast<uint32_t>(word));
  }
}

// ---- choice ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void choose(const Block& b) {
  const uint32_t experts = b.c.shape.routed_experts(), top_k = b.c.shape.routed_top_k();
  if (b.args.router_logits != nullptr) {  // every block has them all, and writes a part
    write_logits(b.args.rule, b.args.router_logits, b.s.logits, b.c.shape.tokens * experts,
                 blockIdx.x * kFewThreads + threadIdx.x, gridDim.x * kFewThreads);
    __syncthreads();
  }
  for (uint32_t t = b.warp(); t < b.c.shape.tokens; t += kFewWarps) {
    const TokenChoice choice[1] = {
        {b.s.logits + t * experts, b.s.ids + t * b.args.few_choices, b.s.weights + t * b.args.few_choices}};
    const RouterRule& rule = b.args.rule;
    const bool good = rule.plain() ? choose_experts(choice, experts, top_k, rule.renormalize != 0) == 0
                                   : choose_by_rule(rule, choice[0], experts, top_k);
    if (!good && P::lane() == 0) fail_everywhere(b, {.kind = FaultKind::kRouterValue, .index = t});
  }
}

// Given routing is not trusted: every block finds what is wrong with it, and block 0 posts that.
template <class Dtype>
__device__ __forceinline__ void take_given(const Block& b) {
  const uint32_t p = threadIdx.x, top_k = b.c.shape.routed_top_k();
  if (p >= b.c.shape.tokens * top_k) return;
  auto id_of = [&](uint32_t i) {
    if (b.args.topk_ids_64 == 0) return static_cast<const int32_t*>(b.args.topk_ids)[i];
    const int64_t id = static_cast<const int64_t*>(b.args.topk_ids)[i];
    return id == static_cast<int32_t>(id) ? static_cast<int32_t>(id) : -1;
  };
  const int32_t id = id_of(p);
  const uint32_t choice = p + p / top_k * b.c.shape.shared;  // the token's slices lie between
  b.s.ids[choice] = id;
  b.s.weights[choice] = given_weight<Dtype>(b.args, p);
  const bool exists = id >= 0 && static_cast<uint32_t>(id) < b.c.shape.routed_experts();
  bool twice = false;
  for (uint32_t i = p - p % top_k; i < p; ++i) twice |= id_of(i) == id;
  if (exists && !twice) return;
  fail_everywhere(b, {.kind = exists ? FaultKind::kDuplicateExpert : FaultKind::kExpertRange,
                      .index = p / top_k,
                      .expected = b.c.shape.routed_experts(),
                      .seen = static_cast<uint32_t>(id)});
}

// The shared expert's slices among the choices of every token, as experts behind the routed ones. A warp for each.
template <class Dtype>
__device__ __forceinline__ void add_shared(const Block& b) {
  for (uint32_t t = b.warp(); t < b.c.shape.tokens; t += kFewWarps) {
    const uint8_t* const row = b.args.x + uint64_t{b.token_at(t)} * 16;
    const float weight = shared_weight<Dtype>(b.args, row, b.c.shape.hidden);
    for (uint32_t n = P::lane(); n < b.c.shape.shared; n += P::kLanes) {
      const uint32_t choice = t * b.args.few_choices + b.c.shape.routed_top_k() + n;
      b.s.ids[choice] = static_cast<int32_t>(b.c.shape.routed_experts() + n);
      b.s.weights[choice] = weight;
    }
  }
}

// One warp: groups the choices into units, and drops those beyond their expert's capacity, the last in token order.
__device__ __forceinline__ void group_choices(const Block& b) {
  FewShared& s = b.s;
  uint32_t units = 0;
  for (uint32_t base = 0; base < b.choices(); base += 32) {
    const uint32_t p = base + P::lane();
    const bool exists = p < b.choices();
    const int32_t expert = exists ? s.ids[p] : -1;
    uint32_t earlier = 0, first = p;  // choices of the same expert, all of earlier tokens
    for (uint32_t i = exists ? p - p % b.args.few_choices : 0; i-- != 0;) {
      if (s.ids[i] != expert) continue;
      first = i;
      ++earlier;
    }
    const bool leads = exists && earlier == 0;
    uint32_t fresh;
    const uint32_t before = count_before<P>(leads, fresh);
    if (leads) {
      s.unit[p] = static_cast<uint16_t>(units + before);
      s.expert[units + before] = static_cast<uint16_t>(expert);
      s.tokens[units + before] = 0;
    }
    units += fresh;
    P::sync();
    if (exists && !leads) {
      const bool kept = b.c.shape.capacity == 0 || b.is_shared(expert) || earlier < b.c.shape.capacity;
      s.unit[p] = kept ? s.unit[first] : kNoUnit;
    }
    if (exists && s.unit[p] != kNoUnit) {
      s.choice[s.unit[p]][earlier] = static_cast<uint16_t>(p);
      atomicAdd(&s.tokens[s.unit[p]], 1u);
    }
    P::sync();
  }
  if (P::lane() == 0) s.units = units;
}

// Fills ids, weights and units. False if the call is over.
template <class Dtype>
__device__ __forceinline__ bool route(const Block& b) {
  if (b.args.topk_ids != nullptr) {
    take_given<Dtype>(b);
  } else {
    choose(b);
  }
  if (b.c.shape.shared != 0) add_shared<Dtype>(b);
  if (!all_well(b)) return false;
  if (b.warp() == 0) group_choices(b);
  __syncthreads();
  const uint32_t p = threadIdx.x;
  if (p < b.choices()) {
    const int32_t expert = b.s.ids[p];
    if (b.args.load != nullptr && blockIdx.x == 0 && !b.is_shared(expert)) P::add(&b.args.load[expert], uint64_t{1});
    if (b.s.unit[p] == kNoUnit) b.s.ids[p] = -1;
    const uint32_t token = p / b.args.few_choices, k = p % b.args.few_choices;
    if (blockIdx.x == 0 && k < b.c.shape.routed_top_k()) {  // for the report
      b.c.routing(token)[k] = b.s.ids[p];
      b.c.weights(token)[k] = b.s.weights[p];
    }
  }
  return true;
}

// ---- GEMM0 ----------------------------------------------------------------------------------------------------------

// A job of GEMM0 or GEMM1: two rows of the weights of a unit's expert, or of its slice of the shared expert. In both,
// kShared says whether the layer has one: a call of one token is 1 % slower where every row's address is a choice.
struct TwoRows {
  uint32_t unit, expert;
  uint32_t first, second;

  template <bool kShared>
  __device__ __forceinline__ const uint8_t* row(const Block& b, uint32_t r, const WeightRows& routed,
                                                const WeightRows& shared) const {
    const uint32_t at = r == 0 ? first : second;
    if (kShared && b.is_shared(expert)) return shared.row(expert - b.c.shape.routed_experts(), at);
    return routed.row(expert, at);
  }
};

// Job: two rows of weights, a gate row and its up row, or two neighbours.
template <class Dtype, Activation kActivation, bool kShared>
struct Gemm0Jobs {
  static constexpr bool kGated = is_gated(kActivation);
  const Block& b;

  __device__ __forceinline__ uint32_t per_unit() const { return b.c.shape.intermediate / (kGated ? 1 : 2); }
  __device__ __forceinline__ TwoRows job(uint32_t i) const {
    const uint32_t unit = i / per_unit(), row = i % per_unit();
    const uint32_t expert = b.s.expert[unit];
    const GatedRows at = kShared && b.is_shared(expert) ? b.args.shared_gated : b.args.gated;
    if constexpr (kGated) return {unit, expert, row * at.step, row * at.step + at.up};
    return {unit, expert, 2 * row, 2 * row + 1};
  }

  __device__ __forceinline__ uint32_t chunks() const { return b.c.shape.hidden * Dtype::kBytes / 16; }
  __device__ __forceinline__ uint32_t tokens(const TwoRows& job) const { return b.s.tokens[job.unit]; }
  __device__ __forceinline__ const uint8_t* weights(const TwoRows& job, uint32_t r) const {
    return job.template row<kShared>(b, r, b.args.gate_up_rows, b.args.shared_gate_up_rows);
  }
  __device__ __forceinline__ const uint8_t* operands() const { return b.args.x; }
  __device__ __forceinline__ uint32_t operand(const TwoRows& job, uint32_t token) const {
    return b.token_at(b.s.choice[job.unit][token] / b.args.few_choices);
  }
  __device__ __forceinline__ void finish(const TwoRows& job, uint32_t token, const float (&sum)[2]) const {
    const uint32_t biases = job.expert * b.c.shape.intermediate * (kGated ? 2 : 1);
    const uint32_t p = b.s.choice[job.unit][token];
    const float scale = b.args.weights_on_input != 0 ? b.s.weights[p] : 1.0f;
    float low = sum[0] * scale + bias_at<Dtype>(b.args.gate_up_bias, biases + job.first, true);
    float high = sum[1] * scale + bias_at<Dtype>(b.args.gate_up_bias, biases + job.second, true);
    auto* const row = reinterpret_cast<typename Dtype::Element*>(b.c.intermediate_row(0, p));
    if constexpr (kGated) {
      float none = 0.0f;
      activate_pair<Dtype, kActivation>(low, none, b.args.clamped);
      row[job.first / b.args.gated.step] = Dtype::narrow(low * shaped_up<kActivation>(high, b.args.clamped));
    } else {
      activate_pair<Dtype, kActivation>(low, high, b.args.clamped);
      row[job.first] = Dtype::narrow(low);
      row[job.second] = Dtype::narrow(high);
    }
  }
};

// All blocks meet: what they stored before, all may load after. False if the call is over.
__device__ __forceinline__ bool meet(const Block& b) {
  __syncthreads();
  if (b.warp() == 0) {
    uint64_t* const met = &b.c.control()->met.value;
    if (P::lane() == 0) P::fetch_add_acq_rel(met, uint64_t{1});
    wait_for_blocks(
        b, [&] { return P::ballot(P::load_acquire(met, kDevice) != gridDim.x) == 0 ? Step::kDone : Step::kIdle; });
  }
  return all_well(b);
}

// ---- GEMM1, and the sum over k --------------------------------------------------------------------------------------

// Job: a unit's two rows of weights that make two neighbouring columns of the output. The block has `twos` such pairs
// of columns, from column `first` on.
template <class Dtype, bool kShared>
struct Gemm1Jobs {
  const Block& b;
  uint32_t first, twos;

  __device__ __forceinline__ uint32_t jobs() const { return b.s.units * twos; }
  __device__ __forceinline__ TwoRows job(uint32_t i) const {
    const uint32_t unit = i / twos, row = first + i % twos * 2;
    return {unit, b.s.expert[unit], row, row + 1};
  }

  __device__ __forceinline__ uint32_t chunks() const { return b.c.shape.intermediate * Dtype::kBytes / 16; }
  __device__ __forceinline__ uint32_t tokens(const TwoRows& job) const { return b.s.tokens[job.unit]; }
  __device__ __forceinline__ const uint8_t* weights(const TwoRows& job, uint32_t r) const {
    return job.template row<kShared>(b, r, b.args.down_rows, b.args.shared_down_rows);
  }
  __device__ __forceinline__ const uint8_t* operands() const { return b.c.intermediate_row(0, 0); }
  __device__ __forceinline__ uint32_t operand(const TwoRows& job, uint32_t token) const {
    return static_cast<uint32_t>((b.c.intermediate_row(0, b.s.choice[job.unit][token]) - operands()) / 16);
  }
  __device__ __forceinline__ void finish(const TwoRows& job, uint32_t token, const float (&sum)[2]) const {
    const uint32_t p = b.s.choice[job.unit][token];
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t column = job.first + r;
      const float v = sum[r] + bias_at<Dtype>(b.args.down_bias, job.expert * b.c.shape.hidden + column, true);
      // Rounded to the element type, as a return row is.
      const float weight = b.args.weights_on_input != 0 ? 1.0f : b.s.weights[p];
      b.s.results[(column - first) * b.choices() + p] = Dtype::widen(Dtype::narrow(v * weight));
    }
  }
  // All threads, when the results are there.
  __device__ __forceinline__ void sum_results() const {
    auto* const out = reinterpret_cast<typename Dtype::Element*>(b.args.out);
    for (uint32_t i = threadIdx.x; i < 2 * twos * b.c.shape.tokens; i += kFewThreads) {
      const uint32_t token = i / (2 * twos), column = i % (2 * twos);
      float sum = 0.0f;
      for (uint32_t p = token * b.args.few_choices; p < (token + 1) * b.args.few_choices; ++p) {
        if (b.s.ids[p] >= 0) sum += b.s.results[column * b.choices() + p];
      }
      out[uint64_t{token} * b.c.shape.hidden + first + column] = Dtype::narrow(sum);
    }
  }
};

// Has the L2 fetch the weights of the warp's jobs after the first one, whose loads are already under way: up to 12 KiB
// a warp, which the memory delivers while the blocks meet.
template <class Jobs>
__device__ __forceinline__ void prefetch_jobs(const Jobs& jobs, uint32_t first, uint32_t last) {
  constexpr uint32_t kBytes = 12 * 1024;
  const uint32_t bytes = jobs.chunks() * 16, job = first + (P::lane() + 1) * kFewWarps;
  if (job >= last || (P::lane() + 1) * 2 * bytes > kBytes) return;
  prefetch_l2(jobs.weights(jobs.job(job), 0), bytes);
  prefetch_l2(jobs.weights(jobs.job(job), 1), bytes);
}

// ---- the whole ------------------------------------------------------------------------------------------------------

// Where a block's part of `all` jobs or columns begins. Parts follow one another, and differ by one in length at most.
__device__ __forceinline__ uint32_t begin_of_part(uint32_t all, uint32_t block) {
  return static_cast<uint32_t>(uint64_t{all} * block / gridDim.x);
}

template <class Dtype, class Trace>
__device__ __forceinline__ bool run_gate(const Block& b, const Trace& trace) {
  if (b.args.topk_ids != nullptr) return true;
  trace.begin();
  const GateJobs<Dtype> jobs{b};
  Dots<Dtype, 1, GateJobs<Dtype>> dots(jobs, b.warp() * gridDim.x + blockIdx.x, b.c.shape.routed_experts(),
                                       kFewWarps * gridDim.x);
  dots.begin();
  dots.run();
  collect_logits(b);
  const bool ok = all_well(b);
  trace.end(Phase::kGate, blockIdx.x, 0);
  return ok;
}

template <class Dtype, Activation kActivation, bool kShared, class Trace>
__device__ __forceinline__ void run_gemm0(const Block& b, const Trace& trace) {
  using Jobs = Gemm0Jobs<Dtype, kActivation, kShared>;
  trace.begin();
  const Jobs jobs{b};
  const uint32_t all = b.s.units * jobs.per_unit();
  Dots<Dtype, 2, Jobs> dots(jobs, begin_of_part(all, blockIdx.x) + b.warp(), begin_of_part(all, blockIdx.x + 1),
                            kFewWarps);
  dots.begin();
  dots.run();
  trace.end(Product<kFirst>::kPhase, blockIdx.x, 0);
}

template <class Dtype, bool kShared, class Trace>
__device__ __forceinline__ void run_gemm1(const Block& b, const Trace& trace) {
  using Jobs = Gemm1Jobs<Dtype, kShared>;
  const uint32_t at_once = kFewResults / 2 / b.choices();  // pairs of columns whose results there is room for
  uint32_t next = begin_of_part(b.c.shape.hidden / 2, blockIdx.x);
  const uint32_t end = begin_of_part(b.c.shape.hidden / 2, blockIdx.x + 1);
  for (bool met = false;; met = true) {
    const Jobs jobs{b, 2 * next, min_of(at_once, end - next)};
    Dots<Dtype, 2, Jobs> dots(jobs, b.warp(), jobs.jobs(), kFewWarps);
    dots.begin();
    if (!met) {
      prefetch_jobs(jobs, b.warp(), jobs.jobs());
      trace.begin();
      if (!meet(b)) return;
      trace.end(Phase::kWait, blockIdx.x, 0);
    }
    trace.begin();
    dots.run();
    __syncthreads();
    jobs.sum_results();
    trace.end(Product<kReturning>::kPhase, blockIdx.x, next);
    next += jobs.twos;
    if (next == end) return;
    __syncthreads();
  }
}

}  // namespace few

template <class Dtype, Activation kActivation, bool kTrace>
__device__ __forceinline__ void run_few(const KernelArgs& args, FewShared& s) {
  const few::Block b{args, args.call, s, Platform::load_relaxed(&args.call.control()->calls.value) + 1};
  if (b.epoch == 0) return;  // an earlier call failed, see leave()
  const Tracer<kTrace, kFewThreads> trace{args, s.trace_events, s.trace_starts};
  if (threadIdx.x == 0) {
    s.failed = 0;
    s.trace_events = 0;
  }
  __syncthreads();
  bool ok = few::run_gate<Dtype>(b, trace);
  trace.begin();
  ok = ok && few::route<Dtype>(b);
  if (ok) {
    __syncthreads();
    trace.end(Phase::kDispatch, blockIdx.x, 0);
    if (b.c.shape.shared == 0) {
      few::run_gemm0<Dtype, kActivation, false>(b, trace);
      few::run_gemm1<Dtype, false>(b, trace);
    } else {
      few::run_gemm0<Dtype, kActivation, true>(b, trace);
      few::run_gemm1<Dtype, true>(b, trace);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  trace.finish();
  if (s.failed != 0 && s.fault.kind != FaultKind::kNone) {
    s.call = b.c;
    s.call.epoch = b.epoch;
    post_fault<Platform>(s.call, s.fault);
  }
  leave(args, b.c, b.epoch);
}

}  // namespace flashmoe::gpu

// Routing in the kernel for a few tokens (sm90/decode/alone.cuh): logits, choices, and units. (A unit is a few rows of
// one expert.) Every block lists all units for itself in shared memory (FewRouting).
//
// All threads of all blocks run this code, except functions whose comment names a warp. It reads x, the router's
// weights, and routing that the caller gives. Each block computes some of the logits. Blocks exchange logits, and, if
// tokens are many, their choices. They do this in FewMemory (gpu/decode_memory.h), in this rank's device memory. Each
// exchanged word has its call's epoch, which is its signal.
// report_routing() writes experts and weights to this rank's workspace, where the host reads them; each block writes
// those of every gridDim-th token. If the caller asks for the outputs `load` (choices of each expert) and
// `router_logits`, this file writes them. It neither reads nor writes memory of other ranks: what peers' tokens choose
// comes in packets (decode/packets.cuh).
#pragma once

#include "flashmoe/gpu/route.cuh"
#include "flashmoe/gpu/shared_expert.cuh"
#include "flashmoe/sm90/decode/block.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90::few {

// Up to so many tokens, every block chooses for all tokens: cheaper, in two turns of its warps, than to choose once and pass it on.
inline constexpr uint32_t kMostChosenByAll = 2 * kFewRouters;

// ---- gate -----------------------------------------------------------------------------------------------------------

// A logit and its call's epoch are one word, its own signal.
__device__ __forceinline__ void store_logit(const Block& b, uint32_t token, uint32_t expert, float logit) {
  P::store_relaxed(b.memory().logit(token, expert), b.epoch << 32 | __float_as_uint(logit));
}

// A warp's sums of eight experts' rows, from `row` on, with at most eight tokens' over chunks [begin, end).
template <class Dtype>
  requires(Dtype::kBytes == 2)
__device__ __forceinline__ BlockSums<Dtype> sum_chunks(const Block& b, const uint8_t* row, uint32_t begin,
                                                       uint32_t end) {
  constexpr uint32_t kChunks = 7;  // of a lane, at a time: all that it has of H up to 2688, in one round trip
  const uint8_t* const x = b.args.x + uint64_t{b.token_at(min_of(P::lane() / 4, b.c.shape.tokens - 1))} * 16;
  BlockSums<Dtype> sums;
#pragma unroll 1
  for (uint32_t first = begin + P::lane() % 4; P::ballot(first < end) != 0; first += kChunks * 4) {
    const uint8_t *weights = row + first * 16, *tokens = x + first * 16;
    // Opaque, or the compiler works both out anew for each chunk, from memory, and a load waits for that.
    asm("" : "+l"(weights), "+l"(tokens));
    uint4 w[kChunks], v[kChunks];
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      w[j] = v[j] = uint4{};
      if (first + 4 * j < end) w[j] = load_weights16(weights + j * 64), v[j] = load_row16(tokens + j * 64);
    }
#pragma unroll
    for (uint32_t j = 0; j < kChunks; ++j) {
      sums.add({v[j].x, 0, v[j].y, 0}, w[j].x, w[j].y);
      sums.add({v[j].z, 0, v[j].w, 0}, w[j].z, w[j].w);
    }
  }
  return sums;
}
template <class Dtype>
  requires(Dtype::kBytes == 4)
__device__ __forceinline__ ExactSums<Dtype, 1> sum_chunks(const Block& b, const uint8_t* row, uint32_t begin,
                                                          uint32_t end) {
  ExactSums<Dtype, 1> sums;
#pragma unroll 2
  for (uint32_t chunk = begin + P::lane() % 4; chunk < end; chunk += 4) {
    const uint4 weights[1][1] = {{load_weights16(row + chunk * 16)}};
    sums.add(weights, b.c.shape.tokens,
             [&](uint32_t t, uint32_t) { return load_row16(b.args.x + uint64_t{b.token_at(t) + chunk} * 16); });
  }
  return sums;
}

// Of so few tokens that all bits may be of sums in parts, time is that of a round trip: the warps of a block have parts of H
// each of eight experts' rows, and add up what they have in a fixed order.
template <class Dtype>
__device__ __forceinline__ void compute_few_logits(const Block& b, uint32_t expert) {
  const uint32_t experts = b.c.shape.routed_experts(), tokens = b.c.shape.tokens;
  const uint32_t chunks = b.c.shape.hidden * Dtype::kBytes / 16, fours = ceil_div(chunks, 4u);
  if (b.warp() < kFewRouters) {
    const uint32_t begin = begin_of_part(fours, b.warp(), kFewRouters) * 4;
    const uint32_t end = min_of(begin_of_part(fours, b.warp() + 1, kFewRouters) * 4, chunks);
    const auto sums =
        sum_chunks<Dtype>(b, b.args.router_rows.row(0, min_of(expert + P::lane() / 4, experts - 1)), begin, end);
    float* const partial = b.s.scratch.partial[b.warp()];
    sums.finish(tokens, [&](uint32_t t, const float (&sum)[1][2]) {
      const uint32_t at = t * kProductRows + sums.first_row();
      partial[at] = sum[0][0];
      partial[at + 1] = sum[0][1];
    });
  }
  __syncthreads();
  const uint32_t i = threadIdx.x, e = expert + i % kProductRows;
  if (i < tokens * kProductRows && e < experts) {
    float logit = bias_at<Dtype>(b.args.router_bias, e, true);
    for (uint32_t w = 0; w < kFewRouters; ++w) logit += b.s.scratch.partial[w][i];
    store_logit(b, i / kProductRows, e, logit);
  }
  __syncthreads();
}

inline constexpr uint32_t kLogitTokens = 16;  // of a warp
// Sums of a logit, of every so many-th step each. One has the general kernel's bits, and makes each step wait for the one before,
// some 33 clocks: 8 us of H = 7168. Where the experts' products have bits of their own, in a group's calls of FP8, there are
// several, whatever the number of tokens, and larger parts come at a time.
inline constexpr bool kOwnLogits = kBuild.group && kBuild.quantised;
inline constexpr uint32_t kLogitSums = kOwnLogits ? 4 : 1;
// What a block computes at a time of more tokens' logits: those of eight experts for some tokens, a warp for each 16. Their
// rows come to shared memory in parts, swizzled like a stage's, some of which are on their way while one is multiplied.
struct LogitJob {
  static constexpr uint32_t kParts = 4, kMostPartBytes = kOwnLogits ? 2048 : 1024;  // in shared memory, and of a row

  uint32_t expert, token, tokens;

  __device__ __forceinline__ uint32_t rows() const { return kProductRows + tokens; }
  // Warps that multiply, the first ones; the others load, unless there are none.
  __device__ __forceinline__ uint32_t multiplying() const { return ceil_div(tokens, kLogitTokens); }
  __device__ __forceinline__ uint32_t part_bytes() const {
    return min_of(kMostPartBytes, uint32_t{sizeof(FewShared::logit_rows)} / kParts / rows() / kRowBytes * kRowBytes);
  }
};
static_assert(sizeof(FewShared::logit_rows) / LogitJob::kParts / (kProductRows + kFewRouters * kLogitTokens) >=
              kRowBytes);

// All threads: part `part` of the rows, as a group of copies. Experts' rows, then tokens'. Who multiplies has no time for it.
template <class Dtype>
__device__ __forceinline__ void load_logit_rows(const Block& b, const LogitJob& job, uint32_t part) {
  const uint32_t pitch = job.part_bytes(), chunks = pitch / 16, all = b.c.shape.hidden * Dtype::kBytes;
  const uint32_t first = part * pitch,
                 to = shared_address(b.s.logit_rows) + part % LogitJob::kParts * job.rows() * pitch;
  const uint32_t busy = job.multiplying() % kFewWarps * P::kLanes, end = first < all ? job.rows() * chunks : 0;
  for (uint32_t i = threadIdx.x - busy; threadIdx.x >= busy && i < end; i += kFewThreads - busy) {
    const uint32_t r = i / chunks, chunk = i % chunks;
    const uint8_t* const row = r < kProductRows
                                   ? b.args.router_rows.row(0, min_of(job.expert + r, b.c.shape.routed_experts() - 1))
                                   : b.args.x + uint64_t{b.token_at(job.token + r - kProductRows)} * 16;
    const bool exists = first + chunk * 16 < all;
    cp_async16_or_zero(to + r * pitch + (chunk ^ r % 8) * 16, row + (exists ? first + chunk * 16 : 0), exists ? 16 : 0);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All threads. Steps of 16 elements of H in their order.
template <class Dtype>
__device__ __forceinline__ void compute_logits_of(const Block& b, const LogitJob& job) {
  const uint32_t pitch = job.part_bytes(), parts = ceil_div(b.c.shape.hidden * Dtype::kBytes, pitch);
  const uint32_t matrix = P::lane() / 8, row = P::lane() % 8, first_token = b.warp() * kLogitTokens;
  // Where a token does not exist, another one's row: no sum but its own has it.
  const uint32_t x_row = min_of(kProductRows + first_token + matrix % 2 * 8 + row, job.rows() - 1);
  BlockSums<Dtype> sums[kLogitSums];
  for (uint32_t part = 0; part + 1 < LogitJob::kParts; ++part) load_logit_rows<Dtype>(b, job, part);
#pragma unroll 1
  for (uint32_t part = 0; part < parts; ++part) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LogitJob::kParts - 2) : "memory");
    __syncthreads();  // all have their copies of this part, and have read the one before
    load_logit_rows<Dtype>(b, job, part + LogitJob::kParts - 1);
    if (first_token >= job.tokens) continue;
    const uint32_t from = shared_address(b.s.logit_rows) + part % LogitJob::kParts * job.rows() * pitch;
#pragma unroll 2
    for (uint32_t block = 0; block < pitch / kRowBytes; ++block) {  // loaded as a whole: a sum waits for the one before
      uint32_t w[2][4], a[4][4];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        load_matrices(w[h], from + row * pitch + block * kRowBytes + ((4 * h + matrix) ^ row) * 16);
      }
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s) {
        load_matrices(a[s], from + x_row * pitch + block * kRowBytes + ((2 * s + matrix / 2) ^ x_row % 8) * 16);
      }
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s) {
        sums[s % kLogitSums].add(a[s], w[s / 2][s % 2 * 2], w[s / 2][s % 2 * 2 + 1]);
      }
    }
  }
  __syncthreads();  // another job's rows may come
  if (first_token >= job.tokens) return;
#pragma unroll
  for (uint32_t apart = kLogitSums / 2; apart != 0; apart /= 2) {
#pragma unroll
    for (uint32_t s = 0; s < apart; ++s) sums[s].add(sums[s + apart]);
  }
  sums[0].finish(min_of(kLogitTokens, job.tokens - first_token), [&](uint32_t t, const float (&sum)[1][2]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t e = job.expert + BlockSums<Dtype>::first_row() + i;
      if (e >= b.c.shape.routed_experts()) continue;
      store_logit(b, job.token + first_token + t, e, sum[0][i] + bias_at<Dtype>(b.args.router_bias, e, true));
    }
  });
}

// All of the call's logits, by all blocks together.
template <class Dtype>
__device__ __forceinline__ void compute_logits(const Block& b) {
  const uint32_t all = b.c.shape.tokens, eights = ceil_div(b.c.shape.routed_experts(), kProductRows);
  if (b.in_parts()) {
    for (uint32_t i = blockIdx.x; i < eights; i += gridDim.x) compute_few_logits<Dtype>(b, i * kProductRows);
    return;
  }
  if constexpr (Dtype::kBytes == 2) {  // of fp32 there are no more tokens
    // Of so many tokens that there is about one job for each block; but for those that send rows meanwhile, the last ones.
    const uint32_t busy = kBuild.group ? min_of(b.c.blocks(), gridDim.x - 1) : 0;
    const uint32_t each =
        kLogitTokens * min_of(kFewRouters, ceil_div(eights * ceil_div(all, kLogitTokens), gridDim.x - busy));
    for (uint32_t i = blockIdx.x; i < eights * ceil_div(all, each); i += gridDim.x) {
      const uint32_t token = i / eights * each;
      compute_logits_of<Dtype>(b, {i % eights * kProductRows, token, min_of(each, all - token)});
    }
  }
}

// ---- choice ---------------------------------------------------------------------------------------------------------

// A block chooses for all tokens where they are at most kMostChosenByAll, else for those that are its own, every gridDim-th.
struct Tokens {
  uint32_t first, step, count;

  __device__ __forceinline__ uint32_t operator[](uint32_t i) const { return first + i * step; }
};
__device__ __forceinline__ Tokens own_tokens(const Block& b) {
  const uint32_t all = b.c.shape.tokens;
  return {blockIdx.x, gridDim.x, blockIdx.x < all ? ceil_div(all - blockIdx.x, gridDim.x) : 0};
}
// Whether the choice of others' tokens is theirs.
__device__ __forceinline__ bool shares_choices(const Block& b) {
  if constexpr (kBuild.group) return true;  // in packets
  return b.c.shape.tokens > kMostChosenByAll && (b.args.topk_ids == nullptr || b.args.shared_gate != nullptr);
}
__device__ __forceinline__ Tokens tokens_to_decide(const Block& b) {
  return shares_choices(b) ? own_tokens(b) : Tokens{0, 1, b.c.shape.tokens};
}

// A warp: the logits of one token, from all blocks.
__device__ __forceinline__ void collect_logits(const Block& b, uint32_t token, float* to) {
  constexpr uint32_t kAtOnce = 4;  // of a lane: a round trip each would take longer than all else
  const uint32_t experts = b.c.shape.routed_experts();
  const uint64_t* const from = b.memory().logit(token, 0);
  for (uint32_t base = P::lane(); P::ballot(base < experts) != 0; base += kAtOnce * P::kLanes) {
    uint64_t words[kAtOnce];
    wait_for_blocks(b, [&] {
      bool here = true;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        words[i] = P::load_relaxed(from + min_of(base + i * P::kLanes, experts - 1));
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) here &= words[i] >> 32 == (b.epoch & 0xffffffffu);
      return P::ballot(!here) == 0 ? Step::kDone : Step::kIdle;
    });
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (base + i * P::kLanes < experts) to[base + i * P::kLanes] = __uint_as_float(static_cast<uint32_t>(words[i]));
    }
  }
  P::sync();
}

// Each warp for some of the tokens.
__device__ __forceinline__ void choose(const Block& b, const Tokens& tokens) {
  const uint32_t experts = b.c.shape.routed_experts(), top_k = b.c.shape.routed_top_k();
  const RouterRule& rule = b.args.rule;
  float* const logits = b.s.scratch.logits + b.warp() * experts;
  if (b.warp() >= kFewRouters) return;
  for (uint32_t i = b.warp(); i < tokens.count && b.s.failed == 0; i += kFewRouters) {
    const uint32_t t = tokens[i];
    collect_logits(b, t, logits);
    if (b.args.router_logits != nullptr && (kBuild.group || t % gridDim.x == blockIdx.x)) {
      write_logits(rule, b.args.router_logits + uint64_t{t} * experts, logits, experts, P::lane(), P::kLanes);
      P::sync();
    }
    const TokenChoice choice[1] = {
        {logits, b.routing.ids + t * b.args.few_choices, b.routing.weights + t * b.args.few_choices}};
    const bool good = rule.plain() ? choose_experts(choice, experts, top_k, rule.renormalize != 0) == 0
                                   : choose_by_rule(rule, choice[0], experts, top_k);
    if (!good && P::lane() == 0) note_row<P>(b.c, RowFault::kLogits, t);
  }
}

// Whether a given choice is wrong: an expert that does not exist, or one that the token has already. id_of(j): that of an
// earlier choice, of which the token's first is `begin`.
template <class IdOf>
__device__ __forceinline__ bool is_wrong(const Block& b, uint32_t begin, uint32_t i, int32_t id, IdOf&& id_of) {
  bool twice = false;
  for (uint32_t j = begin; j < i; ++j) twice |= id_of(j) == id;
  return id != ExpertId::kNone && (twice || id < 0 || static_cast<uint32_t>(id) >= b.c.shape.routed_experts());
}

// All threads, behind a meeting that was behind the last is_wrong(): tokens with a wrong choice are noted, and get no expert.
__device__ __forceinline__ void spoil_given(const Block& b, uint32_t first, uint32_t tokens) {
  if (b.s.wrong == 0) return;
  const uint32_t top_k = b.c.shape.routed_top_k();
#pragma unroll 1
  for (uint32_t t = first + threadIdx.x; t < first + tokens; t += kFewThreads) {
    int32_t* const ids = b.routing.ids + t * b.args.few_choices;
    float* const weights = b.routing.weights + t * b.args.few_choices;
    bool bad = false;
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; ++k) {
      if (!is_wrong(b, 0, k, ids[k], [&](uint32_t j) { return ids[j]; })) continue;
      bad = true;
      const bool exists = ids[k] >= 0 && static_cast<uint32_t>(ids[k]) < b.c.shape.routed_experts();
      note_row<P>(b.c, exists ? RowFault::kDuplicateExpert : RowFault::kExpertRange, t, ids[k]);
    }
#pragma unroll 1
    for (uint32_t k = 0; bad && k < top_k; ++k) ids[k] = ExpertId::kBad, weights[k] = 0.0f;
  }
  __syncthreads();
}

// What Call::routing has of a choice that has no row.
__device__ __forceinline__ int32_t recorded_without_row(int32_t id) {
  const uint32_t why = id >= 0 ? Choice::kDropped : id == ExpertId::kNone ? Choice::kNone : Choice::kBad;
  return static_cast<int32_t>(why);
}

// Given routing is not trusted: every block finds out whether something is wrong with it.
template <class Dtype>
__device__ __forceinline__ void take_given(const Block& b) {
  const uint32_t top_k = b.c.shape.routed_top_k();
  auto id_of = [&](uint32_t i) { return given_id(b.args, i); };
  for (uint32_t p = threadIdx.x; p < b.c.shape.tokens * top_k; p += kFewThreads) {
    const int32_t id = id_of(p);
    const uint32_t choice = p + p / top_k * b.c.shape.shared;  // the token's slices lie between
    b.routing.ids[choice] = id;
    b.routing.weights[choice] = id == ExpertId::kNone ? 0.0f : given_weight<Dtype>(b.args, p);
    if (is_wrong(b, p - p % top_k, p, id, id_of)) b.s.wrong = 1;
  }
}

// The shared expert's slices among the choices of a token, as experts behind the routed ones. One warp.
__device__ __forceinline__ void add_slices(const Block& b, uint32_t token, float weight) {
  for (uint32_t n = P::lane(); n < b.c.shape.shared; n += P::kLanes) {
    const uint32_t choice = token * b.args.few_choices + b.c.shape.routed_top_k() + n;
    b.routing.ids[choice] = static_cast<int32_t>(b.c.shape.routed_experts() + n);
    b.routing.weights[choice] = weight;
  }
}
template <class Dtype>
__device__ __forceinline__ void add_shared(const Block& b, const Tokens& tokens) {
  for (uint32_t i = b.warp(); i < tokens.count; i += kFewWarps) {
    const uint8_t* const row = b.args.x + uint64_t{b.token_at(tokens[i])} * 16;
    add_slices(b, tokens[i], shared_weight<Dtype>(b.args, row, b.c.shape.hidden));
  }
}

// A word of 16 bytes is stored and loaded as a whole.
__device__ __forceinline__ void store_choice(FewChoice* to, const FewChoice& choice) {
  asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(to),
               "l"(choice.epoch), "l"(uint64_t{choice.expert} << 32 | choice.weight)
               : "memory");
}
__device__ __forceinline__ FewChoice load_choice(const FewChoice* from) {
  uint64_t epoch, rest;
  asm volatile("{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
               : "=l"(epoch), "=l"(rest)
               : "l"(from)
               : "memory");
  return {epoch, static_cast<uint32_t>(rest), static_cast<uint32_t>(rest >> 32)};
}

// The block's own tokens' choices, for all blocks; then those of all tokens, here. Slices of the shared expert have one
// weight. False if the call is over.
__device__ __forceinline__ bool share_choices(const Block& b) {
  constexpr uint32_t kAtOnce = 3;  // of a lane: 1024 choices in one round trip
  const uint32_t n = b.args.few_choices, top_k = b.c.shape.routed_top_k(), experts = b.c.shape.routed_experts();
  const Tokens own = own_tokens(b);
  for (uint32_t i = b.warp(); i < own.count; i += kFewWarps) {
    const uint32_t t = own[i];
    for (uint32_t k = P::lane(); k < b.c.shape.top_k; k += P::kLanes) {
      store_choice(b.memory().chosen(t, k), {b.epoch, __float_as_uint(b.routing.weights[t * n + k]),
                                             static_cast<uint32_t>(b.routing.ids[t * n + k])});
    }
  }
  for (uint32_t base = b.warp() * P::kLanes; base < b.choices(); base += kAtOnce * kFewThreads) {
    FewChoice choices[kAtOnce];
    auto choice_of = [&](uint32_t i) { return min_of(base + i * kFewThreads + P::lane(), b.choices() - 1); };
    wait_for_blocks(b, [&] {
      bool here = true;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t p = choice_of(i);
        choices[i] = load_choice(b.memory().chosen(p / n, min_of(p % n, top_k)));
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) here &= choices[i].epoch == b.epoch;
      return P::ballot(!here) == 0 ? Step::kDone : Step::kIdle;
    });
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t p = choice_of(i), k = p % n;
      b.routing.ids[p] = static_cast<int32_t>(k < top_k ? choices[i].expert : experts + k - top_k);
      b.routing.weights[p] = __uint_as_float(choices[i].weight);
    }
  }
  return all_well(b);
}

// ---- units ----------------------------------------------------------------------------------------------------------

// Choices of a segment.
__device__ __forceinline__ uint32_t segment_length(const Block& b) {
  return align_up(ceil_div(b.choices(), FewScratch::kSegments), P::kLanes);
}

// One warp: counts the choices of its segment for each expert. A choice's row is, for now, which of them it is.
__device__ __forceinline__ void count_segment(const Block& b, uint32_t segment) {
  FewRouting& s = b.routing;
  uint16_t* const count = b.s.scratch.groups.count + segment * b.experts();
  const uint32_t length = segment_length(b), end = min_of((segment + 1) * length, b.choices());
  for (uint32_t base = segment * length; base < end; base += P::kLanes) {
    const uint32_t p = base + P::lane();
    const int32_t expert = p < end ? s.ids[p] : ExpertId::kNone;
    const bool exists = expert >= 0;
    bool last;
    const uint32_t rank = P::rank_among_equal(static_cast<uint32_t>(expert), exists, last);
    const uint32_t position = exists ? count[expert] + rank : 0;
    if (exists) s.row[p] = static_cast<uint16_t>(position);
    P::sync();
    if (exists && last) count[expert] = static_cast<uint16_t>(position + 1);
    P::sync();
  }
}

__device__ __forceinline__ uint32_t kept(const Block& b, uint32_t expert, uint32_t choices) {
  return b.c.shape.capacity == 0 || b.is_shared(expert) ? choices : min_of(choices, b.c.shape.capacity);
}

// All threads: what each segment has before it of each expert's choices, and how many rows the expert has.
__device__ __forceinline__ void add_segments(const Block& b, uint32_t segments) {
  auto& groups = b.s.scratch.groups;
  for (uint32_t e = threadIdx.x; e < b.experts(); e += kFewThreads) {
    uint32_t counts[FewScratch::kSegments], count = 0;
#pragma unroll
    for (uint32_t i = 0; i < FewScratch::kSegments; ++i) {
      counts[i] = i < segments ? groups.count[i * b.experts() + e] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < FewScratch::kSegments; ++i) {
      if (i < segments) groups.count[i * b.experts() + e] = static_cast<uint16_t>(count);
      count += counts[i];
    }
    groups.rows[e] = static_cast<uint16_t>(kept(b, e, count));
  }
}

// The warps, 32 experts each at a time: where each one's rows begin, and its units.
template <class Dtype>
__device__ __forceinline__ void number_units(const Block& b) {
  constexpr uint32_t kMost = kUnitRows<Dtype>;
  FewRouting& s = b.routing;
  auto& groups = b.s.scratch.groups;
  // Rows and units in one word.
  auto both = [](uint32_t rows) { return rows << 16 | ceil_div(rows, kMost); };
  for (uint32_t base = b.warp() * P::kLanes; base < b.experts(); base += kFewThreads) {
    const uint32_t e = base + P::lane();
    uint32_t before = 0;
    for (uint32_t other = P::lane(); other < base; other += P::kLanes) before += both(groups.rows[other]);
    uint32_t count = e < b.experts() ? groups.rows[e] : 0, total;
    const uint32_t first = __reduce_add_sync(kFullWarp, before) + P::exclusive_scan(both(count), total);
    uint32_t row = first >> 16, unit = first & 0xffff;
    if (e < b.experts()) groups.first[e] = static_cast<uint16_t>(row);
    for (; count != 0; ++unit) {
      const uint32_t n = min_of(count, kMost);
      s.unit_expert[unit] = static_cast<uint16_t>(e);
      s.unit_first[unit] = static_cast<uint16_t>(row);
      s.unit_rows[unit] = static_cast<uint16_t>(n);
      row += n;
      count -= n;
    }
    if (e + 1 == b.experts()) {
      s.rows = row;
      s.units = unit;
    }
  }
}

// One warp, of at most as many choices as it has lanes: what group_choices does of more, without its meetings.
template <class Dtype>
__device__ __forceinline__ void group_lanes(const Block& b) {
  FewRouting& s = b.routing;
  const int32_t id = P::lane() < b.choices() ? s.ids[P::lane()] : ExpertId::kNone;
  const bool exists = id >= 0;
  const uint32_t expert = exists ? static_cast<uint32_t>(id) : ~0u;
  const uint32_t equal = __match_any_sync(kFullWarp, expert), before = (1u << P::lane()) - 1;
  const uint32_t count = kept(b, expert, P::popcount(equal)), position = P::popcount(equal & before);
  const bool first = exists && position == 0, keeps = exists && position < count;
  const uint32_t all_kept = P::ballot(keeps), all_first = P::ballot(first);
  uint32_t row = position, unit = 0;  // behind those of experts before this one
  for (uint32_t others = P::ballot(exists); others != 0; others &= others - 1) {
    const uint32_t lane = static_cast<uint32_t>(__ffs(static_cast<int>(others))) - 1;
    const uint32_t other = __shfl_sync(kFullWarp, expert, static_cast<int>(lane));
    row += other < expert ? all_kept >> lane & 1u : 0;
    unit += other < expert ? all_first >> lane & 1u : 0;
  }
  if (P::lane() < b.choices()) s.row[P::lane()] = keeps ? static_cast<uint16_t>(row) : kDropped;
  if (keeps) s.choice[row] = static_cast<uint16_t>(P::lane());
  if (first) {
    s.unit_expert[unit] = static_cast<uint16_t>(expert);
    s.unit_first[unit] = static_cast<uint16_t>(row);
    s.unit_rows[unit] = static_cast<uint16_t>(count);
  }
  if (P::lane() != 0) return;
  s.rows = P::popcount(all_kept);
  s.units = P::popcount(all_first);
}

// All threads: gives choices their rows, but for those beyond their expert's capacity, the last in token order.
template <class Dtype>
__device__ __forceinline__ void group_choices(const Block& b) {
  if (b.choices() <= P::kLanes && b.c.shape.tokens <= kUnitRows<Dtype>) {
    if (b.warp() == 0) group_lanes<Dtype>(b);
    return;
  }
  FewRouting& s = b.routing;
  auto& groups = b.s.scratch.groups;
  const uint32_t length = segment_length(b), segments = ceil_div(b.choices(), max_of(length, 1u));
  for (uint32_t i = threadIdx.x; i < segments * b.experts(); i += kFewThreads) groups.count[i] = 0;
  __syncthreads();
  if (b.warp() < segments) count_segment(b, b.warp());
  __syncthreads();
  add_segments(b, segments);
  __syncthreads();
  number_units<Dtype>(b);
  __syncthreads();
  for (uint32_t p = threadIdx.x; p < b.choices(); p += kFewThreads) {
    const uint32_t expert = static_cast<uint32_t>(s.ids[p]);
    if (s.ids[p] < 0) {
      s.row[p] = kDropped;
      continue;
    }
    const uint32_t position = s.row[p] + groups.count[p / length * b.experts() + expert];
    const uint32_t row = groups.first[expert] + position;
    const bool exists = position < kept(b, expert, position + 1);
    s.row[p] = exists ? static_cast<uint16_t>(row) : kDropped;
    if (exists) s.choice[row] = static_cast<uint16_t>(p);
  }
}

// All threads, when no block still reads others' choices: what the host reads of the block's own tokens.
__device__ __forceinline__ void report_routing(const Block& b) {
  const uint32_t top_k = b.c.shape.routed_top_k();
  const Tokens own = own_tokens(b);
  for (uint32_t i = threadIdx.x; i < own.count * top_k; i += kFewThreads) {
    const uint32_t t = own[i / top_k], k = i % top_k, p = t * b.args.few_choices + k;
    const int32_t expert = b.routing.ids[p];
    if (b.args.load != nullptr && expert >= 0) P::add(&b.args.load[expert], uint64_t{1});
    b.c.routing(t)[k] = b.routing.row[p] == kDropped ? recorded_without_row(expert) : expert;
    b.c.weights(t)[k] = b.routing.weights[p];
  }
}

// Fills ids, weights, rows and units. False if the call is over.
template <class Dtype>
__device__ __forceinline__ bool route(const Block& b) {
  const Tokens tokens = tokens_to_decide(b);
  if (b.args.topk_ids != nullptr) {
    take_given<Dtype>(b);
  } else {
    choose(b, tokens);
  }
  if (b.c.shape.shared != 0) add_shared<Dtype>(b, tokens);
  if (!all_well(b)) return false;
  spoil_given(b, 0, b.c.shape.tokens);
  if (shares_choices(b) && !share_choices(b)) return false;
  group_choices<Dtype>(b);
  fence_proxy_async_shared();  // the copy engine writes where all this was
  __syncthreads();
  return true;
}

}  // namespace flashmoe::sm90::few

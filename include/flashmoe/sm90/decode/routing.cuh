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

// Up to so many tokens, every block chooses for all tokens, in two turns of its warps. This takes less time than to
// choose once and to pass choices on.
inline constexpr uint32_t kMostChosenByAll = 2 * kFewRouters;

// ---- gate -----------------------------------------------------------------------------------------------------------

// Stores the logit that is `sum` and the expert's bias. A logit and its call's epoch are one word, so that the word is
// its own signal.
template <class Dtype>
__device__ __forceinline__ void store_logit(const Block& b, uint32_t token, uint32_t expert, float sum) {
  const float logit = rounded_logit<Dtype>(b.args.rule, sum + bias_at<Dtype>(b.args.router_bias, expert, true));
  P::store_relaxed(b.memory().logit(token, expert), b.epoch << 32 | __float_as_uint(logit));
}

// A warp's sums of the products of eight experts' rows, from `expert` on, with all tokens' rows, of which there are at
// most eight, over chunks [begin, end) of H. In 16 bits, steps have the same elements and the same order as in other
// kernels. The rows pass through the warp's part of shared memory, swizzled like those of a stage. The code has loops
// where it could be unrolled, because it runs once: the time of its instructions would be that of fetching them.
template <class Dtype>
  requires(Dtype::kBytes == 2)
__device__ __forceinline__ BlockSums<Dtype> sum_chunks(const Block& b, uint32_t expert, uint32_t begin, uint32_t end) {
  constexpr uint32_t kPitch = 1024, kChunks = kPitch / 16, kBlockChunks = kRowBytes / 16;  // of a row at a time
  static_assert(kLogitSegments * 2 * kProductRows * kPitch <= sizeof(FewGate::rows));
  const uint32_t memory = shared_address(b.s.gate.rows) + b.warp() * (2 * kProductRows * kPitch);
  const uint32_t matrix = P::lane() / 8, row = P::lane() % 8, last = b.c.shape.routed_experts() - 1;
  BlockSums<Dtype> sums;
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += kChunks) {
    const uint32_t chunks = min_of(kChunks, end - first);
#pragma unroll 1
    for (uint32_t r = 0; r < kProductRows + b.c.shape.tokens; ++r) {
      const uint8_t* const from = (r < kProductRows ? b.args.router_rows.row(0, min_of(expert + r, last))
                                                    : b.args.x + uint64_t{b.token_at(r - kProductRows)} * 16) +
                                  first * 16;
#pragma unroll 1
      for (uint32_t c = P::lane(); c < align_up(chunks, kBlockChunks); c += P::kLanes) {
        const bool exists = c < chunks;
        cp_async16_or_zero(memory + r * kPitch + (c ^ r % 8) * 16, from + (exists ? c : 0) * 16, exists ? 16 : 0);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    P::sync();
    // The operands of a k-block are loaded while the one before is multiplied: each step waits for the step before.
    uint32_t w[2][2][4], x[2][2][4];  // [k-block % 2][half of it], two steps each
    const auto load = [&](uint32_t c, uint32_t (&w)[2][4], uint32_t (&x)[2][4]) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        load_matrices(w[h], memory + row * kPitch + (c + ((4 * h + matrix) ^ row)) * 16);
        load_matrices(x[h], memory + (kProductRows + row) * kPitch + (c + ((4 * h + matrix) ^ row)) * 16);
      }
    };
    load(0, w[0], x[0]);
#pragma unroll 1
    for (uint32_t c = 0; c < chunks; c += 2 * kBlockChunks) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        // Behind the last k-block, what is loaded is not multiplied.
        load(min_of(c + (i + 1) * kBlockChunks, kChunks - kBlockChunks), w[1 - i], x[1 - i]);
        if (i == 1 && c + kBlockChunks >= chunks) break;
#pragma unroll
        for (uint32_t s = 0; s < 4; ++s) {
          const uint32_t (&tokens)[4] = x[i][s / 2], (&weights)[4] = w[i][s / 2];
          sums.add({tokens[s % 2 * 2], 0, tokens[s % 2 * 2 + 1], 0}, weights[s % 2 * 2], weights[s % 2 * 2 + 1]);
        }
      }
    }
    P::sync();
  }
  return sums;
}
template <class Dtype>
  requires(Dtype::kBytes == 4)
__device__ __forceinline__ ExactSums<Dtype, 1> sum_chunks(const Block& b, uint32_t expert, uint32_t begin,
                                                          uint32_t end) {
  const uint8_t* const row = b.args.router_rows.row(0, min_of(expert + P::lane() / 4, b.c.shape.routed_experts() - 1));
  ExactSums<Dtype, 1> sums;
#pragma unroll 2
  for (uint32_t chunk = begin + P::lane() % 4; chunk < end; chunk += 4) {
    const uint4 weights[1][1] = {{load_weights16(row + chunk * 16)}};
    sums.add(weights, b.c.shape.tokens,
             [&](uint32_t t, uint32_t) { return load_row16(b.args.x + uint64_t{b.token_at(t) + chunk} * 16); });
  }
  return sums;
}

// For calls of up to kFewExactTokens tokens on a rank alone: the gate then takes about as long as a round trip to
// memory. So each warp of a block has a part of H of eight experts' rows, and the warps' sums are added in the order of
// parts. In 16 bits the parts are the logit's segments (kLogitSegments).
template <class Dtype>
__device__ __forceinline__ void compute_few_logits(const Block& b, uint32_t expert) {
  constexpr uint32_t kParts = Dtype::kBytes == 2 ? kLogitSegments : kFewRouters;
  constexpr uint32_t kApart = Dtype::kBytes == 2 ? kRowBytes / 16 : 4;  // parts begin at multiples of so many chunks
  static_assert(kParts <= kFewRouters);
  const uint32_t experts = b.c.shape.routed_experts(), tokens = b.c.shape.tokens;
  const uint32_t chunks = b.c.shape.hidden * Dtype::kBytes / 16, all = ceil_div(chunks, kApart);
  if (b.warp() < kParts) {
    const uint32_t begin = begin_of_part(all, b.warp(), kParts) * kApart;
    const uint32_t end = min_of(begin_of_part(all, b.warp() + 1, kParts) * kApart, chunks);
    const auto sums = sum_chunks<Dtype>(b, expert, begin, end);
    float* const partial = b.s.gate.partial[b.warp()];
    sums.finish(tokens, [&](uint32_t t, const float (&sum)[1][2]) {
      const uint32_t at = t * kProductRows + sums.first_row();
      partial[at] = sum[0][0];
      partial[at + 1] = sum[0][1];
    });
  }
  __syncthreads();
  const uint32_t i = threadIdx.x, e = expert + i % kProductRows;
  if (i < tokens * kProductRows && e < experts) {
    float logit = 0.0f;
    for (uint32_t w = 0; w < kParts; ++w) logit += b.s.gate.partial[w][i];
    store_logit<Dtype>(b, i / kProductRows, e, logit);
  }
  __syncthreads();
}

inline constexpr uint32_t kLogitTokens = 16;  // tokens of a warp
// For calls of more tokens: a block computes the logits of some experts for some tokens at a time, with a warp for each
// eight experts and 16 tokens. The rows of experts and tokens come to shared memory in parts along H, swizzled like those of a
// stage. While one part is multiplied, others are on their way. A logit has several sums (kLogitSegments), and each
// step of a sum waits for the step before, some 33 clocks. So kAbreast segments go side by side: a part of a row has as
// many k-blocks of each of them. When these segments are done, the next ones begin. A segment that is shorter than
// others ends with k-blocks of zeros.
template <uint32_t kAbreast>
struct LogitJob {
  // Parts at a time, and the most bytes of a row in a part. (Ranks with experts in FP8 have few tokens and long rows.)
  static constexpr uint32_t kParts = 4, kMostPartBytes = kBuild.group && kBuild.quantised ? 2048 : 1024;
  static constexpr uint32_t kRounds = kLogitSegments / kAbreast;
  static constexpr uint32_t kLeastPartBytes = kAbreast * kRowBytes;

  uint32_t k_blocks;  // of H
  uint32_t expert, experts, token, tokens;

  // Whether shared memory has room for parts of so many rows, of experts and of tokens.
  static __device__ __forceinline__ bool fits(uint32_t rows) {
    return rows * kParts * kLeastPartBytes <= sizeof(FewGate::rows);
  }
  __device__ __forceinline__ uint32_t rows() const { return experts + tokens; }
  // How many warps have the same experts.
  __device__ __forceinline__ uint32_t abreast() const { return ceil_div(tokens, kLogitTokens); }
  // How many warps multiply: the first ones. The other warps load; if there are no others, all warps load.
  __device__ __forceinline__ uint32_t multiplying() const { return experts / kProductRows * abreast(); }
  __device__ __forceinline__ uint32_t part_bytes() const {
    const uint32_t room = uint32_t{sizeof(FewGate::rows)} / kParts / rows();
    return min_of(kMostPartBytes, room / kLeastPartBytes * kLeastPartBytes);
  }
  // Parts of each round, and of all.
  __device__ __forceinline__ uint32_t parts_of_round() const {
    return ceil_div(ceil_div(k_blocks, kLogitSegments), part_bytes() / kLeastPartBytes);
  }
  __device__ __forceinline__ uint32_t parts() const { return kRounds * parts_of_round(); }
  // The k-block that lies at place `block` of part `part`; k_blocks if none does.
  __device__ __forceinline__ uint32_t k_block(uint32_t part, uint32_t block) const {
    const uint32_t each = parts_of_round(), segment = part / each * kAbreast + block % kAbreast;
    const uint32_t at =
        segment_begin(k_blocks, segment) + part % each * (part_bytes() / kLeastPartBytes) + block / kAbreast;
    return at < segment_begin(k_blocks, segment + 1) ? at : k_blocks;
  }
};
static_assert(sizeof(FewGate::rows) / LogitJob<1>::kParts / (kProductRows + kFewRouters * kLogitTokens) >= kRowBytes);

// All threads: load part `part` of the experts' rows and then of the tokens' rows, as one group of copies. Warps that
// multiply have no time to copy, and their groups are empty.
template <class Dtype, class Job>
__device__ __forceinline__ void load_logit_rows(const Block& b, const Job& job, uint32_t part) {
  const uint32_t pitch = job.part_bytes(), chunks = pitch / 16, all = b.c.shape.hidden * Dtype::kBytes;
  const uint32_t to = shared_address(b.s.gate.rows) + part % Job::kParts * job.rows() * pitch;
  const uint32_t busy = job.multiplying() % kFewWarps * P::kLanes, end = part < job.parts() ? job.rows() * chunks : 0;
  for (uint32_t i = threadIdx.x - busy; threadIdx.x >= busy && i < end; i += kFewThreads - busy) {
    const uint32_t r = i / chunks, chunk = i % chunks;
    const uint8_t* const row = r < job.experts
                                   ? b.args.router_rows.row(0, min_of(job.expert + r, b.c.shape.routed_experts() - 1))
                                   : b.args.x + uint64_t{b.token_at(job.token + r - job.experts)} * 16;
    const uint32_t from = job.k_block(part, chunk / 8) * kRowBytes + chunk % 8 * 16;
    const bool exists = from < all;
    cp_async16_or_zero(to + r * pitch + (chunk ^ r % 8) * 16, row + (exists ? from : 0), exists ? 16 : 0);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All threads: compute a job's logits.
template <class Dtype, uint32_t kAbreast>
__device__ __forceinline__ void compute_logits_of(const Block& b, const LogitJob<kAbreast>& job) {
  using Job = LogitJob<kAbreast>;
  const uint32_t pitch = job.part_bytes(), parts = job.parts(), of_round = job.parts_of_round();
  const uint32_t matrix = P::lane() / 8, row = P::lane() % 8, first_expert = b.warp() / job.abreast() * kProductRows;
  const uint32_t first_token = b.warp() % job.abreast() * kLogitTokens;
  // In place of a token that does not exist, the job's last row is multiplied. It is only in that token's own sums,
  // which nobody stores.
  const uint32_t x_row = min_of(job.experts + first_token + matrix % 2 * 8 + row, job.rows() - 1);
  BlockSums<Dtype> sums[kAbreast], logits;
  for (uint32_t part = 0; part + 1 < Job::kParts; ++part) load_logit_rows<Dtype>(b, job, part);
#pragma unroll 1
  for (uint32_t part = 0, left = of_round; part < parts; ++part) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Job::kParts - 2) : "memory");
    __syncthreads();  // all threads' copies of this part are here, and all have read the part before
    load_logit_rows<Dtype>(b, job, part + Job::kParts - 1);
    if (first_expert >= job.experts) continue;
    const uint32_t from = shared_address(b.s.gate.rows) + part % Job::kParts * job.rows() * pitch;
#pragma unroll 1
    for (uint32_t block = 0; block < pitch / kRowBytes; block += kAbreast) {
#pragma unroll
      for (uint32_t j = 0; j < kAbreast; ++j) {
        uint32_t w[2][4], a[4][4];  // all loads first: products wait for one another
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          load_matrices(w[h],
                        from + (first_expert + row) * pitch + (block + j) * kRowBytes + ((4 * h + matrix) ^ row) * 16);
        }
#pragma unroll
        for (uint32_t s = 0; s < 4; ++s) {
          load_matrices(a[s], from + x_row * pitch + (block + j) * kRowBytes + ((2 * s + matrix / 2) ^ x_row % 8) * 16);
        }
#pragma unroll
        for (uint32_t s = 0; s < 4; ++s) sums[j].add(a[s], w[s / 2][s % 2 * 2], w[s / 2][s % 2 * 2 + 1]);
      }
    }
    if (--left != 0) continue;
    left = of_round;
#pragma unroll
    for (uint32_t j = 0; j < kAbreast; ++j) logits.add(sums[j]), sums[j] = {};
  }
  __syncthreads();  // from here on, another job's rows may be loaded
  if (first_expert >= job.experts) return;
  logits.finish(min_of(kLogitTokens, job.tokens - first_token), [&](uint32_t t, const float (&sum)[1][2]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t e = job.expert + first_expert + BlockSums<Dtype>::first_row() + i;
      if (e >= b.c.shape.routed_experts()) continue;
      store_logit<Dtype>(b, job.token + first_token + t, e, sum[0][i]);
    }
  });
}

// All of the call's logits, by all blocks together.
template <class Dtype>
__device__ __forceinline__ void compute_logits(const Block& b) {
  const uint32_t all = b.c.shape.tokens, eights = ceil_div(b.c.shape.routed_experts(), kProductRows);
  if (b.is_very_few()) {
    for (uint32_t i = blockIdx.x; i < eights; i += gridDim.x) compute_few_logits<Dtype>(b, i * kProductRows);
    return;
  }
  if constexpr (Dtype::kBytes == 2) {  // in fp32, no call has more tokens
    // A job has so many tokens that there is about one job for each block. In a group, the last blocks do not count
    // here: meanwhile, they send rows.
    const uint32_t busy = kBuild.group ? min_of(b.c.blocks(), gridDim.x - 1) : 0;
    uint32_t tokens =
        kLogitTokens * min_of(kFewRouters, ceil_div(eights * ceil_div(all, kLogitTokens), gridDim.x - busy));
    // The fewer rows a job has, the less all blocks read from the L2. So a job has about as many experts as tokens.
    uint32_t experts = kProductRows;
    for (; tokens >= 4 * experts && experts < 8 * eights; experts *= 2) tokens = align_up(tokens / 2, kLogitTokens);
    const uint32_t of_experts = ceil_div(b.c.shape.routed_experts(), experts);
    const uint32_t k_blocks = ceil_div(b.c.shape.hidden * Dtype::kBytes, kRowBytes);
    auto compute = [&]<uint32_t kAbreast>(Count<kAbreast>) {
      for (uint32_t i = blockIdx.x; i < of_experts * ceil_div(all, tokens); i += gridDim.x) {
        const uint32_t token = i / of_experts * tokens;
        compute_logits_of<Dtype>(
            b, LogitJob<kAbreast>{k_blocks, i % of_experts * experts, experts, token, min_of(tokens, all - token)});
      }
    };
    constexpr uint32_t kMostAbreast = 4;
    if (LogitJob<kMostAbreast>::fits(experts + tokens)) {
      compute(Count<kMostAbreast>{});
    } else {
      compute(Count<1>{});
    }
  }
}

// ---- choice ---------------------------------------------------------------------------------------------------------

// Tokens `first`, `first` + `step`, ..., of which there are `count`. On a rank alone, a block chooses experts for all
// tokens of the call or, if blocks share the choices, for its own tokens, which are every gridDim-th.
struct Tokens {
  uint32_t first, step, count;

  __device__ __forceinline__ uint32_t operator[](uint32_t i) const { return first + i * step; }
};
__device__ __forceinline__ Tokens own_tokens(const Block& b) {
  const uint32_t all = b.c.shape.tokens;
  return {blockIdx.x, gridDim.x, blockIdx.x < all ? ceil_div(all - blockIdx.x, gridDim.x) : 0};
}
// Whether a block chooses for its own tokens alone, and gets the choices of the others from other blocks.
__device__ __forceinline__ bool shares_choices(const Block& b) {
  if constexpr (kBuild.group) return true;  // the others come in packets
  return b.c.shape.tokens > kMostChosenByAll && (b.args.topk_ids == nullptr || b.args.shared_gate != nullptr);
}
__device__ __forceinline__ Tokens tokens_to_decide(const Block& b) {
  return shares_choices(b) ? own_tokens(b) : Tokens{0, 1, b.c.shape.tokens};
}

// One warp: waits for the logits of one token, which all blocks have computed, and copies them to `to`.
__device__ __forceinline__ void collect_logits(const Block& b, uint32_t token, float* to) {
  constexpr uint32_t kAtOnce = 4;  // logits of a lane: with a round trip for each, this would take longer than all else
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

// All warps: choose the experts of `tokens`. Each of the first kFewRouters warps does so for some of them.
__device__ __forceinline__ void choose(const Block& b, const Tokens& tokens) {
  const uint32_t experts = b.c.shape.routed_experts(), top_k = b.c.shape.routed_top_k();
  const RouterRule& rule = b.args.rule;
  float* const logits = b.s.scratch.logits + b.warp() * experts;
  if (b.warp() >= kFewRouters) return;
  for (uint32_t i = b.warp(); i < tokens.count && b.s.failed == 0; i += kFewRouters) {
    const uint32_t t = tokens[i];
    collect_logits(b, t, logits);
    if (b.args.router_logits != nullptr && (kBuild.group || t % gridDim.x == blockIdx.x)) {
      write_logits(b.args.router_logits + uint64_t{t} * experts, logits, experts, P::lane(), P::kLanes);
      P::sync();
    }
    const TokenChoice choice[1] = {
        {logits, b.routing.ids + t * b.args.few_choices, b.routing.weights + t * b.args.few_choices}};
    const bool good = rule.plain() ? choose_experts(rule, choice, experts, top_k) == 0
                                   : choose_by_rule(rule, choice[0], experts, top_k);
    if (!good && P::lane() == 0) note_row<P>(b.c, RowFault::kLogits, t);
  }
}

// Whether given choice i, of expert `id`, is wrong: the expert does not exist, or the token has chosen it already.
// id_of(j): the expert of choice j. begin: the token's first choice.
template <class IdOf>
__device__ __forceinline__ bool is_wrong(const Block& b, uint32_t begin, uint32_t i, int32_t id, IdOf&& id_of) {
  bool twice = false;
  for (uint32_t j = begin; j < i; ++j) twice |= id_of(j) == id;
  return id != ExpertId::kNone && (twice || id < 0 || static_cast<uint32_t>(id) >= b.c.shape.routed_experts());
}

// All threads, after a block barrier that comes after the last is_wrong(): notes the tokens that have a wrong choice,
// and gives their choices no expert (kBad).
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

// What Call::routing records of a choice that has no row.
__device__ __forceinline__ int32_t recorded_without_row(int32_t id) {
  const uint32_t why = id >= 0 ? Choice::kDropped : id == ExpertId::kNone ? Choice::kNone : Choice::kBad;
  return static_cast<int32_t>(why);
}

// All threads: copy the given routing of all tokens. It is not trusted: every block checks it for itself.
template <class Dtype>
__device__ __forceinline__ void take_given(const Block& b) {
  const uint32_t top_k = b.c.shape.routed_top_k();
  auto id_of = [&](uint32_t i) { return given_id(b.args, i); };
  for (uint32_t p = threadIdx.x; p < b.c.shape.tokens * top_k; p += kFewThreads) {
    const int32_t id = id_of(p);
    const uint32_t choice = p + p / top_k * b.c.shape.shared;  // after the slices of the tokens before
    b.routing.ids[choice] = id;
    b.routing.weights[choice] = id == ExpertId::kNone ? 0.0f : given_weight<Dtype>(b.args, p);
    if (is_wrong(b, p - p % top_k, p, id, id_of)) b.s.wrong = 1;
  }
}

// One warp: adds the shared expert's slices to the choices of a token, as experts that follow the routed ones.
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

// The 16 bytes of a choice are stored and loaded as one word, so that the epoch in it is the choice's signal.
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

// Stores the choices of the block's own tokens for all blocks. Then waits for those of all tokens, and copies them to
// this block. A token's slices of the shared expert have one weight, which is exchanged once. False if the call is
// over.
__device__ __forceinline__ bool share_choices(const Block& b) {
  constexpr uint32_t kAtOnce = 6;  // choices of a lane: 2048 choices take one round trip
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

// How many choices a segment has.
__device__ __forceinline__ uint32_t segment_length(const Block& b) {
  return align_up(ceil_div(b.choices(), FewScratch::kSegments), P::kLanes);
}

// One warp: counts the choices of its segment for each expert. FewRouting::row of a choice is, for now, its number
// among the segment's choices of the same expert.
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

// All threads: compute how many choices of each expert lie in the segments before each segment, and how many rows each
// expert has.
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

// All warps, each for 32 experts at a time: find where each expert's rows begin, and list its units.
template <class Dtype>
__device__ __forceinline__ void number_units(const Block& b) {
  constexpr uint32_t kMost = kUnitRows<Dtype>;
  FewRouting& s = b.routing;
  auto& groups = b.s.scratch.groups;
  // Packs a number of rows, and how many units they make, into one word, so that one scan adds up both.
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

// One warp, if there are at most as many choices as it has lanes: does what group_choices() does with more choices,
// without its block barriers.
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
  uint32_t row = position, unit = 0;  // plus the rows and units of experts before this one
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

// All threads: give choices their rows, except those beyond their expert's capacity: the last ones in token order.
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

// All threads: store what the host reads of the routing of the block's own tokens, and count their choices in `load`.
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

// All threads: fill FewRouting. False if the call is over.
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
  fence_proxy_async_shared();  // the copy engine will write where all this was
  __syncthreads();
  return true;
}

}  // namespace flashmoe::sm90::few

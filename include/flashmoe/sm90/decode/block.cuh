// What a thread block of the kernel for a few tokens (sm90/decode/alone.cuh) knows of its call, and how it waits for
// the other blocks.
//
// FewShared is all of the block's shared memory. Every function of this kernel gets a Block: the shared memory, the
// kernel's arguments and the call, from which addresses in device memory follow. The code of this file stores only to
// shared memory. Its waits load what other blocks have stored. One warp runs wait_for_blocks(), one thread fail(), all
// threads all_well(), any thread the rest.
#pragma once

#include "flashmoe/gpu/decode_memory.h"
#include "flashmoe/gpu/products.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/machine/barrier.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kFewWarps = few_warps(kBuild.quantised || kBuild.mxfp4), kFewThreads = kFewWarps * 32;
// Warps that route, the first ones: a 13th has no part in it, so that bits do not depend on whether there is one.
inline constexpr uint32_t kFewRouters = 12;

// The most units of a call, and their experts with the slices of the shared one.
inline constexpr uint32_t kFewExperts = kMaxExperts + 32, kFewUnits = kFewExperts + kFewChoices / 16;

// The routing, as every block knows it. Choice p is (token p / n, k = p % n), where n is few_choices. The shared expert's
// slices are choices here. Each choice that has an expert (ExpertId) and is not dropped has a row. Rows are ordered by
// expert, and within an expert by token. A unit is some rows of one expert, as many as a warp multiplies at a time.
// In a group, only the choices that came to this rank count. Choice number p is row p, whose token SentRow names, and
// experts are numbered locally.
struct FewRouting {
  int32_t ids[kFewChoices];
  float weights[kFewChoices];
  uint16_t row[kFewChoices];     // of a choice; kDropped
  uint16_t choice[kFewChoices];  // of a row
  uint32_t rows, units;          // their numbers
  uint16_t unit_expert[kFewUnits], unit_first[kFewUnits], unit_rows[kFewUnits];
};

// In a group: the home, the token and the k of a row, which FewRouting::ids has for each row as one packed word.
struct SentRow {
  uint32_t source, token, k;

  __device__ __forceinline__ int32_t pack() const { return static_cast<int32_t>(source << 24 | k << 12 | token); }
  static __device__ __forceinline__ SentRow unpack(int32_t word) {
    const auto w = static_cast<uint32_t>(word);
    return {w >> 24, w & 0xfffu, w >> 12 & 0xfffu};
  }
};
static_assert(kFewTokens <= 0xfff && kMaxExperts <= 0xfff && kMaxRanks <= 0x7f);

// What only the routing needs.
struct FewScratch {
  static constexpr uint32_t kSegments = kFewRouters;  // of choices, for a warp each
  union {
    float partial[kFewRouters][8 * kProductRows];  // [warp][token][expert] sums of the gate's products
    float logits[kFewRouters * kMaxExperts];       // [token][expert]
    struct {
      uint16_t count[kSegments * kFewExperts];  // [segment][expert], choices; then those of the segments before
      uint16_t rows[kFewExperts];               // of an expert, and the first of them
      uint16_t first[kFewExperts];
    } groups;
  };
};

// In a group, packets as they come, before their entries are rows of units.
struct FewPackets {
  static constexpr uint32_t kMost = kFewChoices / kMinTokenBlock + kMaxRanks;
  uint16_t source[kMost];         // of a packet: its rank,
  uint16_t block[kMost];          // its token block,
  uint16_t token[kMost];          // and the first token of that
  uint16_t first[kMost + 1];      // its first entry, among those of all
  uint32_t count;                 // of packets
  uint16_t offsets[kFewOffsets];  // [packet][El + 1], as they came
  // [packet][El + 1] Where entry i of the packet has its row if it is one of this expert's: so many behind the i-th, modulo 2^16.
  uint16_t shift[kFewOffsets];
  // Of entries, packet by packet.
  int32_t sent[kFewChoices];  // SentRow
  float weights[kFewChoices];
  uint16_t packet[kFewChoices];
};

// In a group, what a token block's packets are built with. A slot is a place in CallPlacement::by_owner: an expert has one, and
// a rank's are its local experts in their order.
struct FewOutbox {
  uint16_t slot[kMaxExperts];
  uint16_t base[kMaxRanks + 1];  // where a rank's slots begin
  uint16_t count[kFewOffsets];   // [slot] choices of the token block; then its first entry, in its packet
  uint16_t place[kFewChoices];   // of a choice, among those of its expert
};

// The pipeline: a ring of stages, each of weights and of rows, and tasks. More stages under way are slower: 11 took 1 % longer
// with 64 to 256 tokens of Qwen3-30B-A3B.
//   weights  a k-block of 128 bytes of 128 features, 128-byte swizzled, by the copy engine; full: one arrival, and the bytes
//            behind them in mxfp4: their scales, by warps whose lanes arrive, too
//   rows     the same k-block of a unit's rows, swizzled likewise, 16 bytes at a time; full: the warp's 32 lanes
//            empty, of both: an arrival of each consumer warp
//            behind them, where these and the weights are in e4m3: what their products are multiplied by
//   tasks    handed on by the warp that loads weights; full: one arrival; empty: of each other warp; stored, of GEMM0's tasks: of
//            each consumer
inline constexpr uint32_t kFewConsumers = 8;  // warps, of 16 features each
// Beside mxfp4 rows are four times as wide, and pairs of numbers take 64 KiB: more stages have no room.
inline constexpr uint32_t kFewStages = kBuild.mxfp4 ? 4 : 7;
inline constexpr uint32_t kFewTasks = 8;  // handed on, and not yet begun by all
// Warps that load rows. Those that are quantised as they come take more instructions than one warp has time for.
inline constexpr uint32_t kFewRowLoaders = kBuild.quantised ? 3 : 1;
// Warps that load scales of weights, where these have some of their own.
inline constexpr uint32_t kFewScaleLoaders = kBuild.mxfp4 ? 2 : 0;
// And the one that tells of what the consumers have stored.
inline constexpr uint32_t kFewTeller = kFewConsumers + 1 + kFewRowLoaders + kFewScaleLoaders;
static_assert(kFewTeller < kFewWarps);
// A k-block of a row in shared memory, which holds e4m3 as fp16 (decode/rows_quantised.cuh), and has 16 bits beside weights
// of 4.
inline constexpr uint32_t kFewRowPitch = kBuild.quantised ? 2 * kRowBytes : kBuild.mxfp4 ? 4 * kRowBytes : kRowBytes;
inline constexpr uint32_t kFewStageRows = kBuild.mxfp4 ? 16 : 32;  // most rows of a unit
// Where scales are behind a stage's rows, and its bytes with them: each row's scale times that of the warps' first blocks of
// weights, and then each one's times that of their second.
inline constexpr uint32_t kFewScalesAt = kFewStageRows * kFewRowPitch;
inline constexpr uint32_t kFewRowStageBytes =
    kFewScalesAt + (kBuild.quantised ? 2 * kFewStageRows * uint32_t{sizeof(float)} : 0);
// Scales of a row of weights in mxfp4, as they lie in memory: eight bytes, of which the first is `shift` bits behind the
// beginning of the words.
struct alignas(16) StageScaleRow {
  static constexpr uint32_t kWords = 3;
  uint32_t words[kWords], shift;
};
// Where they are behind a stage's weights, and its bytes with them.
inline constexpr uint32_t kFewWeightScalesAt = kBoxFeatures * kRowBytes;
inline constexpr uint32_t kFewWeightStageBytes =
    kFewWeightScalesAt + (kBuild.mxfp4 ? kBoxFeatures * uint32_t{sizeof(StageScaleRow)} : 0);
// Of mxfp4, numbers of all bytes of two codes, for each lane (decode/products_mxfp4.cuh): a byte's are so many words, half of them
// unused, behind the byte before's.
inline constexpr uint32_t kPairBytes = 256, kPairWords = 64;
struct FewPipeline {
  uint64_t weights_full[kFewStages], rows_full[kFewStages], empty[kFewStages];
  uint64_t task_full[kFewTasks], task_empty[kFewTasks], stored[kFewTasks];
  uint64_t task[kFewTasks];  // few::Handed
};

struct FewShared {
  union {
    struct {  // swizzled: aligned to 1024 bytes
      uint8_t weights[kFewStages][kFewWeightStageBytes];
      uint8_t rows[kFewStages][kFewRowStageBytes];
      alignas(16) uint32_t pairs[kBuild.mxfp4 ? kPairBytes : 1][kPairWords];
    };
    struct {
      uint8_t logit_rows[144 * 1024];
      FewScratch scratch;
    };
    struct {  // in a group, in place of the gate's rows: so FewScratch::groups is there beside it
      FewPackets packets;
      FewOutbox outbox;
      Status seen[kMaxRanks];  // the peers', also when all tasks are done
    };
  };
  FewRouting routing;
  FewPipeline pipeline;
  uint32_t failed;  // not zero: the call is over
  uint32_t wrong;   // not zero: given routing is, of some token
  Fault fault;      // why, if this block is to post that
  Call call;        // to post it with: the given one, but with the call's epoch
  uint32_t trace_events;
  TraceStarts trace_starts;
};
static_assert(sizeof(FewShared) <= kFewSharedBytes);
static_assert(sizeof(FewPackets) + sizeof(FewOutbox) + kMaxRanks * sizeof(Status) + 128 <=
              sizeof(FewShared::logit_rows));

namespace few {

using P = Platform;

inline constexpr uint16_t kDropped = 0xffff;

// A warp has 16 of a task's 128 rows of weights, two blocks of eight.
inline constexpr uint32_t kBlocks = 2;
template <class Dtype>
struct SumsOf {
  using Type = std::conditional_t<Dtype::kBytes == 2, TensorSums<Dtype>, ExactSums<Dtype, kBlocks>>;
};
template <class D>
struct SumsOf<MxFp4<D>> : SumsOf<D> {};
template <class Dtype>
using Sums = SumsOf<Dtype>::Type;
// Most rows of a unit.
template <class Dtype>
inline constexpr uint32_t kUnitRows = min_of(Sums<Dtype>::kMostTokens, kFewStageRows);
// The type of intermediate rows in device memory. Those that are quantised are so as they are loaded: a scale is that of
// 128 columns, of which a task of GEMM0 has half.
template <class Dtype>
using Inner = std::conditional_t<kQuantised<Dtype>, Tf32, Dtype>;

// Chunk c of a stage's row is the c ^ row_swizzle(row)-th: lanes that read together meet in no bank. They read a chunk of
// eight rows each, by ldmatrix; beside weights in mxfp4 four chunks of two.
__device__ __forceinline__ uint32_t row_swizzle(uint32_t row) {
  return kBuild.mxfp4 ? row % 2 * 4 : row % 8;
}

// Liveness where a rank is alone and its blocks wait for one another: there is nobody else whose progress counts.
struct NoOthers {
  __device__ void sample() const {}
  __device__ bool moved() const { return false; }
};

struct Block {
  const KernelArgs& args;
  const Call& c;  // as the host passed it: with another epoch than the call's
  FewShared& s;
  FewRouting& routing;
  uint64_t epoch;

  __device__ __forceinline__ FewMemory memory() const { return {args.few_layout, c}; }
  // Whether products are summed in parts: as many tokens as have the same bits, whatever they are. In a group these are all:
  // the general kernel's bits (of 16-bit weights), for a row may have come from a rank that runs that.
  __device__ __forceinline__ bool in_parts() const { return !kBuild.group && c.shape.tokens <= kFewExactTokens; }
  __device__ __forceinline__ uint32_t choices() const { return c.shape.tokens * args.few_choices; }
  // The slices of the shared expert are the last experts.
  __device__ __forceinline__ uint32_t experts() const {
    return kBuild.group ? c.shape.local_experts : c.shape.routed_experts() + c.shape.shared;
  }
  __device__ __forceinline__ bool is_shared(uint32_t expert) const { return expert >= c.shape.routed_experts(); }
  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / 32; }
  // An intermediate row. Those in fp32 follow one another: memory for tiles of rows in e4m3 has room for them, for a tile
  // has 256 rows, and an expert a tile of its own, where this kernel has 16 rows of it on average.
  template <class Dtype>
  __device__ __forceinline__ uint8_t* inner_row(uint32_t row) const {
    if constexpr (!kQuantised<Dtype>) return c.intermediate_row(0, row);
    return c.intermediate_row(0, 0) + uint64_t{row} * c.shape.intermediate * Inner<Dtype>::kBytes;
  }
  // The row of x that row `row` is made of, and where its result goes.
  __device__ __forceinline__ const uint8_t* x_row(uint32_t row) const {
    if constexpr (!kBuild.group) return args.x + routing.choice[row] / args.few_choices * uint64_t{args.x_row_bytes};
    const SentRow sent = SentRow::unpack(routing.ids[row]);
    if (sent.source == c.rank) return args.x + sent.token * uint64_t{args.x_row_bytes};
    return c.dispatched_row(c.rank, sent.source, sent.token);
  }
  __device__ __forceinline__ uint8_t* result_row(uint32_t row) const {
    if constexpr (!kBuild.group) return memory().row(row);
    const SentRow sent = SentRow::unpack(routing.ids[row]);
    return c.return_row(sent.source, sent.token, sent.k);
  }
  // Where a token's row begins, in units of 16 bytes behind x.
  __device__ __forceinline__ uint32_t token_at(uint32_t token) const {
    return static_cast<uint32_t>(token * (args.x_row_bytes / 16));
  }
};

// Where a part of `all` begins, of `parts` that follow one another, and differ by one in length at most. (all: of a row's
// stages or less, so that 32 bits suffice.)
__device__ __forceinline__ uint32_t begin_of_part(uint32_t all, uint32_t part, uint32_t parts) {
  return all * part / parts;
}

// By one thread: ends the call for this block. The first that fails decides which fault the block posts (kNone: none).
__device__ __forceinline__ void fail(const Block& b, Fault fault) {
  if (atomicExch(&b.s.failed, 1u) != 0) return;
  fault.actor = Actor::kProcessor;
  fault.awaited = fault.culprit = b.c.rank;
  b.s.fault = fault;
}

// One warp.
template <class StepFn>
__device__ __forceinline__ void wait_for_blocks(const Block& b, StepFn&& step) {
  // What is waited for comes within a few steps: a look at the clock after the first would take as long as these.
  const WaitEnd end = wait_until<P>(b.c, step, NoOthers{}, 1);
  if (end == WaitEnd::kDone || P::lane() != 0) return;
  fail(b, {.kind = end == WaitEnd::kExpired ? FaultKind::kLocal : FaultKind::kNone});
}

// All threads: whether the block is to go on.
__device__ __forceinline__ bool all_well(const Block& b) {
  // Barrier and vote in one: read behind a barrier, `failed` may be set by a faster thread's next step, for some alone.
  return __syncthreads_or(static_cast<int>(b.s.failed)) == 0;
}

}  // namespace few
}  // namespace flashmoe::sm90

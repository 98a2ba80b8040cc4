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
// A rank alone with weights in 16 bits.
inline constexpr bool kAloneIn16Bits =
    !kBuild.group && !kBuild.quantised && !kBuild.mxfp4 && element_bytes(kBuild.dtype) == 2;
// Warps that compute logits and choose experts: the first 12. A 13th warp has no part in this, so that the bits do not
// depend on whether there is one.
inline constexpr uint32_t kFewRouters = 12;

// The most choices of a call; in a group, the most rows that come to a rank.
inline constexpr uint32_t kRoutedRows = kBuild.group       ? kFewGroupRows
                                        : kBuild.quantised ? kFewChoicesInE4m3
                                                           : kFewChoices;
// The most experts of a call, with the slices of the shared expert, and the most units.
inline constexpr uint32_t kFewExperts = kMaxExperts + 32, kFewUnits = kFewExperts + kRoutedRows / 16;

// The routing, as every block knows it. Choice p is (token p / n, k = p % n), where n is few_choices. The shared
// expert's slices are choices here. Each choice that has an expert (ExpertId) and is not dropped has a row. Rows are
// ordered by expert, and within an expert by token. A unit is some rows of one expert, as many as a warp multiplies at
// a time.
// In a group, `ids` and `weights` first have the choices of the token blocks whose packets this block builds. Then the
// struct lists the rows that came to this rank: row p is choice p, ids[p] is a packed SentRow, and experts are numbered
// locally.
struct FewRouting {
  int32_t ids[kRoutedRows];
  float weights[kRoutedRows];
  uint16_t row[kRoutedRows];     // [choice] its row, or kDropped
  uint16_t choice[kRoutedRows];  // [row] its choice
  uint32_t rows, units;          // how many there are
  uint16_t unit_expert[kFewUnits], unit_first[kFewUnits], unit_rows[kFewUnits];
};

// In a group: the home (`source`), the token and the k of a row. FewRouting::ids has them as one packed word for each
// row.
struct SentRow {
  uint32_t source, token, k;

  __device__ __forceinline__ int32_t pack() const { return static_cast<int32_t>(source << 24 | k << 12 | token); }
  static __device__ __forceinline__ SentRow unpack(int32_t word) {
    const auto w = static_cast<uint32_t>(word);
    return {w >> 24, w & 0xfffu, w >> 12 & 0xfffu};
  }
};
static_assert(kFewTokens <= 0xfff && kMaxExperts <= 0xfff && kMaxRanks <= 0x7f);

// What only the routing needs, when all logits of the block are computed.
struct FewScratch {
  static constexpr uint32_t kSegments = kFewRouters;  // parts of the choices, one for each warp
  union {
    float logits[kFewRouters * kMaxExperts];  // [token][expert]
    struct {
      uint16_t count[kSegments * kFewExperts];  // [segment][expert] its choices; later: those in segments before
      uint16_t rows[kFewExperts];               // [expert] how many rows it has
      uint16_t first[kFewExperts];              // [expert] its first row
    } groups;
  };
};

// In a group: the packets that have come to this rank, before their entries become rows of units.
struct FewPackets {
  static constexpr uint32_t kMost = kRoutedRows / kMinTokenBlock + kMaxRanks;
  uint16_t source[kMost];         // [packet] the rank that sent it
  uint16_t block[kMost];          // [packet] its token block
  uint16_t token[kMost];          // [packet] the first token of its token block
  uint16_t first[kMost + 1];      // [packet] its first entry, numbered among the entries of all packets
  uint32_t count;                 // how many packets there are
  uint16_t offsets[kFewOffsets];  // [packet][El + 1], as they came
  // [packet][El + 1] Entry i of a packet, if it is of expert l, has row i + shift[packet][l], modulo 2^16.
  uint16_t shift[kFewOffsets];
  // [entry], where entries are numbered packet by packet.
  int32_t sent[kRoutedRows];  // packed SentRow
  float weights[kRoutedRows];
  uint16_t packet[kRoutedRows];  // the packet that has the entry
};

// In a group: what a block needs to build a token block's packets. A slot is an index of CallPlacement::by_owner. An
// expert has one slot, and a rank's slots are its local experts in their order.
struct FewOutbox {
  uint16_t slot[kMaxExperts];    // [expert] its slot
  uint16_t base[kMaxRanks + 1];  // [rank] its first slot
  uint16_t count[kFewOffsets];   // [slot] choices of the token block that name it; then the number of its first entry
  uint16_t place[kRoutedRows];   // [choice] its number among the choices of its expert
};

// What the gate needs.
struct FewGate {
  uint8_t rows[144 * 1024];
  float partial[kFewRouters][8 * kProductRows];  // [warp][token][expert] sums of the products
};

// What a group needs beside FewScratch. A rank alone needs nothing.
template <bool>
struct BesideScratch {
  FewPackets packets;
  FewOutbox outbox;
  Status seen[kMaxRanks];  // the peers', for waits before the tasks and after them
};
template <>
struct BesideScratch<false> {};

// The pipeline: a ring of stages, each of which has weights and rows, and a ring of tasks. With 64 to 256 tokens of
// Qwen3-30B-A3B, 11 stages in place of 7 took 1 % longer, and 5 took 2 to 4 % longer. Below, the number after a barrier's name is how
// many arrivals a phase of the barrier takes.
//   weights  the copy engine loads a k-block of 128 bytes of 128 features, 128-byte swizzled; weights_full: 1, and the
//            copy engine's bytes. In mxfp4 the features' scales lie behind the weights; weights_full then takes 64
//            more, one from each lane of the two warps that load the scales
//   rows     the same k-block of a unit's rows, in chunks of 16 bytes as row_swizzle() says; rows_full: 32, from the
//            lanes of the warp that loads them, or 64 if two warps load a stage. In e4m3, scales lie behind the rows
//            (kFewScalesAt)
//   both     empty: 8, one from each consumer warp
//   tasks    the warp that loads weights hands tasks on; task_full: 1; task_empty: one from each warp that reads tasks;
//            stored, for tasks of GEMM0 alone: 8, one from each consumer warp
inline constexpr uint32_t kFewConsumers = 8;  // warps, of 16 features each
// With weights in mxfp4, a stage's rows are four times as wide, and the table of pairs (FewShared::pairs) takes 64 KiB,
// so that there is no room for more stages.
inline constexpr uint32_t kFewStages = kBuild.mxfp4 ? 4 : 7;
inline constexpr uint32_t kFewTasks = 8;  // the most that are handed on and not yet read by all warps
// Warps that load rows. Rows that are quantised as they are loaded take more instructions than one warp has time for.
// Where units have up to 64 rows, there is a warp for each half of them.
inline constexpr uint32_t kFewRowLoaders = kBuild.quantised ? 3 : kAloneIn16Bits ? 2 : 1;
inline constexpr uint32_t kStageLoaders = kAloneIn16Bits ? kFewRowLoaders : 1;  // of one stage
// Warps that load scales of weights, in mxfp4. (In e4m3, the warps that load rows read the scales of weights, too.)
inline constexpr uint32_t kFewScaleLoaders = kBuild.mxfp4 ? 2 : 0;
// The warp that tells all blocks what the consumers have stored.
inline constexpr uint32_t kFewTeller = kFewConsumers + 1 + kFewRowLoaders + kFewScaleLoaders;
static_assert(kFewTeller < kFewWarps);
// Bytes of a row in a stage, which has one k-block of the row. Rows in e4m3 lie there as fp16
// (decode/rows_quantised.cuh): two bytes for each byte of weights. Beside weights in mxfp4, rows have 16 bits for each
// 4 bits of weights.
inline constexpr uint32_t kFewRowPitch = kBuild.quantised ? 2 * kRowBytes : kBuild.mxfp4 ? 4 * kRowBytes : kRowBytes;
inline constexpr uint32_t kFewStageRows = kBuild.mxfp4 ? 16 : kAloneIn16Bits ? 64 : 32;  // for which a stage has room
// In e4m3, where scales begin behind a stage's rows, and the bytes of both. First comes, for each row, the row's scale
// times that of a warp's first block of weights (eight rows of weights); then, for each row, its scale times that of
// the second block.
inline constexpr uint32_t kFewScalesAt = kFewStageRows * kFewRowPitch;
inline constexpr uint32_t kFewRowStageBytes =
    kFewScalesAt + (kBuild.quantised ? 2 * kFewStageRows * uint32_t{sizeof(float)} : 0);
// The eight scales, of a byte each, that a stage has for a row of weights in mxfp4: three words, copied from memory as
// they are. The first scale begins `shift` bits after the beginning of these words.
struct alignas(16) StageScaleRow {
  static constexpr uint32_t kWords = 3;
  uint32_t words[kWords], shift;
};
// Where these scales begin behind a stage's weights, and the bytes of both.
inline constexpr uint32_t kFewWeightScalesAt = kBoxFeatures * kRowBytes;
inline constexpr uint32_t kFewWeightStageBytes =
    kFewWeightScalesAt + (kBuild.mxfp4 ? kBoxFeatures * uint32_t{sizeof(StageScaleRow)} : 0);
// In mxfp4, a table of the pair of numbers that each byte of two codes stands for, with a copy for each lane
// (decode/products_mxfp4.cuh). It has kPairBytes rows of kPairWords words, of which each second half is unused.
inline constexpr uint32_t kPairBytes = 256, kPairWords = 64;
// With weights in 16 bits, tasks may be halved on a rank alone (halves_tasks). A stage then has two k-blocks: first
// their weights, then their rows, with room for kHalvedRows each. (In a group, a block does not know how many rows other
// ranks bring.)
inline constexpr bool kMayHalve = kAloneIn16Bits;
inline constexpr uint32_t kHalvedRows = 16;
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
    FewGate gate;
    struct {  // in a group, packets and FewScratch are used at the same time
      [[no_unique_address]] BesideScratch<kBuild.group> peers;
      FewScratch scratch;
    };
  };
  FewRouting routing;
  FewPipeline pipeline;
  uint32_t failed;  // not zero: the call is over
  uint32_t wrong;   // not zero: the given routing of some token is wrong
  Fault fault;      // the one that this block is to post; kNone: none
  Call call;        // the given call with its epoch: in a group for everything, on a rank alone to post the fault
  uint32_t trace_events;
  TraceStarts trace_starts;
};
static_assert(sizeof(FewShared) <= kFewSharedBytes);

namespace few {

using P = Platform;

inline constexpr uint16_t kDropped = 0xffff;
// A number that a function's argument tells the compiler.
template <uint32_t kNumber>
using Count = std::integral_constant<uint32_t, kNumber>;

// A warp has 16 of a task's 128 rows of weights, two blocks of eight.
inline constexpr uint32_t kBlocks = 2;
template <class Dtype>
struct SumsOf {
  using Type = std::conditional_t<Dtype::kBytes == 2, TensorSums<Dtype, kFewStageRows>, ExactSums<Dtype, kBlocks>>;
};
template <class D>
struct SumsOf<MxFp4<D>> {
  using Type = TensorSums<D>;
};
template <class Dtype>
using Sums = SumsOf<Dtype>::Type;
// Most rows of a unit.
template <class Dtype>
inline constexpr uint32_t kUnitRows = min_of(Sums<Dtype>::kMostTokens, kFewStageRows);
// The type of intermediate rows in device memory. For e4m3 it is fp32: such rows are quantised only as they are loaded,
// because a scale is of 128 columns, and a task of GEMM0 may have no more than 64 of them.
template <class Dtype>
using Inner = std::conditional_t<kQuantised<Dtype>, Tf32, Dtype>;

// Chunk c (16 bytes) of a row in a stage lies at place c ^ row_swizzle(row), so that lanes that read at the same time
// use different banks. Eight such lanes read one chunk of eight rows, by ldmatrix; beside weights in mxfp4, they read
// four chunks of two rows.
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
  const Call& c;  // in a group FewShared::call; on a rank alone args.call, whose epoch is not valid (`epoch` is)
  FewShared& s;
  FewRouting& routing;
  uint64_t epoch;

  __device__ __forceinline__ FewMemory memory() const { return {args.few_layout, c}; }
  // Whether the rank is alone, and the call has at most kFewExactTokens tokens. Then all warps of a block share its
  // logits' products, and with weights in fp32, e4m3 and mxfp4 GEMM1 may be cut along K (Tasks::parts).
  __device__ __forceinline__ bool is_very_few() const { return !kBuild.group && c.shape.tokens <= kFewExactTokens; }
  __device__ __forceinline__ uint32_t choices() const { return c.shape.tokens * args.few_choices; }
  // The slices of the shared expert are the last experts.
  __device__ __forceinline__ uint32_t experts() const {
    return kBuild.group ? c.shape.local_experts : c.shape.routed_experts() + c.shape.shared;
  }
  __device__ __forceinline__ bool is_shared(uint32_t expert) const { return expert >= c.shape.routed_experts(); }
  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / 32; }
  // An intermediate row. For e4m3, rows are in fp32, and follow one another in the memory that the general kernel has
  // for tiles of rows in e4m3. There is room for them, because that memory has a tile of 256 rows for each expert, and
  // here an expert has at most 16 rows on average.
  template <class Dtype>
  __device__ __forceinline__ uint8_t* inner_row(uint32_t row) const {
    if constexpr (!kQuantised<Dtype>) return c.intermediate_row(0, row);
    return c.intermediate_row(0, 0) + uint64_t{row} * c.shape.intermediate * Inner<Dtype>::kBytes;
  }
  // The token's row that belongs to row `row`, in x or as another rank has sent it; and where the result of row `row`
  // goes.
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
  // Where a token's row begins, in units of 16 bytes from the beginning of x.
  __device__ __forceinline__ uint32_t token_at(uint32_t token) const {
    return static_cast<uint32_t>(token * (args.x_row_bytes / 16));
  }
};

// If `all` items are cut into `parts` parts that follow one another and differ in length by at most one: the first item
// of part number `part`. (Items are pieces of a row, of 64 bytes or more, so that 32 bits suffice for the product.)
__device__ __forceinline__ uint32_t begin_of_part(uint32_t all, uint32_t part, uint32_t parts) {
  return all * part / parts;
}

// By one thread: ends the call for this block. The first thread that calls it decides which fault the block posts
// (kNone: none).
__device__ __forceinline__ void fail(const Block& b, Fault fault) {
  if (atomicExch(&b.s.failed, 1u) != 0) return;
  fault.actor = Actor::kProcessor;
  fault.awaited = fault.culprit = b.c.rank;
  b.s.fault = fault;
}

// One warp: waits until step() says kDone. If the wait ends otherwise, ends the call for this block.
template <class StepFn>
__device__ __forceinline__ void wait_for_blocks(const Block& b, StepFn&& step) {
  // What a block waits for comes within a few steps. A look at the clock after the first step would take as long as
  // these.
  const WaitEnd end = wait_until<P>(b.c, step, NoOthers{}, 1);
  if (end == WaitEnd::kDone || P::lane() != 0) return;
  fail(b, {.kind = end == WaitEnd::kExpired ? FaultKind::kLocal : FaultKind::kNone});
}

// All threads: whether the block is to go on.
__device__ __forceinline__ bool all_well(const Block& b) {
  // One instruction is barrier and vote. If threads read `failed` after a barrier, a faster thread's next step might
  // have set it meanwhile, and then only some threads would see it set.
  return __syncthreads_or(static_cast<int>(b.s.failed)) == 0;
}

}  // namespace few
}  // namespace flashmoe::sm90

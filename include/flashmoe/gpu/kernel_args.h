// What the host hands to the fused kernel, and the tile geometry both sides compute with.
//
// GEMMs run transposed: weight rows ("features") on wgmma's M side, tokens on its N side. Token counts are what varies
// from 1 to 256 per tile, and N goes in steps of 8 where M is always 64: no padding to speak of, and one kernel for
// large and small batches. Full tiles alone run the other way round, tokens on M and 256 features on N: their products
// then read 80 KiB of shared memory a k-block, not 96 (not fp32 without the tensor cores, which has one way for all).
//
// A task is a tile times 256 features, computed by a pair of thread blocks (a cluster of two). What bounds a GEMM on all
// SMs is the L2: 34 bytes a clock and SM. So the pair shares what it can: each block loads half of the weights and
// multicasts it to both, each multiplies all 256 features by its own half of the tokens (32 KiB of L2 traffic a block
// for 48 KiB of operands). Tiles of few tokens are halved the other way: 128 features and all tokens for each block.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe::sm90 {

inline constexpr uint32_t kPair = 2;            // thread blocks
inline constexpr uint32_t kTileTokens = 256;    // most rows of a tile
inline constexpr uint32_t kTaskFeatures = 256;  // weight rows of a task
inline constexpr uint32_t kBoxFeatures = 128;   // of one TMA box: a block's half
inline constexpr uint32_t kRowBytes = 128;      // of K per row and k-block: one 128-byte swizzle span
inline constexpr uint32_t kRowBox = 32;         // rows of one TMA box of hidden rows or tokens
inline constexpr uint32_t kNarrowTokens = 64;   // most rows of a tile whose features are halved
inline constexpr uint64_t kReachBytes = uint64_t{16}
                                        << 31;  // rows to gather lie within so many behind the first (TokenRows)
inline constexpr uint32_t kNoTile = ~0u;        // index of a task that is only rehearsed (roles.cuh)

// The rows of a tile that one block of the pair multiplies.
struct Share {
  bool wide;  // all features and half of the rows; else half of the features and all rows
  uint32_t first, rows,
      cover;  // rows are [first, first + rows) of the tile; cover: the N of both blocks, a multiple of 16
};
FLASHMOE_HD constexpr Share share_of(uint32_t tile_rows, uint32_t block) {
  if (tile_rows <= kNarrowTokens) return {false, 0, tile_rows, tile_rows};
  const uint32_t half = ceil_div(tile_rows, 32u) * 16;
  return {true, block * half, block == 0 ? half : tile_rows - half, half};
}

inline constexpr uint32_t kWarps = 12;
inline constexpr uint32_t kThreads = kWarps * 32;
inline constexpr uint32_t kSharedBytes = 227 * 1024;  // the most a block may have

// What a block keeps in shared memory of a token block, which the host therefore bounds.
inline constexpr uint32_t kMaxPairs = 2048;  // its tokens times K
inline constexpr uint32_t kMaxExperts = 1024;
inline constexpr uint32_t kMaxGateLogits = 16384;  // its tokens times E
// Rows of the router that the gate loads at a time, and a box of it has: the fewer, the smaller is a stage.
inline constexpr uint32_t kSmallGate = 32, kMiddleGate = 64;
FLASHMOE_HD constexpr uint32_t gate_features(uint32_t experts) {
  return experts <= kSmallGate ? kSmallGate : experts <= kMiddleGate ? kMiddleGate : kBoxFeatures;
}
// Local experts of one former. With as many formers as SMs, and E <= 1024, 8 would do for an H100; smaller parts exist.
inline constexpr uint32_t kFormerExperts = 16;
// Of so many thread blocks, the second to this one form tiles. Those behind them send rows to other ranks, if there are any.
FLASHMOE_HD constexpr uint32_t formers_of(uint32_t ranks, uint32_t local_experts, uint32_t blocks) {
  if (ranks == 1) return blocks - 1;
  const uint32_t wanted = max_of(blocks / 4, 1u);  // most blocks send
  return max_of(ceil_div(local_experts, kFormerExperts), min_of(local_experts, wanted));
}
// The fewest blocks.
FLASHMOE_HD constexpr uint32_t least_blocks(uint32_t ranks, uint32_t local_experts) {
  const uint32_t service = 1 + max_of(ceil_div(local_experts, kFormerExperts), 1u) + (ranks > 1 ? 1 : 0);
  return ceil_div(service, kPair) * kPair;
}

// The kernel of a few tokens.
inline constexpr uint32_t kFewWarps = 12;
inline constexpr uint32_t kFewThreads = kFewWarps * 32;
inline constexpr uint32_t kFewPairs = kFewTokens * 32;  // K is at most 32
inline constexpr uint32_t kFewResults = 8192;           // columns times pairs whose results a block keeps
inline constexpr uint32_t kFewSharedBytes = 48 * 1024;
static_assert(kFewPairs <= kTileTokens && kFewPairs <= kFewThreads);  // their hidden rows are the first tile's

// The most tokens of a joined return (sm90/join.cuh): a token and a column of tasks share a word.
inline constexpr uint32_t kMaxJoinedTokens = 1u << 16;

// Output columns of a task. SwiGLU: gate and up rows share a task's 128 features.
FLASHMOE_HD constexpr uint32_t gemm0_columns_per_task(bool gated) {
  return gated ? kTaskFeatures / 2 : kTaskFeatures;
}
inline constexpr uint32_t kGemm1ColumnsPerTask = kTaskFeatures;

// CUtensorMap, which only the host's driver calls look into.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// One span of an actor's time, as the trace buffer holds it. Times of the global timer, in nanoseconds.
struct TraceEvent {
  uint64_t start_ns, end_ns;
  uint32_t kind;  // TracePhase
  uint32_t index, column, pad;
};
static_assert(sizeof(TraceEvent) == 32);

// Order and names are those of python/flashmoe/trace.py; kEpilogue is the GPU's own.
enum class TracePhase : uint32_t {
  kGate,
  kDispatch,
  kGemm0,
  kGemm1,
  kReduce,
  kCombine,
  kWait,
  kSchedule,
  kEpilogue,
  kCount
};

// Trace memory of one block: kTraceEvents events behind a header that says how many were written (they stop when full).
inline constexpr uint32_t kTraceEvents = 4095;
struct TraceHeader {
  uint64_t count;
  uint64_t pad[3];
};
inline constexpr uint64_t kTraceBytesPerBlock = sizeof(TraceHeader) + uint64_t{kTraceEvents} * sizeof(TraceEvent);

// Weights as loads see them: expert e's row r is at data + e * expert_bytes + r * row_bytes, multiples of 16 all three.
struct WeightRows {
  const uint8_t* data;
  uint64_t row_bytes, expert_bytes;

  FLASHMOE_HD const uint8_t* row(uint32_t e, uint32_t r) const { return data + e * expert_bytes + r * row_bytes; }
};

struct KernelArgs {
  // Its epoch is ignored: the kernel counts calls itself (Control::calls), so that a captured graph can be replayed.
  Call call;

  // Weights as TMA sees them, all 128-byte swizzled, 128 bytes of K by 128 rows a box, zeros outside:
  //   gate_up  5D {H, 8, gated ? 2 : 1, I / 8, El}, box {., 8, gated ? 2 : 1, gated ? 8 : 16, 1}: with a gate, a box
  //            holds 8 gate rows, their 8 up rows, and so on, so that one thread's accumulators have both, either way
  //   down     5D {I, 8, 1, H / 8, El},  box {., 8, 1, 16, 1}
  //   router   5D {H, E, 1, 1, 1},       box {., gate_features(E), 1, 1, 1}
  //   hidden   2D {I, tiles * 256},      box {., 32}
  //   tokens   2D {H, T},                box {., 32}; x, for the router
  TensorMap gate_up, down, router, hidden, tokens;
  // The same without TMA: [El][2I or I], H elements a row; [El][H], I; [1][E], H.
  WeightRows gate_up_rows, down_rows, router_rows;

  const uint8_t* x;  // [T, H], rows x_row_bytes apart (a multiple of 16)
  uint64_t x_row_bytes;
  uint8_t* out;               // [T, H] contiguous
  const void* gate_up_bias;   // [El, 2I] or [El, I] contiguous; may be null
  const void* down_bias;      // [El, H]; may be null
  const void* router_bias;    // [E]; may be null
  const void* topk_ids;       // [T, K] int32 or int64; null: the router decides
  const float* topk_weights;  // [T, K]
  uint32_t topk_ids_64;       // 1: int64
  uint32_t renormalize;
  HostFault* host_fault;  // in mapped host memory: written when the call failed
  uint8_t* trace;         // [blocks] of kTraceBytesPerBlock; null: not traced
};
static_assert(sizeof(KernelArgs) <= 4096);

}  // namespace flashmoe::sm90

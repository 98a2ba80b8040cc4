// The tile geometry: how host and kernel cut GEMMs into tiles, tasks and shares of thread blocks.
//
// GEMMs run transposed: weight rows ("features") are on wgmma's M side, tokens on its N side. A tile has from 1 to 256
// tokens. N goes in steps of 8, but M is always 64. So there is little padding, and one kernel serves large and small
// batches. Tiles of more than 224 tokens run the other way round: tokens on M, and 256 features on N. Their products
// then read 80 KiB of shared memory for each k-block, not 96. (machine/mainloop.cuh, with_tokens() has the exceptions.)
//
// A task is a tile times 256 features. A cluster of two thread blocks computes it. A GEMM on all SMs is bound by the
// L2, which gives 34 bytes a clock and SM. So the cluster shares loads: each block loads half of the weights and
// multicasts them to both, and each multiplies all 256 features by its own half of the tokens. (A block then has 32 KiB
// of L2 traffic for 48 KiB of operands.) Tiles of few tokens are halved the other way: each block has 128 features and
// all tokens.
//
// Rows in e4m3 are always multiplied with tokens on M, and a task in e4m3 is never halved by features (docs/fp8.md).
//
// Transposed weights, whose rows in memory go along features, are always multiplied with tokens on M. A thread then has
// both a gate and its up, in whichever order they lie in memory.
#pragma once

#include "flashmoe/gpu/kernel_args.h"

namespace flashmoe::sm90 {

using namespace gpu;

inline constexpr uint32_t kClusterBlocks = 2;           // thread blocks
inline constexpr uint32_t kTileTokens = 256;            // most rows of a tile
inline constexpr uint32_t kTaskFeatures = 256;          // weight rows of a task
inline constexpr uint32_t kBoxFeatures = 128;           // weight rows of one TMA box: a block's half
inline constexpr uint32_t kRowBytes = 128;              // bytes of a row in a k-block: a 128-byte swizzle span
inline constexpr uint32_t kStageAlign = 8 * kRowBytes;  // the swizzle pattern repeats every 8 rows
inline constexpr uint32_t kRowBox = 32;                 // rows of one TMA box of intermediate rows or tokens
inline constexpr uint32_t kNarrowTokens = 64;           // most rows of a tile whose features are halved
inline constexpr uint64_t kReachBytes = uint64_t{16}
                                        << 31;  // gathered rows lie within so many bytes behind a base (TokenRows)

// A span is the part of an MN-major operand that one TMA box has: a square of 64 columns (features, for instance) by 64
// rows along K, for elements of 16 bits.
inline constexpr uint32_t kSpanColumns = 64, kSpanRows = 64;
inline constexpr uint32_t kSpanBytes = kSpanRows * kRowBytes;
// The side of a span, in elements, and the bytes of a span, for elements of element_bytes.
FLASHMOE_HD constexpr uint32_t span_side(uint32_t element_bytes) {
  return kRowBytes / element_bytes;
}
FLASHMOE_HD constexpr uint32_t span_bytes(uint32_t element_bytes) {
  return span_side(element_bytes) * kRowBytes;
}
static_assert(span_side(2) == kSpanColumns && span_bytes(2) == kSpanBytes);

// The rows of a tile that one block of the cluster multiplies. (Of 100 rows 64 and 36, with a cover of 64.)
struct Share {
  bool wide;  // all features and half of the rows; else half of the features and all rows
  uint32_t first, rows,
      cover;  // the block's rows are [first, first + rows) of the tile; each block's products cover `cover` rows
};
FLASHMOE_HD constexpr Share share_of(uint32_t tile_rows, uint32_t block) {
  if (tile_rows <= kNarrowTokens) return {false, 0, tile_rows, tile_rows};
  const uint32_t half = ceil_div(tile_rows, 32u) * 16;
  return {true, block * half, block == 0 ? half : tile_rows - half, half};
}

// The same for rows in e4m3. There each block multiplies all features, so that its results are whole blocks of 128
// columns that share a scale.
FLASHMOE_HD constexpr Share wide_share_of(uint32_t tile_rows, uint32_t block) {
  const uint32_t half = ceil_div(tile_rows, 32u) * 16, first = min_of(block * half, tile_rows);
  return {true, first, block == 0 ? min_of(half, tile_rows) : tile_rows - first, half};
}

// The layout of a tile's intermediate rows in e4m3: first the elements of kTileTokens rows; then the scales that all of
// these rows have for the first 128 columns, then those for the next 128, and so on. So the scales that a stage needs
// lie side by side. (This takes no more bytes than rows that each end with their scales, spec/rows.h.)
FLASHMOE_HD constexpr uint64_t quantised_pitch(uint32_t intermediate) {
  return scales_offset(intermediate);
}
FLASHMOE_HD constexpr uint64_t quantised_scale(uint32_t intermediate, uint32_t block, uint32_t row) {
  return kTileTokens * quantised_pitch(intermediate) + (uint64_t{block} * kTileTokens + row) * sizeof(float);
}

// The most that a thread block has room for of a token block. The host makes token blocks that are small enough.
inline constexpr uint32_t kMaxChoices = 2048;      // its tokens times K
inline constexpr uint32_t kMaxGateLogits = 16384;  // its tokens times E
// The gate's TMA boxes and stages have 32, 64 or 128 rows of the router: the fewer rows, the smaller are the stages,
// and the more stages there are.
inline constexpr uint32_t kSmallGate = 32, kMiddleGate = 64;
FLASHMOE_HD constexpr uint32_t gate_features(uint32_t experts) {
  return experts <= kSmallGate ? kSmallGate : experts <= kMiddleGate ? kMiddleGate : kBoxFeatures;
}
// A logit from 16-bit rows is the sum of kLogitSegments sums, in their order, and then its bias. Each is of a part of
// the k-blocks of H, in their order. All kernels sum so, and a token's logits have the same bits in all of them. One
// sum over all of H would make the kernel for a few tokens wait some 33 clocks for each 16 columns: 8 us with H = 7168.
inline constexpr uint32_t kLogitSegments = 8;
// The first of `k_blocks` k-blocks that segment number `segment` has.
FLASHMOE_HD constexpr uint32_t segment_begin(uint32_t k_blocks, uint32_t segment) {
  return k_blocks * segment / kLogitSegments;
}
// The most local experts of one former. With 1024 experts on an H100, which has a former on nearly each of its 132 SMs,
// a former has 8 experts. GPUs with fewer SMs exist, so that 16 are allowed.
inline constexpr uint32_t kFormerExperts = 16;
// How many of `blocks` thread blocks have a former: those that follow the first block, which has the OS actor. Later
// blocks may send rows. A former takes its experts one after the other, and no task begins before its tile is formed.
// So there are many formers, unless the warps of the blocks behind them have another role, which `work_behind` says:
// they put rows, relay them or keep them (roles/kernel.cuh). Then most of the blocks are left to that role.
FLASHMOE_HD constexpr uint32_t formers_of(uint32_t ranks, uint32_t local_experts, uint32_t blocks, bool work_behind) {
  if (ranks == 1) return blocks - 1;
  const uint32_t wanted = max_of(work_behind ? blocks / 4 : max_of(blocks * 3 / 4, 1u) - 1, 1u);
  return max_of(ceil_div(local_experts, kFormerExperts), min_of(local_experts, wanted));
}
// How many keepers copy other ranks' rows, if passes train among several ranks (actors/keeper.h). These are the last
// warps of blocks that have neither a former nor the OS actor, but at most kMost, which are enough to use the memory's
// bandwidth. If there are no such blocks, the formers keep rows after they have formed their tiles.
FLASHMOE_HD constexpr uint32_t keepers_of(uint32_t ranks, uint32_t local_experts, uint32_t blocks) {
  constexpr uint32_t kMost = 64;
  if (ranks == 1 || local_experts == 0) return 0;
  const uint32_t formers = formers_of(ranks, local_experts, blocks, true), free = blocks - 1 - formers;
  return free == 0 ? formers : min_of(free, kMost);
}

// The fewest thread blocks that a kernel needs: one for the OS actor, those of the formers, and with several ranks one
// for a sender.
FLASHMOE_HD constexpr uint32_t least_blocks(uint32_t ranks, uint32_t local_experts) {
  const uint32_t service = 1 + max_of(ceil_div(local_experts, kFormerExperts), 1u) + (ranks > 1 ? 1 : 0);
  return ceil_div(service, kClusterBlocks) * kClusterBlocks;
}

// The kernel for a few tokens (sm90/decode/alone.cuh).
FLASHMOE_HD constexpr uint32_t few_warps(bool scales) {  // of a thread block; scales: whether weights have some
  return scales ? 13 : 12;
}
inline constexpr uint32_t kFewSharedBytes = kSharedBytes;

// How many columns of results a task of each product has. With a gate, an intermediate column takes two rows of
// weights.
constexpr std::array<uint32_t, kProducts> columns_per_task(bool gated) {
  std::array<uint32_t, kProducts> columns = each_product(kTaskFeatures);
  for (uint32_t n = 0; n < kProducts; ++n) {
    if (gated && kProgram[n].epilogue == Epilogue::kActivate) columns[n] /= 2;
  }
  return columns;
}
template <uint32_t n, bool kGated>
inline constexpr uint32_t kColumnsPerTask = columns_per_task(kGated)[n];
inline constexpr uint32_t kReturnColumns = kColumnsPerTask<kReturning, true>;

}  // namespace flashmoe::sm90

// The ring of stages between the two loader warps and the two consumer warpgroups, in dynamic shared memory.
//
// A stage is 48 KiB and holds k-blocks of 128 bytes of K of features and tokens, laid out in one of four ways, all of it
// 128-byte swizzled: chunk c of row r lies at chunk c ^ (r % 8).
//   Wide    256 features at 0 (the lower 128 by the pair's first block, the upper by its second), 128 tokens at 32 KiB
//   Narrow  two k-blocks, so that small tiles keep as many bytes in flight: 128 features at 0 and 16 KiB, 64 tokens at 32
//           and 40 KiB
//   Gate    128 features at 0, 128 tokens at 16 KiB; the rest is the logits' (dispatch.cuh)
//   DeepGate  two k-blocks, where 32 features are all: a block's tokens arrive at the pace of the bytes in flight. 128
//           tokens at 0 and 16 KiB, the logits, and the features at 36 and 40 KiB. A wgmma takes 64 rows of features: what
//           lies behind these stands for the others, and what becomes of it is not read
// Barriers: full takes an arrival of every loader thread of the block and the copy engine's bytes, half of which the other
// block's copy engine writes; empty takes one of each consumer that reads what is written when it is passed: of both
// blocks. Gate's are its own, and the block's alone.
#pragma once

#include <cstdint>

#include "flashmoe/sm90/barrier.cuh"
#include "flashmoe/sm90/kernel_args.h"

namespace flashmoe::sm90 {

inline constexpr uint32_t kWarpgroup = 128;  // threads
inline constexpr uint32_t kConsumers = 2;    // warpgroups, the first of the block
inline constexpr uint32_t kFirstLoader = kConsumers * kWarpgroup;
inline constexpr uint32_t kLoaders = 64;  // threads

// Named barrier of a consumer warpgroup.
__device__ __forceinline__ uint32_t group_barrier(uint32_t group) {
  return 1 + group;
}

inline constexpr uint32_t kLoaderBarrier = 4;  // 3 is the dispatching team's

inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kStageBytes = 48 * 1024;
inline constexpr uint32_t kStageAlign = 1024;  // the swizzle pattern repeats every 8 rows
inline constexpr uint32_t kBoxBytes = kBoxFeatures * kRowBytes;

template <uint32_t kBlocks_, uint32_t kFeatures_, uint32_t kFeaturesAt, uint32_t kTokens_, uint32_t kTokensAt,
          bool kPaired_>
struct StageLayout {
  static constexpr uint32_t kBlocks = kBlocks_;                       // k-blocks
  static constexpr uint32_t kFeatures = kFeatures_;                   // rows of each
  static constexpr uint32_t kTokens = kTokens_;                       // rows of each
  static constexpr uint32_t kGroupFeatures = kFeatures / kConsumers;  // of a consumer warpgroup, FeaturesByTokens
  static constexpr uint32_t kMs = ceil_div(kGroupFeatures, 64u);      // wgmmas that these take
  static constexpr bool kPaired = kPaired_;                           // both blocks release it
  static constexpr uint32_t kFeatureBytes = kBlocks * kFeatures * kRowBytes;

  static FLASHMOE_HD constexpr uint32_t features(uint32_t k_block) {
    return kFeaturesAt + k_block * kFeatures * kRowBytes;
  }
  static FLASHMOE_HD constexpr uint32_t tokens(uint32_t k_block) { return kTokensAt + k_block * kTokens * kRowBytes; }
  // Stages that rows of so many bytes go through: producer and consumers both count with this.
  static FLASHMOE_HD constexpr uint32_t stages(uint32_t k_bytes) { return ceil_div(k_bytes, kBlocks * kRowBytes); }
};
using Wide = StageLayout<1, 256, 0, 128, 32 * 1024, true>;
using Narrow = StageLayout<2, 128, 0, 64, 32 * 1024, true>;
using Gate = StageLayout<1, kBoxFeatures, 0, 128, 16 * 1024, false>;
using DeepGate = StageLayout<2, kFewExperts, 36 * 1024, 128, 0, false>;
static_assert(Wide::tokens(1) == kStageBytes && Narrow::tokens(2) == kStageBytes);
static_assert(DeepGate::features(1) + 64 * kRowBytes <= kStageBytes);
static_assert(Narrow::kTokens == kNarrowTokens && Wide::kTokens * kPair == kTileTokens);

// One side's place in the ring.
struct Pipeline {
  uint32_t stages;    // shared address of stage 0
  uint32_t barriers;  // shared address of full[kStages], empty[kStages]
  uint32_t stage = 0;
  uint32_t parity = 0;

  static constexpr uint32_t kBarriers = 2 * kStages;

  // By one thread, before the block's first synchronization. releases: arrivals that free a stage.
  static __device__ __forceinline__ void init(uint32_t barriers, uint32_t releases) {
    for (uint32_t s = 0; s < kStages; ++s) {
      barrier_init(barriers + s * 8, 1 + kLoaders);
      barrier_init(barriers + (kStages + s) * 8, releases);
    }
  }

  __device__ __forceinline__ uint32_t data() const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty() const { return barriers + (kStages + stage) * 8; }
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  // As many times.
  __device__ __forceinline__ void advance(uint32_t n) {
    parity ^= (stage + n) / kStages & 1u;
    stage = (stage + n) % kStages;
  }
};

// Arrivals of a consumer warpgroup at an empty barrier. The tensor cores read for all of its threads. Without them each
// thread arrives for what it has read itself: racecheck takes no arrival for others' reads.
template <class Dtype>
inline constexpr uint32_t kReleases = Dtype::kTensorCores ? 1 : kWarpgroup;

// By all threads of a consumer warpgroup, when they do not read the stage any more.
template <class Dtype, class Stage>
__device__ __forceinline__ void release_stage(uint32_t empty) {
  const uint32_t thread = threadIdx.x % kWarpgroup;
  if constexpr (!Stage::kPaired) {
    if (kReleases<Dtype> != 1 || thread == 0) arrive(empty);
  } else if constexpr (kReleases<Dtype> != 1) {
    for (uint32_t b = 0; b < kPair; ++b) arrive_at_block(b, empty);
  } else {
    if (thread < kPair) arrive_at_block(thread, empty);
  }
}

}  // namespace flashmoe::sm90

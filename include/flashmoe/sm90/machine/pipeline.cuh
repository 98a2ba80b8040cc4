// The ring of stages between the two loader warps and the two consumer warpgroups, in dynamic shared memory.
//
// A stage has k-blocks of features and of tokens. A k-block has 128 bytes along K. A stage has one of three layouts,
// all 128-byte swizzled: chunk c of row r lies at chunk c ^ (r % 8).
//   Wide    48 KiB: 256 features at 0 (the cluster's first block loads the lower 128, its second the upper), 128 tokens
//           at 32 KiB
//   Narrow  48 KiB: two k-blocks, so that small tiles keep as many bytes in flight: 128 features at 0 and 16 KiB, 64
//           tokens at 32 and 40 KiB
//   Gate    128 tokens at 0, and behind them 32, 64 or 128 features. For more than 256 experts: 256 features at 0, and
//           behind them 64 tokens. There are as many stages as there is room for, but at most 8, since a block's tokens
//           arrive sooner if more bytes are in flight. (A wgmma takes 64 rows of features. If there are 32, it also
//           multiplies what lies behind them, and nobody reads those results.)
// Transposed weights have the same places: a k-block of 128 features is two spans, each of 64 features by 64 rows along
// K. If ups lie behind all gates, the first span has gates and the second their ups.
// Barriers: `full` takes one arrival of every loader thread of the block, one more with the number of bytes that TMA
// writes, and these bytes. (Half of a Wide stage's features come from the other block.) `empty` takes one arrival of
// each consumer warpgroup, of both blocks, that reads what the next load overwrites. The gate has barriers of its own,
// at which only its own block arrives.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/machine/barrier.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kWarpgroup = 128;  // threads
inline constexpr uint32_t kConsumers = 2;    // warpgroups: the first two of the block
inline constexpr uint32_t kFirstLoader = kConsumers * kWarpgroup;
inline constexpr uint32_t kLoaders = 64;  // threads

// Named barrier of a consumer warpgroup.
__device__ __forceinline__ uint32_t group_barrier(uint32_t group) {
  return 1 + group;
}

inline constexpr uint32_t kLoaderBarrier = 4, kConsumersBarrier = 5;  // 3 is the dispatching team's

inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kStageBytes = 48 * 1024;
inline constexpr uint32_t kBoxBytes = kBoxFeatures * kRowBytes;

// A ring of kCount stages of kBytes bytes, as one loader or consumer sees it. `stage` is the stage that it fills or
// reads next, and `parity` is the parity of the phase for which it waits there.
template <uint32_t kCount_, uint32_t kBytes_>
struct Ring {
  static constexpr uint32_t kCount = kCount_, kBytes = kBytes_;

  uint32_t stages;    // shared address of stage 0
  uint32_t barriers;  // shared address of the barriers: full and empty of stage 0, then of stage 1, ...
  uint32_t stage = 0;
  uint32_t parity = 0;

  // By one thread, before the block's first synchronization. releases: arrivals that free a stage.
  static __device__ __forceinline__ void init(uint32_t barriers, uint32_t releases) {
    for (uint32_t s = 0; s < kCount; ++s) {
      barrier_init(barriers + s * 16, 1 + kLoaders);
      barrier_init(barriers + s * 16 + 8, releases);
    }
  }

  __device__ __forceinline__ uint32_t data() const { return data(stage); }
  __device__ __forceinline__ uint32_t data(uint32_t s) const { return stages + s * kBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty() const { return empty(stage); }
  __device__ __forceinline__ uint32_t empty(uint32_t s) const { return barriers + s * 16 + 8; }
  // The stage before the next one.
  __device__ __forceinline__ uint32_t last() const { return (stage == 0 ? kCount : stage) - 1; }
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  // The same n times.
  __device__ __forceinline__ void advance(uint32_t n) {
    parity ^= (stage + n) / kCount & 1u;
    stage = (stage + n) % kCount;
  }
};
using Pipeline = Ring<kStages, kStageBytes>;

template <class Ring_, uint32_t kBlocks_, uint32_t kFeatures_, uint32_t kFeaturesAt, uint32_t kTokens_,
          uint32_t kTokensAt, bool kByCluster_>
struct StageLayout {
  using Ring = Ring_;
  static constexpr uint32_t kBlocks = kBlocks_;                       // k-blocks of a stage
  static constexpr uint32_t kFeatures = kFeatures_;                   // features of a k-block
  static constexpr uint32_t kTokens = kTokens_;                       // tokens of a k-block
  static constexpr uint32_t kGroupFeatures = kFeatures / kConsumers;  // a warpgroup's features in FeaturesByTokens
  static constexpr uint32_t kMs = ceil_div(kGroupFeatures, 64u);      // wgmmas that these features take
  static constexpr bool kByCluster = kByCluster_;                     // both blocks release a stage
  static constexpr uint32_t kFeatureBytes = kBlocks * kFeatures * kRowBytes;

  static FLASHMOE_HD constexpr uint32_t features(uint32_t k_block) {
    return kFeaturesAt + k_block * kFeatures * kRowBytes;
  }
  static FLASHMOE_HD constexpr uint32_t tokens(uint32_t k_block) { return kTokensAt + k_block * kTokens * kRowBytes; }
  // The number of stages that rows of k_bytes bytes take. Loaders and consumers both count with it.
  static FLASHMOE_HD constexpr uint32_t stages(uint32_t k_bytes) { return ceil_div(k_bytes, kBlocks * kRowBytes); }
};
using Wide = StageLayout<Pipeline, 1, 256, 0, 128, 32 * 1024, true>;
using Narrow = StageLayout<Pipeline, 2, 128, 0, 64, 32 * 1024, true>;
static_assert(Wide::tokens(1) == kStageBytes && Narrow::tokens(2) == kStageBytes);
static_assert(Narrow::kTokens == kNarrowTokens && Wide::kTokens * kClusterBlocks == kTileTokens);

// The gate's layout, in kRoom bytes.
inline constexpr uint32_t kMostGateStages = 8;
template <uint32_t kFeatures, uint32_t kRoom, uint32_t kBytes = (kMaxTokenBlock + kFeatures) * kRowBytes>
using GateLayout = StageLayout<Ring<min_of(kMostGateStages, kRoom / kBytes), kBytes>, 1, kFeatures,
                               kMaxTokenBlock * kRowBytes, kMaxTokenBlock, 0, false>;
// If one pass has all of the token block's tokens and all experts, the logits overwrite the stages after that pass.
template <uint32_t kFeatures>
using Gate = GateLayout<kFeatures, kStages * kStageBytes>;
// If the gate takes several passes, the logits lie behind the stages.
inline constexpr uint32_t kLogitsAt = kStages * kStageBytes - kMaxGateLogits * 4;
using GateInPasses = GateLayout<kBoxFeatures, kLogitsAt>;
// With more than kManyExperts experts, the blocks of a cluster share the gate (roles/shared_gate.cuh). A stage has
// two boxes of experts, and the tokens of both blocks' token blocks, which are few if there are so many experts.
inline constexpr uint32_t kManyExperts = 2 * kBoxFeatures, kManyGateBytes = 40 * 1024;
using GateOfMany = StageLayout<Ring<kLogitsAt / kManyGateBytes, kManyGateBytes>, 1, 2 * kBoxFeatures, 0, 64,
                               2 * kBoxFeatures * kRowBytes, false>;
static_assert(GateOfMany::tokens(1) == kManyGateBytes && GateOfMany::Ring::kCount == 3);
// With so many experts, a token block has fewer tokens than this quotient, and a power of two: at most half of it.
static_assert(kMaxGateLogits / kManyExperts <= GateOfMany::kTokens);
template <class Stage>
inline constexpr bool kInPasses = std::is_same_v<Stage, GateInPasses>;
static_assert(Gate<kSmallGate>::Ring::kCount == 8 && Gate<kMiddleGate>::Ring::kCount == 8);
static_assert(Gate<kBoxFeatures>::Ring::kCount == 6);
static_assert(GateInPasses::Ring::kCount == 4);

// Whether threads themselves load fragments of the operands from the stages (machine/mainloop_fragments.cuh): in
// backward passes of fp32.
template <class Dtype>
inline constexpr bool kByFragments = kIsBackward && Dtype::kBytes == 4;
// Whether consumers read a task's number again after its epilogue, because no register is left in which to keep it.
template <class Dtype>
inline constexpr bool kNumberAgain = kIsBackward && (kTrainsInGroup || kByFragments<Dtype>);
// Whether each warp itself loads what it multiplies from the stage to registers: fragments, or quantised rows and
// scales.
template <class Dtype>
inline constexpr bool kLoadedByWarps = kByFragments<Dtype>;
template <>
inline constexpr bool kLoadedByWarps<E4M3> = true;
// Whether each warp releases a stage by an arrival of its own.
template <class Dtype>
inline constexpr bool kReleasedByWarps = kLoadedByWarps<Dtype> && !kBuild.racecheck;

// Arrivals of a consumer warpgroup at an `empty` barrier: one for each warp with kReleasedByWarps; one if the tensor
// cores read the stage for all threads; otherwise one for each thread, for what the thread has read itself.
template <class Dtype>
inline constexpr uint32_t kReleases = kReleasedByWarps<Dtype> ? kWarpgroup / 32
                                      : Dtype::kTensorCores && !kLoadedByWarps<Dtype> && !kBuild.racecheck ? 1
                                                                                                           : kWarpgroup;

// Called by all threads of a consumer warpgroup when they no longer read the stage.
template <class Dtype, class Stage>
__device__ __forceinline__ void release_stage(uint32_t empty) {
  [[maybe_unused]] const uint32_t thread = threadIdx.x % kWarpgroup;
  if constexpr (!Stage::kByCluster) {
    if (kReleases<Dtype> != 1 || thread == 0) arrive(empty);
  } else if constexpr (kReleasedByWarps<Dtype>) {
    uint32_t lane;  // read anew (volatile), so that it takes no register between calls
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    __syncwarp();
    if (lane < kClusterBlocks) arrive_at_block(lane, empty);
  } else if constexpr (kReleases<Dtype> != 1) {
    for (uint32_t b = 0; b < kClusterBlocks; ++b)
      arrive_release_at_block(b, empty);  // a release: this thread's loads of the stage come before it
  } else {
    if (thread < kClusterBlocks) arrive_at_block(thread, empty);
  }
}

}  // namespace flashmoe::sm90

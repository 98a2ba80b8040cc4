// The ring of stages between the two loader warps and the two consumer warpgroups, in dynamic shared memory.
//
// A stage holds k-blocks of 128 bytes of K: one, or two where the tile has at most 64 rows, so that small tiles keep as
// many bytes in flight as large ones. All of it is 128-byte swizzled: chunk c of row r lies at chunk c ^ (r % 8).
//   one k-block    features [128 rows] at 0          tokens [256 rows] at 16 KiB
//   two k-blocks   features [128 rows] at 0, 16 KiB  tokens [64 rows] at 32 KiB, 40 KiB
// Barriers: full takes an arrival of every loader thread and the copy engine's bytes; empty takes one of each consumer.
#pragma once

#include <cstdint>

#include "flashmoe/sm90/barrier.cuh"
#include "flashmoe/sm90/kernel_args.h"

namespace flashmoe::sm90 {

inline constexpr uint32_t kWarpgroup = 128;  // threads
inline constexpr uint32_t kConsumers = 2;    // warpgroups, the first of the block
inline constexpr uint32_t kFirstLoader = kConsumers * kWarpgroup;
inline constexpr uint32_t kLoaders = 64;  // threads
inline constexpr uint32_t kGroupFeatures = kTileFeatures / kConsumers;

inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kStageBytes = 48 * 1024;
inline constexpr uint32_t kStageAlign = 1024;  // the swizzle pattern repeats every 8 rows
inline constexpr uint32_t kFeatureBytes = kTileFeatures * kRowBytes;
inline constexpr uint32_t kSmallTile = 64;  // most rows of a tile whose stages hold two k-blocks
static_assert(kStageBytes == kFeatureBytes + kTileTokens * kRowBytes);
static_assert(kStageBytes == 2 * (kFeatureBytes + kSmallTile * kRowBytes));

// What a stage of a tile of so many rows (real rows, or the N that covers them) looks like.
FLASHMOE_HD constexpr uint32_t k_blocks_per_stage(uint32_t rows) {
  return rows <= kSmallTile ? 2 : 1;
}
FLASHMOE_HD constexpr uint32_t feature_offset(uint32_t k_block) {
  return k_block * kFeatureBytes;
}
FLASHMOE_HD constexpr uint32_t token_offset(uint32_t k_blocks, uint32_t k_block) {
  return k_blocks * kFeatureBytes + k_block * kSmallTile * kRowBytes;
}
// Stages that a task with rows of so many bytes goes through: producer and consumers both count with this.
FLASHMOE_HD constexpr uint32_t stages_of_task(uint32_t k_bytes, uint32_t k_blocks) {
  return ceil_div(k_bytes, k_blocks * kRowBytes);
}

// One side's place in the ring. A fresh barrier passes waits of parity 1: the producer finds all stages empty.
struct Pipeline {
  uint32_t stages;    // shared address of stage 0
  uint32_t barriers;  // shared address of full[kStages], empty[kStages]
  uint32_t stage;
  uint32_t parity;

  static constexpr uint32_t kBarrierBytes = 2 * kStages * sizeof(uint64_t);

  static __device__ __forceinline__ Pipeline producer(uint32_t stages, uint32_t barriers) {
    return {stages, barriers, 0, 1};
  }
  static __device__ __forceinline__ Pipeline consumer(uint32_t stages, uint32_t barriers) {
    return {stages, barriers, 0, 0};
  }
  // By one thread, before the block's first synchronization.
  static __device__ __forceinline__ void init(uint32_t barriers) {
    for (uint32_t s = 0; s < kStages; ++s) {
      barrier_init(barriers + s * 8, 1 + kLoaders);
      barrier_init(barriers + (kStages + s) * 8, kConsumers);
    }
    fence_barrier_init();
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

}  // namespace flashmoe::sm90

// The layout of a block's shared memory, and the task ring: slots in which a clerk hands tasks to the block's loaders and
// consumers.
//
//   stages   4 x 48 KiB   the GEMM pipeline (machine/pipeline.cuh); before the first task, the gate's, scratch of dispatch, and
//                         the rows that a block sends; behind the last task, rows that are summed
//   staging  2 x  8 KiB   the consumers' epilogues
//   Shared                everything else
//
// Run by clerks, loaders and consumers (warps 0 to 10): TaskRing says who arrives at each of its barriers, and how often.
// Reads and writes the ring alone: barriers and `loaded` of the own block, and from clerk to clerk `word` and barriers of the
// cluster's other block. What a slot says the clerk writes (look_up.cuh). Nothing here touches global memory.
#pragma once

#include "flashmoe/actors/former.h"
#include "flashmoe/actors/os.h"
#include "flashmoe/actors/processor.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/epilogue/features.cuh"
#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/stage_scales.cuh"
#include "flashmoe/sm90/roles/join.cuh"
#include "flashmoe/sm90/roles/send.cuh"
#include "flashmoe/sm90/roles/sums.cuh"

namespace flashmoe::sm90 {

// A task as the clerk hands it on: looked up, with the offsets of the rows that this block multiplies.
struct TaskSlot {
  TaskKind kind;
  uint32_t of;            // as Task::of
  uint32_t tile, column;  // tile: behind the stop the group, or of a router's dX the tile of tokens
  uint32_t expert;   // whose weights it reads, or sums gradients for; slices of the shared one follow the local experts
  uint32_t inner;    // where the tile's intermediate rows lie, see Call::inner_tile
  uint32_t k_bytes;  // of a row of either operand,
  uint32_t slices, later;  // of which so many follow: GEMM1 of the shared expert; the second slice's `inner`
  Share share;
  uint32_t stored;  // of tasks whose rows return: how many of these the ring has had before, see TaskRing::stored
  union {
    uint32_t offsets[Wide::kTokens];  // gathered: where the token rows are, see TokenRows
    uint64_t to[Wide::kTokens];       // returned: where the results go
  };
  alignas(8) float weights[Wide::kTokens];  // returned: combine weights
  union {
    // Returned: whose rows they are; of dX of a shared expert factors of its gate, floats. Gathered: where they are kept
    // (kept_row)
    uint32_t tokens[Wide::kTokens];
    // gathered, in e4m3: each warpgroup's largest magnitude of a row, where it has half of a scale's columns
    mutable float largest[kConsumers][64];
  };

  __device__ __forceinline__ Task task() const { return {kind, column, of}; }
};

// Nanoseconds that a clerk rests between two looks: it shares its instruction scheduler, and the power, with consumers.
inline constexpr uint32_t kPause = 250;

// Slots go from each block's clerk to its loaders and consumers, and back. The first block of a cluster leads: its
// clerk takes tasks for both blocks, the other's retires them for both. A clerk that did both, seven round trips to the
// L2 a task, would be slower than the consumers are with small tasks. There are slots for as many small tasks as the
// clerk takes ahead.
struct TaskRing {
  static constexpr uint32_t kSlots = kBuild.quantised ? 4 : 5;  // the memory of one is that of Scales
  static constexpr uint32_t kLeader = 0, kFollower = 1;
  // Every lane of the consumers and loaders arrives, for what it has read of the slot itself: racecheck takes no
  // arrival for other lanes' reads. So none is overtaken by the ring, not even a loader without a part in the loads.
  static constexpr uint32_t kDoneArrivals = kConsumers * kWarpgroup + kLoaders;

  // Barriers of the slots, with the arrivals that a phase takes, and whose these are.
  uint64_t handed[kSlots];  // 1: the leader's clerk, in the follower
  uint64_t full[kSlots];    // 32: the block's clerk, each lane for what it wrote
  uint64_t done[kSlots];    // kDoneArrivals; in the follower 1 more: the leader's clerk, for its block
  uint64_t stored[kSlots];  // 256: consumers. Not of the slots: the n-th task that returns rows has number n % kSlots
  uint64_t free[kSlots];    // 1: the follower's clerk, in the leader
  uint64_t word[kSlots];    // the task that the leader handed on, in the follower
  uint32_t loaded;          // stages that the loaders have begun to fill
  TaskSlot slot[kSlots];

  // One thread, before the cluster's first synchronization.
  __device__ void init() {
    for (uint32_t i = 0; i < kSlots; ++i) {
      barrier_init(shared_address(&handed[i]), 1);
      barrier_init(shared_address(&full[i]), Platform::kLanes);
      barrier_init(shared_address(&done[i]), kDoneArrivals + (cluster_rank() == kFollower ? 1 : 0));
      barrier_init(shared_address(&stored[i]), kConsumers * kWarpgroup);
      barrier_init(shared_address(&free[i]), 1);
    }
    loaded = 0;
  }
  static __device__ __forceinline__ uint32_t parity(uint32_t n) { return n / kSlots & 1u; }
  __device__ __forceinline__ TaskSlot& at(uint32_t n) { return slot[n % kSlots]; }
  __device__ __forceinline__ TaskSlot& wait_full(uint32_t n) {
    wait(shared_address(&full[n % kSlots]), parity(n));
    return at(n);
  }
  // All lanes.
  __device__ __forceinline__ void put_full(uint32_t n) { arrive(shared_address(&full[n % kSlots])); }
  __device__ __forceinline__ void put_done(uint32_t n) { arrive(shared_address(&done[n % kSlots])); }
  // n counts tasks that return rows: nobody waits for others, and synccheck calls a phase that nobody awaits an error.
  __device__ __forceinline__ void put_stored(uint32_t n) { arrive(shared_address(&stored[n % kSlots])); }

  // By a loader thread; by the clerk.
  __device__ __forceinline__ void count_stage() { atomicAdd(&loaded, 1u); }
  __device__ __forceinline__ uint32_t stages_loaded() {
    return Platform::broadcast(Platform::lane() == 0 ? atomicAdd(&loaded, 0u) : 0u, 0);
  }

  // By all lanes of a warp, which get the same answer.
  __device__ __forceinline__ bool is_full(uint32_t n) const { return has_passed(full, n); }
  __device__ __forceinline__ bool is_done(uint32_t n) const { return has_passed(done, n); }
  __device__ __forceinline__ bool is_stored(uint32_t n) const { return has_passed(stored, n); }
  __device__ __forceinline__ bool is_handed(uint32_t n) const { return has_passed(handed, n); }
  __device__ __forceinline__ bool is_free(uint32_t n) const { return n < kSlots || has_passed(free, n - kSlots); }

  // From one clerk to the other, one thread.
  __device__ __forceinline__ void hand_on(uint32_t n, const Task& task) {
    store_in_block(kFollower, shared_address(&word[n % kSlots]), task.pack());
    arrive_release_at_block(kFollower, shared_address(&handed[n % kSlots]));
  }
  __device__ __forceinline__ Task handed_task(uint32_t n) const { return Task::unpack(word[n % kSlots]); }
  __device__ __forceinline__ void report_done(uint32_t n) {
    arrive_release_at_block(kFollower, shared_address(&done[n % kSlots]));
  }
  __device__ __forceinline__ void put_free(uint32_t n) { arrive_at_block(kLeader, shared_address(&free[n % kSlots])); }

 private:
  __device__ __forceinline__ bool has_passed(const uint64_t (&barrier)[kSlots], uint32_t n) const {
    const bool passed = __any_sync(kFullWarp, test_wait_cluster(shared_address(&barrier[n % kSlots]), parity(n)));
    __syncwarp();  // what one lane has acquired is every lane's: a vote orders no memory
    return passed;
  }
};

// Of quantised rows and weights; elsewhere nothing.
template <bool>
struct Scales {
  StageScales stage[kStages];
};
template <>
struct Scales<false> {};

struct Shared {
  Call call;  // the kernel's, with the epoch that device memory counts
  uint64_t gate_barriers[2 * kMostGateStages], stage_barriers[2 * kStages];
  // Of blocks that share a gate (dispatch.cuh), a phase for each of their token blocks: 1, the other block has stored what it
  // has of this one's logits; 1, the other block needs what it has of them no more.
  uint64_t logits_stored, dispatched;
  uint64_t send_barriers[kWarps][RowCopies::kBarriers];
  TaskRing ring;
  ReturnCursors<CursorOfWarp> returns;
  LateRows late;
  uint32_t idle_consumers;  // warps whose tasks are over
  uint32_t trace_events;
  // Former.
  Source former_sources[kMaxRanks];
  FormedExpert experts[kFormerExperts];
  // OS actor (block 0).
  Source os_sources[kMaxRanks];
  Scheduler<Platform>::Memory scheduler;
  Status seen[kMaxRanks];
  TraceStarts trace_starts;
  [[no_unique_address]] Scales<kBuild.quantised> scales;
};

static_assert(kWarps * RowCopies::kBytes <= kStages * kStageBytes);
static_assert(kWarps * RingSums<Bf16>::kBytes <= kStages * kStageBytes);
inline constexpr uint32_t kSharedOffset = kStages * kStageBytes + 2 * kStagingBytes;
static_assert(kSharedOffset + sizeof(Shared) <= kSharedBytes);

// The memory of a block's stages, once nobody there multiplies any more.
struct IdleStages {
  const Shared& s;

  __device__ __forceinline__ bool are_free() const {
    return *static_cast<const volatile uint32_t*>(&s.idle_consumers) == kConsumers * kWarpgroup / 32;
  }
  // The calling warp's own part.
  __device__ __forceinline__ uint32_t memory_of_warp(uint32_t bytes) const {
    return shared_address(&s) - kSharedOffset + thread_anew() / 32 * bytes;
  }
};

// Those of a pass whose tasks end with the stop word.
template <bool kEnds>
__device__ __forceinline__ auto stages_of_ended(const Shared& s) {
  if constexpr (kEnds) {
    return IdleStages{s};
  } else {
    return NoStages{};
  }
}

// Shared address of stage 0's scales, which lie as far behind the ring as everything does.
__device__ __forceinline__ uint32_t scales_of(const Pipeline& ring) {
  return ring.stages + kSharedOffset + static_cast<uint32_t>(offsetof(Shared, scales));
}

}  // namespace flashmoe::sm90

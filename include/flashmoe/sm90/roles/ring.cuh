// The layout of a block's shared memory, and the task ring: slots in which a clerk hands tasks to the block's loaders
// and consumers.
//
//   stages   4 x 48 KiB   the GEMM pipeline (machine/pipeline.cuh); before the first task, the gate's pipeline, scratch
//                         of dispatch, and the rows that a block sends; after the last task, rows that are summed
//   staging  2 x  8 KiB   the consumers' epilogues
//   Shared                everything else
//
// Run by clerks, loaders and consumers (warps 0 to 10): TaskRing says who arrives at each of its barriers, and how
// often.
// Reads and writes only the ring: barriers and `loaded` of the own block; clerks also write `word`, and arrive at
// barriers, of the cluster's other block. The clerk fills the slots (look_up.cuh). Nothing here touches global
// memory.
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
  uint32_t tile, column;  // tile: after the queue's stop, the group; in a router's dX, the tile of tokens
  // Whose weights the task reads, or whose gradients it sums. The shared expert's slices follow the other experts.
  uint32_t expert;
  uint32_t inner;          // where the tile's intermediate rows lie, see Call::inner_tile
  uint32_t k_bytes;        // how many bytes of each row of an operand are multiplied, in each slice
  uint32_t slices, later;  // GEMM1 of the shared expert: how many slices (else 1); the second slice's `inner`
  Share share;
  uint32_t stored;  // how many tasks that return rows the ring has had before, see TaskRing::stored
  union {
    uint32_t offsets[Wide::kTokens];  // tasks that gather: where the token rows are, see TokenRows
    uint64_t to[Wide::kTokens];       // tasks that return rows: where the results go
  };
  alignas(8) float weights[Wide::kTokens];  // by which the task multiplies each row
  union {
    // Tasks that return rows: the rows' tokens; in dX of a shared expert, the factors of its gate (floats).
    // Tasks that gather, in passes that train: the numbers under which the rows are kept.
    uint32_t tokens[Wide::kTokens];
    // Tasks that gather, in e4m3: each warpgroup's largest magnitude in each row, if it has half of a scale's columns.
    mutable float largest[kConsumers][64];
  };

  __device__ __forceinline__ Task task() const { return {kind, column, of}; }
};

// Nanoseconds that a clerk rests between two looks at barriers, because it shares its instruction scheduler, and the
// power, with consumers.
inline constexpr uint32_t kPause = 250;

// Slots go from each block's clerk to its loaders and consumers, and back. The first block of a cluster leads: its
// clerk takes tasks for both blocks, and the other block's clerk retires them for both. One clerk for both would need
// seven round trips to the L2 for each task, and be slower than the consumers are with small tasks. There are slots
// for as many small tasks as the clerk takes ahead.
struct TaskRing {
  static constexpr uint32_t kSlots = kBuild.quantised ? 4 : 5;  // quantised: Scales has the memory of one slot
  static constexpr uint32_t kLeader = 0, kFollower = 1;
  // Every lane of the consumers and loaders arrives for its own reads of the slot, because racecheck accepts no
  // arrival for another lane's reads. So the ring overtakes no lane, not even that of a loader that has nothing to
  // load.
  static constexpr uint32_t kDoneArrivals = kConsumers * kWarpgroup + kLoaders;

  // Barriers of the slots. The number is that of the arrivals of a phase; behind it stands who arrives.
  uint64_t handed[kSlots];  // 1: the leader's clerk, at the follower's barrier
  uint64_t full[kSlots];    // 32: the block's clerk, each lane for what it wrote
  uint64_t done[kSlots];    // kDoneArrivals; in the follower 1 more: the leader's clerk, for its block
  uint64_t stored[kSlots];  // 256: consumers. Not a slot's: the n-th task that returns rows has number n % kSlots
  uint64_t free[kSlots];    // 1: the follower's clerk, at the leader's barrier
  uint64_t word[kSlots];    // in the follower: the task that the leader has handed on
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
  // Called by all lanes.
  __device__ __forceinline__ void put_full(uint32_t n) { arrive(shared_address(&full[n % kSlots])); }
  __device__ __forceinline__ void put_done(uint32_t n) { arrive(shared_address(&done[n % kSlots])); }
  // n counts only tasks that return rows, because nobody waits for other tasks here, and synccheck reports a phase
  // for which nobody waits as an error.
  __device__ __forceinline__ void put_stored(uint32_t n) { arrive(shared_address(&stored[n % kSlots])); }

  // count_stage() is called by a loader thread, stages_loaded() by the clerk.
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

  // From one block's clerk to the other's. Each is called by one thread.
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
    __syncwarp();  // makes visible to every lane what one lane has acquired: a vote orders no memory
    return passed;
  }
};

// The scales of the stages, in builds for quantised rows and weights; empty in other builds.
template <bool>
struct Scales {
  StageScales stage[kStages];
};
template <>
struct Scales<false> {};

struct Shared {
  Call call;  // the kernel's argument, with the epoch that is counted in device memory
  uint64_t gate_barriers[2 * kMostGateStages], stage_barriers[2 * kStages];
  // Barriers of blocks that share a gate (shared_gate.cuh), with a phase of one arrival for each of their token
  // blocks. logits_stored: the other block has stored its share of the logits here. dispatched: the other block no
  // longer reads the logits in its own memory, so this block may store the next ones there.
  uint64_t logits_stored, dispatched;
  uint64_t send_barriers[kWarps][RowCopies::kBarriers];
  TaskRing ring;
  ReturnCursors<CursorOfWarp> returns;
  LateRows late;
  uint32_t idle_consumers;  // consumer warps whose tasks are over
  uint32_t trace_events;
  // The former's memory.
  Source former_sources[kMaxRanks];
  FormedExpert experts[kFormerExperts];
  // The OS actor's memory (block 0).
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

// The memory of a block's stages, which is free once no consumer of the block multiplies any more.
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

// IdleStages, or NoStages where nothing is summed through the stages: in backward passes, whose blocks still compute
// gradients of weights there; and in kernels that keep, trace, multiply in e4m3 or have transposed weights, in some of
// which ptxas would spill.
template <bool kTrace>
__device__ __forceinline__ auto stages_of_ended(const Shared& s) {
  if constexpr (!kIsBackward && !kTrace && !kBuild.keeps && !kBuild.quantised && !kBuild.transposed) {
    return IdleStages{s};
  } else {
    return NoStages{};
  }
}

// Shared address of stage 0's scales. Like all of Shared, they lie at a fixed distance from the stages.
__device__ __forceinline__ uint32_t scales_of(const Pipeline& ring) {
  return ring.stages + kSharedOffset + static_cast<uint32_t>(offsetof(Shared, scales));
}

}  // namespace flashmoe::sm90

// The tasks of the kernel for a few tokens (sm90/decode/alone.cuh), and the two warps of every block that load what
// tasks multiply.
//
// A unit is a few rows, each a token's choice, of one expert. A task is 128 rows of that expert's weights times the
// unit's rows.
// Warp 8, one thread: takes tasks from an atomic counter of this rank's device memory (Control::few_tickets), writes
// each to the block's list of tasks in shared memory, and has TMA load its weights to the stages, a ring of buffers in
// shared memory.
// Warp 9, all lanes (on a rank alone with weights in 16 bits, 9 and 10): has cp.async load the unit's rows to the stages. For GEMM0 these are rows of x, or rows that other
// ranks have sent to this rank's heap; for GEMM1 intermediate rows of this rank's workspace, once FewMemory's counter
// of the unit (gpu/decode_memory.h) says that all of the unit's tasks of GEMM0 are stored. (In FP8, warps 9 to 11 load
// rows by decode/rows_quantised.cuh.)
// Both use the barriers of FewPipeline, in shared memory. No output and no other rank's memory is read or written.
#pragma once

#include "flashmoe/sm90/decode/block.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90::few {

// A task multiplies 128 rows of an expert's weights by a unit's rows: in GEMM0, if there is a gate, 64 gate rows and
// their up rows; in GEMM1, 128 columns of the output. It goes along all of K. If a block has only a few of GEMM1's
// tasks, and these are long, blocks would end at very different times. Then, with weights in 16 bits, all tasks are
// halved: they have half as many rows of weights, and a stage has two k-blocks of these (halves_tasks). With weights in
// other formats, GEMM1's tasks go along a part of K each (few_parts). GEMM0's tasks come first, so that those of a unit
// are done, or nearly, when GEMM1's tasks load its intermediate rows. A block's first task is fixed, and it takes the
// next ones when it can load them, because memory serves some multiprocessors up to a third faster than others.
struct Task {
  uint32_t product, unit, tile;
  uint32_t part;  // of K

  __device__ __forceinline__ uint32_t pack() const { return product << 31 | unit << 20 | part << 16 | tile; }
  static __device__ __forceinline__ Task unpack(uint32_t word) {
    return {word >> 31, word >> 20 & 0x7ffu, word & 0xffffu, word >> 16 & 0xfu};
  }
};
inline constexpr uint32_t kNoTask = ~0u;
static_assert(kFewUnits < 0x7ff && kMostFewParts <= 0xf);  // tile: at most 2^20 columns, 64 or more each

// A task's stages, each of which has a k-block, or two if tasks are halved: the number of the first one in its row, and
// how many there are. (A row of 2^20 columns of 16 bits has 2^14, so that both numbers fit in 16 bits.)
struct Stages {
  uint32_t first, count;
};

// A task and its stages, as the warp that loads weights hands them on. So only this warp makes the divisions that they
// need.
struct Handed {
  uint32_t word, range;

  __device__ __forceinline__ Handed(const Task& task, const Stages& stages)
      : word(task.pack()), range(stages.first << 16 | stages.count) {}
  explicit __device__ __forceinline__ Handed(uint64_t packed)
      : word(static_cast<uint32_t>(packed)), range(static_cast<uint32_t>(packed >> 32)) {}
  __device__ __forceinline__ uint64_t pack() const { return uint64_t{range} << 32 | word; }
  __device__ __forceinline__ bool exists() const { return word != kNoTask; }
  __device__ __forceinline__ Task task() const { return Task::unpack(word); }
  __device__ __forceinline__ Stages stages() const { return {range >> 16, range & 0xffffu}; }
};

// Whether tasks are halved. All blocks decide alike, since all know the same units.
__device__ __forceinline__ bool halves_tasks(const Block& b) {
  // GEMM1's tasks: fewer than kTasksOfBlock for a block, and kLeastBlocks k-blocks or more.
  constexpr uint32_t kTasksOfBlock = 3, kLeastBlocks = 32;
  return kMayHalve && b.c.shape.tokens <= kHalvedRows &&
         b.routing.units * ceil_div(b.c.shape.hidden, kBoxFeatures) < kTasksOfBlock * gridDim.x &&
         b.c.shape.intermediate * element_bytes(kBuild.dtype) >= kLeastBlocks * kRowBytes;
}

template <class Dtype, bool kGated, bool kHalved>
struct Tasks {
  static constexpr uint32_t kStageBlocks = kHalved ? 2 : 1;                 // k-blocks of a stage
  static constexpr uint32_t kRows = kBoxFeatures / kStageBlocks;            // rows of weights of a task
  static constexpr uint32_t kFeatures = kRows / (kGated ? 2 : 1);           // intermediate columns of a task of GEMM0
  static constexpr uint32_t kElementBytes = Factors<Dtype>::Type::kBytes;   // of what is multiplied
  static constexpr uint32_t kMapBytes = kMxFp4<Dtype> ? 1 : kElementBytes;  // of weights, as their tensor map has them
  static constexpr uint32_t kBlockChunks = (kMxFp4<Dtype> ? 4 : 1) * kRowBytes / 16;  // of a row in a k-block

  const Block& b;

  __device__ __forceinline__ uint32_t tiles(uint32_t product) const {
    return product == 0 ? ceil_div(b.c.shape.intermediate, kFeatures) : ceil_div(b.c.shape.hidden, kRows);
  }
  __device__ __forceinline__ uint32_t parts(uint32_t product) const {
    return product == 0 || kBuild.group ? 1 : b.args.few_parts;
  }
  __device__ __forceinline__ uint32_t count() const { return b.routing.units * (tiles(0) + tiles(1) * parts(1)); }
  __device__ __forceinline__ Task task(uint32_t i) const {
    const uint32_t first = b.routing.units * tiles(0), product = i < first ? 0 : 1;
    const uint32_t at = product == 0 ? i : i - first, n = tiles(product), of_unit = n * parts(product);
    return {product, at / of_unit, at % n, at % of_unit / n};
  }
  // How many 16-byte chunks a row has along K; and the stages of a task.
  __device__ __forceinline__ uint32_t chunks(uint32_t product) const {
    return (product == 0 ? b.c.shape.hidden : b.c.shape.intermediate) * kElementBytes / 16;
  }
  __device__ __forceinline__ Stages stages(const Task& task) const {
    const uint32_t all = ceil_div(chunks(task.product), kStageBlocks * kBlockChunks), n = parts(task.product);
    if (n == 1) return {0, all};
    const uint32_t first = begin_of_part(all, task.part, n);
    return {first, begin_of_part(all, task.part + 1, n) - first};
  }
  // What a unit's counter (FewMemory::done) has reached when all of the unit's intermediate rows are stored.
  __device__ __forceinline__ uint32_t arrivals() const { return tiles(0); }
};

// A place in a ring of so many slots.
template <uint32_t kCount>
struct Slot {
  uint32_t at = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    at = at + 1 == kCount ? 0 : at + 1;
    parity ^= at == 0;
  }
};
using StageSlot = Slot<kFewStages>;
using HandedSlot = Slot<kFewTasks>;
template <uint32_t kCount>
__device__ __forceinline__ uint32_t barrier_of(const uint64_t (&barriers)[kCount], const Slot<kCount>& slot) {
  return shared_address(barriers + slot.at);
}

// How often a warp arrives at a barrier to say that others may overwrite what it has read.
inline constexpr uint32_t kWarpReleases = kBuild.racecheck ? P::kLanes : 1;

// Says that the calling warp has read what the barrier guards, so that others may overwrite it.
__device__ __forceinline__ void release(uint32_t barrier) {
  if (kWarpReleases != 1 || P::lane() == 0) arrive(barrier);
}

// One thread, before a block barrier that comes before the first task.
__device__ __forceinline__ void init_pipeline(FewPipeline& p) {
  for (uint32_t i = 0; i < kFewStages; ++i) {
    barrier_init(shared_address(&p.weights_full[i]), 1 + kFewScaleLoaders * P::kLanes);
    barrier_init(shared_address(&p.rows_full[i]), kStageLoaders * P::kLanes);
    barrier_init(shared_address(&p.empty[i]), kFewConsumers * kWarpReleases);
  }
  for (uint32_t i = 0; i < kFewTasks; ++i) {
    barrier_init(shared_address(&p.task_full[i]), 1);
    barrier_init(shared_address(&p.stored[i]), kFewConsumers);
    barrier_init(shared_address(&p.task_empty[i]),
                 (kFewConsumers + kFewRowLoaders + kFewScaleLoaders) * kWarpReleases + 1);
  }
  fence_barrier_init();
}

// Waits until a task is handed on in this slot, and returns it.
__device__ __forceinline__ Handed handed_task(const Block& b, const HandedSlot& slot) {
  wait(barrier_of(b.s.pipeline.task_full, slot), slot.parity);
  return Handed(*const_cast<volatile uint64_t*>(&b.s.pipeline.task[slot.at]));
}
// One warp: waits for the next task that is handed on, and frees its slot. After the last task, it returns one that
// does not exist (Handed::exists).
__device__ __forceinline__ Handed next_task(const Block& b, HandedSlot& slot) {
  const Handed handed = handed_task(b, slot);
  P::sync();
  release(barrier_of(b.s.pipeline.task_empty, slot));
  slot.advance();
  return handed;
}

// ---- weights --------------------------------------------------------------------------------------------------------

// The map that has the weights of a product, of the routed experts or of the shared one.
template <bool kHalved>
__device__ __forceinline__ const TensorMap* map_of(const KernelArgs& a, uint32_t product, bool shared) {
  if constexpr (kHalved) {
    if (product == 0) return shared ? &a.halved.shared_gate_up : &a.halved.gate_up;
    return shared ? &a.halved.shared_down : &a.halved.down;
  } else {
    if (product == 0) return shared ? &a.shared_gate_up : &a.gate_up;
    return shared ? &a.shared_down : &a.down;
  }
}

// Loads the weights of the task's stages [begin, end).
template <bool kHalved, class TheTasks>
__device__ __forceinline__ void load_task_weights(const Block& b, const Task& task, const Stages& stages,
                                                  uint32_t begin, uint32_t end, StageSlot& stage) {
  constexpr uint32_t kColumns = kRowBytes / TheTasks::kMapBytes;  // of a k-block, as the map has them
  FewPipeline& p = b.s.pipeline;
  const uint32_t expert = b.routing.unit_expert[task.unit];
  const bool shared = b.is_shared(expert);
  const TensorMap* const map = map_of<kHalved>(b.args, task.product, shared);
  const uint32_t matrix = shared ? expert - b.c.shape.routed_experts() : expert;
  const uint32_t group = task.tile * (task.product == 0 ? TheTasks::kFeatures : TheTasks::kRows) / kProductRows;
  for (uint32_t i = begin; i < end; ++i, stage.advance()) {
    const uint32_t full = barrier_of(p.weights_full, stage);
    wait(barrier_of(p.empty, stage), stage.parity ^ 1);
    arrive_expect_tx(full, kBoxFeatures * kRowBytes);
#pragma unroll
    for (uint32_t k = 0; k < TheTasks::kStageBlocks; ++k) {
      tma_load(shared_address(b.s.weights[stage.at]) + k * TheTasks::kRows * kRowBytes, map, full,
               ((stages.first + i) * TheTasks::kStageBlocks + k) * kColumns, 0, 0, group, matrix, kEvictFirst);
    }
  }
}

// One thread: takes tasks, hands them on and loads their weights, as far ahead as there are stages. It asks for the
// next task before it loads the last kLast stages, because the answer takes as long as to load these. It does not ask
// earlier, because a block that has not loaded its task should leave the next one to another block.
template <class Dtype, bool kGated, bool kHalved>
__device__ __forceinline__ void load_weights(const Block& b) {
  using TheTasks = Tasks<Dtype, kGated, kHalved>;
  constexpr uint32_t kLast = 4;  // stages
  const TheTasks tasks{b};
  FewPipeline& p = b.s.pipeline;
  HandedSlot handed;
  StageSlot stage;
  for (uint32_t i = blockIdx.x;; handed.advance()) {
    const bool exists = i < tasks.count();
    const Task task = tasks.task(i);
    const Stages stages = tasks.stages(task);
    wait(barrier_of(p.task_empty, handed), handed.parity ^ 1);
    p.task[handed.at] = exists ? Handed(task, stages).pack() : kNoTask;
    arrive(barrier_of(p.task_full, handed));
    if (!exists) return;
    const uint32_t before = stages.count - min_of(stages.count, kLast);
    load_task_weights<kHalved, TheTasks>(b, task, stages, 0, before, stage);
    i = gridDim.x + static_cast<uint32_t>(P::fetch_add(&b.c.control()->few_tickets.value, uint64_t{1}));
    load_task_weights<kHalved, TheTasks>(b, task, stages, before, stages.count, stage);
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Waits until the unit's intermediate rows are stored. If the call is over, it returns all the same, and the caller
// must go on loading: what it loads does not matter then, but the consumers wait for it.
__device__ __forceinline__ void wait_for_unit(const Block& b, uint32_t unit, uint32_t arrivals) {
  if (P::ballot(b.s.failed != 0) != 0) return;
  const uint32_t* const done = b.memory().done(unit);
  wait_for_blocks(
      b, [&] { return P::ballot(P::load_acquire(done, kDevice) != arrivals) == 0 ? Step::kDone : Step::kIdle; });
}

// One warp: loads its part of the rows of every task, as soon as they are there. A lane has every eighth chunk of every
// fourth row. loader: which of kStageLoaders warps it is; the first one has the first rows.
template <class Dtype, bool kGated, bool kHalved>
__device__ __forceinline__ void load_rows(const Block& b, uint32_t loader) {
  using TheTasks = Tasks<Dtype, kGated, kHalved>;
  constexpr uint32_t kMostRows = kHalved ? kHalvedRows : kUnitRows<Dtype> / kStageLoaders, kRowsApart = 4;
  constexpr uint32_t kMost = kMostRows / kRowsApart, kEights = TheTasks::kBlockChunks / 8;
  const TheTasks tasks{b};
  FewPipeline& p = b.s.pipeline;
  const uint32_t begin = loader * kMostRows, first = begin + P::lane() / 8, chunk = P::lane() % 8;
  const uint64_t pitch = b.c.intermediate_row(0, 1) - b.c.intermediate_row(0, 0);
  HandedSlot handed;
  StageSlot stage;
  while (true) {
    const Handed next = next_task(b, handed);
    if (!next.exists()) return;
    const Task task = next.task();
    const uint32_t row = b.routing.unit_first[task.unit], rows = b.routing.unit_rows[task.unit];
    if (task.product != 0) wait_for_unit(b, task.unit, tasks.arrivals());
    const uint8_t* from[kMost];
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) {
      const uint32_t r = row + min_of(first + i * kRowsApart, rows - 1);
      from[i] = task.product != 0 ? b.c.intermediate_row(0, 0) + r * pitch : b.x_row(r);
    }
    const Stages stages = next.stages();
    for (uint32_t s = 0; s < stages.count; ++s, stage.advance()) {
      const uint32_t at = (stages.first + s) * (TheTasks::kStageBlocks * TheTasks::kBlockChunks) + chunk;
      uint32_t valid[TheTasks::kStageBlocks * kEights];
#pragma unroll
      for (uint32_t c = 0; c < TheTasks::kStageBlocks * kEights; ++c) {
        valid[c] = at + 8 * c < tasks.chunks(task.product) ? 16 : 0;
      }
      const uint32_t to = shared_address(b.s.rows[stage.at]) + first * kFewRowPitch;
      wait(barrier_of(p.empty, stage), stage.parity ^ 1);
#pragma unroll
      for (uint32_t c = 0; c < TheTasks::kStageBlocks * kEights; ++c) {
        const uint32_t k_block = c / kEights * kMostRows * kFewRowPitch;
#pragma unroll
        for (uint32_t i = 0; i < kMost; ++i) {
          if (begin + i * kRowsApart >= rows) break;
          const uint32_t swizzled = 8 * (c % kEights) + (chunk ^ row_swizzle(first + i * kRowsApart));
          cp_async16_or_zero(to + k_block + i * kRowsApart * kFewRowPitch + swizzled * 16,
                             from[i] + (valid[c] != 0 ? (at + 8 * c) * 16 : 0), valid[c]);
        }
      }
      cp_async_arrive_noinc(barrier_of(p.rows_full, stage));
    }
  }
}

}  // namespace flashmoe::sm90::few

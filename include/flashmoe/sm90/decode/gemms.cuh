// The consumer warps of the kernel for a few tokens (sm90/decode/alone.cuh). They compute both GEMMs and the
// activation. On a rank that is alone, all warps then sum each token's rows.
//
// consume_tasks(): warps 0 to 7 of every block run it; each warp computes its own columns of every task. (On a rank that
// is alone, with weights in 16 bits, warpgroups multiply units of more than 16 rows.) They read stages, tasks and
// routing in shared memory, and biases in device memory. GEMM0 writes intermediate rows to this rank's workspace. GEMM1
// writes result rows, each times the weight of its choice. On a rank that is alone, they go to FewMemory
// (gpu/decode_memory.h); if GEMM1's tasks are cut into parts, the sums of the parts go there instead. In a group, result
// rows go to the return rows in the heap of the token's home, which is this rank or a peer; decode/group.cuh signals
// return rows.
// tell_of_stored(): one thread of each block runs it, of warp kFewTeller. It adds to FewMemory's counter of a unit,
// with release, so that all blocks may load the unit's rows.
// sum_rows(): all threads of a rank that is alone run it, after all blocks have met. It reads FewMemory and writes the
// output y.
#pragma once

#include "flashmoe/gpu/activate.cuh"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/sm90/decode/format.cuh"
#include "flashmoe/sm90/decode/tasks.cuh"
#include "flashmoe/sm90/machine/wgmma.cuh"

namespace flashmoe::sm90::few {

// Two neighbouring columns of a row.
template <class Dtype>
struct alignas(2 * Dtype::kBytes) Pair {
  typename Dtype::Element low, high;
};

// Multiplies kStages stages at once: while the operands of one stage are on their way from shared memory, another stage
// is multiplied. add(weights, rows) multiplies a k-block's weights by its rows, which lie at shared address `rows`.
// kHalved: a stage has two k-blocks of half the columns. Then half of the warps multiply, and the others only release
// stages.
template <class Dtype, uint32_t kStages, bool kHalved, class Add>
__device__ __forceinline__ void multiply_stages(const Block& b, StageSlot& at, Add&& add) {
  constexpr uint32_t kKBlocks = kHalved ? 2 : 1;
  FewPipeline& p = b.s.pipeline;
  const uint32_t feature = b.warp() * kBlocks * kProductRows;
  const bool multiplies = !kHalved || feature < kBoxFeatures / 2;
  StageWeights<Dtype> weights[kStages][kKBlocks];
  uint32_t from[kStages];
  StageSlot next = at;
#pragma unroll
  for (uint32_t s = 0; s < kStages; ++s, next.advance()) {
    wait(barrier_of(p.weights_full, next), next.parity);
    if (multiplies) {
#pragma unroll
      for (uint32_t k = 0; k < kKBlocks; ++k) {
        weights[s][k].load(shared_address(b.s.weights[next.at]) + k * (kBoxFeatures / kKBlocks * kRowBytes), feature);
      }
    }
    wait(barrier_of(p.rows_full, next), next.parity);
    from[s] = shared_address(b.s.rows[next.at]);
  }
  if (multiplies) {
#pragma unroll
    for (uint32_t s = 0; s < kStages; ++s) {
#pragma unroll
      for (uint32_t k = 0; k < kKBlocks; ++k) add(weights[s][k], from[s] + k * kHalvedRows * kFewRowPitch);
    }
  }
  P::sync();
#pragma unroll
  for (uint32_t s = 0; s < kStages; ++s, at.advance()) {
    release(barrier_of(p.empty, at));
  }
}

// A lane's accumulators of a wgmma of half of a task's rows of weights by a unit's rows.
using GroupSums = float[kFewStageRows / 2];

// Issues the products of stage `at` as one group of wgmmas. kFirst: they overwrite acc.
template <class Dtype, bool kFirst>
__device__ __forceinline__ void issue_stage(const Block& b, const StageSlot& at, GroupSums& acc) {
  FewPipeline& p = b.s.pipeline;
  wait(barrier_of(p.weights_full, at), at.parity);
  wait(barrier_of(p.rows_full, at), at.parity);
  fence_proxy_async_shared();  // rows were stored through the generic proxy
  wgmma_fence();
  const uint64_t weights = matrix_descriptor(shared_address(b.s.weights[at.at]) + b.warp() / 4 * (64 * kRowBytes));
  const uint64_t rows = matrix_descriptor(shared_address(b.s.rows[at.at]));
#pragma unroll
  for (uint32_t k = 0; k < kRowBytes; k += kWgmmaBytes) {
    Wgmma<Dtype, kFewStageRows>::issue(acc, weights + descriptor_step(k), rows + descriptor_step(k), !kFirst || k != 0);
  }
  wgmma_commit();
}

// Multiplies all stages of a task by wgmma, whose sums have the same bits as those of mma. A warpgroup has half of the
// task's rows of weights, and each of its warps gets the sums of the 16 rows that it has by mma too. One stage is
// multiplied while the next one is awaited. The products are always of as many rows as a stage has room for, and what
// lies behind the unit's rows is only in sums that nobody stores. (With a copy of the code for fewer rows, ptxas has too
// few registers to let wgmmas run on, C7511: 512 tokens of Qwen3-30B-A3B take 353 us instead of 333.)
template <class Dtype>
__device__ __forceinline__ void multiply_by_groups(const Block& b, uint32_t stages, StageSlot& at, Sums<Dtype>& sums) {
  GroupSums acc;
  issue_stage<Dtype, true>(b, at, acc);
  uint32_t in_flight = barrier_of(b.s.pipeline.empty, at);
  at.advance();
#pragma unroll 1
  for (uint32_t s = 1; s < stages; ++s) {
    issue_stage<Dtype, false>(b, at, acc);
    wgmma_wait<1>();
    release(in_flight);
    in_flight = barrier_of(b.s.pipeline.empty, at);
    at.advance();
  }
  wgmma_wait<0>();
  pin_accumulators(acc);
  release(in_flight);
  sums.set(acc);
}

// Multiplies all stages of a task, as many k-blocks at a time as the Format asks for.
template <class Dtype, bool kHalved>
__device__ __forceinline__ void multiply(const Block& b, uint32_t rows, uint32_t stages, StageSlot& at,
                                         Sums<Dtype>& sums) {
  if constexpr (kAloneIn16Bits && !kHalved) {
    if (rows > kMmaRows<Dtype>) return multiply_by_groups<Dtype>(b, stages, at, sums);
  }
  auto all_stages = [&]<uint32_t kKBlocks>(Count<kKBlocks>, auto&& add) {
    constexpr uint32_t kAtOnce = kHalved ? kKBlocks / 2 : kKBlocks;
#pragma unroll 1
    for (; stages >= kAtOnce; stages -= kAtOnce) multiply_stages<Dtype, kAtOnce, kHalved>(b, at, add);
    if (kAtOnce > 1 && stages != 0) multiply_stages<Dtype, 1, kHalved>(b, at, add);
  };
  Format<Dtype>::multiply(b, rows, all_stages, sums);
}

// The biases of a lane's sums of a task: of two neighbouring columns in each of the warp's two blocks of eight rows of
// weights.
template <class Dtype, bool kGated>
struct TaskBiases {
  float of[kBlocks][2];

  __device__ __forceinline__ void load(const Block& b, const Task& task, uint32_t expert, uint32_t column) {
    const bool halves = kGated && task.product == 0;
    const uint32_t columns = task.product == 0 ? b.c.shape.intermediate : b.c.shape.hidden;
    const void* const all = task.product == 0 ? b.args.gate_up_bias : b.args.down_bias;
    const GatedRows gated = b.is_shared(expert) ? b.args.shared_gated : b.args.gated;
    const uint32_t first = expert * columns * (halves ? 2 : 1);
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t at = column + j + (halves ? 0 : i * kProductRows);
        of[i][j] = bias_at<Dtype>(all, first + (halves ? at * gated.step + i * gated.up : at), at < columns);
      }
    }
  }
};

// ---- GEMM0: intermediate rows ---------------------------------------------------------------------------------------

// Stores what a lane has of an intermediate row: two sums in each of its two blocks. With a gate, the first block has
// gates and the second their ups; without one, the blocks have different columns.
template <class Dtype, Activation kActivation, class Biases>
__device__ __forceinline__ void store_intermediate(const Block& b, const Biases& biases, uint32_t column, uint32_t row,
                                                   const float (&sums)[kBlocks][2]) {
  const float scale = b.args.weights_on_input != 0 ? b.routing.weights[b.routing.choice[row]] : 1.0f;
  using To = Inner<Dtype>;
  auto* const to = reinterpret_cast<typename To::Element*>(b.inner_row<Dtype>(row));
  auto biased = [&](uint32_t i, uint32_t j) { return __fmul_rn(sums[i][j], scale) + biases.of[i][j]; };
  if constexpr (is_gated(kActivation)) {
    if (column >= b.c.shape.intermediate) return;
    float low = biased(0, 0), high = biased(0, 1);
    const float low_up = biased(1, 0), high_up = biased(1, 1);
    activate_pair<Dtype, kActivation>(low, high, b.args.clamped);
    *reinterpret_cast<Pair<To>*>(to + column) = {To::narrow(low * shaped_up<kActivation>(low_up, b.args.clamped)),
                                                 To::narrow(high * shaped_up<kActivation>(high_up, b.args.clamped))};
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i, column += kProductRows) {
      if (column >= b.c.shape.intermediate) return;
      float low = biased(i, 0), high = biased(i, 1);
      activate_pair<Dtype, kActivation>(low, high, b.args.clamped);
      *reinterpret_cast<Pair<To>*>(to + column) = {To::narrow(low), To::narrow(high)};
    }
  }
}

// A warp has stored its columns of the task in this slot.
__device__ __forceinline__ void announce_stored(const Block& b, const HandedSlot& slot) {
  P::sync();
  if (P::lane() == 0) arrive(barrier_of(b.s.pipeline.stored, slot));
}

// One thread: tells all blocks of each task of GEMM0 that is stored. A warp of its own does this, because a release
// waits until all earlier stores are in the L2, which takes 1.5 us if memory is busy. A consumer warp would keep its
// stages for that time.
__device__ __forceinline__ void tell_of_stored(const Block& b) {
  FewPipeline& p = b.s.pipeline;
  for (HandedSlot slot;; slot.advance()) {
    const Handed handed = handed_task(b, slot);
    if (!handed.exists()) return;
    // GEMM0's tasks come first. So as long as a slot gets such tasks, it gets one in every round, and the parity of its
    // round is that of `stored`, too.
    if (const Task task = handed.task(); task.product == 0) {
      wait(barrier_of(p.stored, slot), slot.parity);
      P::add_release(b.memory().done(task.unit), 1u);
    }
    arrive(barrier_of(p.task_empty, slot));
  }
}

// ---- GEMM1: weighted rows -------------------------------------------------------------------------------------------

template <class Dtype, class Biases>
__device__ __forceinline__ void store_weighted(const Block& b, const Biases& biases, uint32_t column, uint32_t row,
                                               const float (&sums)[kBlocks][2]) {
  const float weight = b.args.weights_on_input != 0 ? 1.0f : b.routing.weights[b.routing.choice[row]];
  auto* const to = reinterpret_cast<typename Dtype::Element*>(b.result_row(row));
#pragma unroll
  for (uint32_t i = 0; i < kBlocks; ++i, column += kProductRows) {
    if (column >= b.c.shape.hidden) return;
    const float low = sums[i][0] + biases.of[i][0], high = sums[i][1] + biases.of[i][1];
    *reinterpret_cast<Pair<Dtype>*>(to + column) = {Dtype::narrow(low * weight), Dtype::narrow(high * weight)};
  }
}

// Stores a row's sums over one part of the intermediate columns, in fp32, without bias and weight.
__device__ __forceinline__ void store_part(const Block& b, uint32_t part, uint32_t column, uint32_t row,
                                           const float (&sums)[kBlocks][2]) {
  float* const to = b.memory().part(part, b.routing.rows, row);
#pragma unroll
  for (uint32_t i = 0; i < kBlocks; ++i, column += kProductRows) {
    if (column < b.c.shape.hidden) *reinterpret_cast<float2*>(to + column) = {sums[i][0], sums[i][1]};
  }
}

// The consumer warps: each computes its own features of every task.
template <class Dtype, Activation kActivation, bool kHalved, class Trace>
__device__ __forceinline__ void consume_tasks(const Block& b, const Trace& trace) {
  constexpr bool kGated = is_gated(kActivation);
  using TheTasks = Tasks<Dtype, kGated, kHalved>;
  using TaskRowScales = typename Format<Dtype>::template RowScales<kGated>;
  constexpr uint32_t kMultiplying = kFewConsumers / TheTasks::kStageBlocks;  // warps
  const TheTasks tasks{b};
  HandedSlot handed;
  StageSlot at;
  trace.begin();
  while (true) {
    const HandedSlot slot = handed;
    const Handed next = next_task(b, handed);
    trace.end(Phase::kWait, blockIdx.x, 0);
    if (!next.exists()) return;
    const Task task = next.task();
    const uint32_t expert = b.routing.unit_expert[task.unit], first = b.routing.unit_first[task.unit];
    const uint32_t rows = b.routing.unit_rows[task.unit];
    Sums<Dtype> sums;
    const uint32_t features = task.product == 0 ? TheTasks::kFeatures : TheTasks::kRows;
    const uint32_t column = task.tile * features + b.warp() * (features / kMultiplying) + sums.first_row();
    const TaskRowScales scales{b, task, column};
    // Biases come from device memory, as weights do. So they are loaded while the stages are multiplied. (In FP8 there
    // are no registers for this, and they are loaded afterwards.)
    TaskBiases<Dtype, kGated> biases;
    if constexpr (!kQuantised<Dtype>) biases.load(b, task, expert, column);
    multiply<Dtype, kHalved>(b, rows, next.stages().count, at, sums);
    if constexpr (kQuantised<Dtype>) biases.load(b, task, expert, column);
    sums.finish(b.warp() < kMultiplying ? rows : 0, [&](uint32_t t, const float (&sum)[kBlocks][2]) {
      scales.scale(sum, [&](const auto& scaled) {
        if (task.product == 0) {
          store_intermediate<Dtype, kActivation>(b, biases, column, first + t, scaled);
        } else if (tasks.parts(1) > 1) {
          store_part(b, task.part, column, first + t, scaled);
        } else {
          store_weighted<Dtype>(b, biases, column, first + t, scaled);
        }
      });
    });
    if (task.product == 0) announce_stored(b, slot);
    trace.end_product(task.product == 0 ? Product<kFirst>::kPhase : Product<kReturning>::kPhase, task.unit, task.tile,
                      expert);
  }
}

// ---- the sums over k ------------------------------------------------------------------------------------------------

// Adds 16 bytes of a choice's row to a token's sum. The row is made of its parts, and then gets bias, weight and
// rounding as in store_weighted(), in the same order.
template <class Dtype>
__device__ __forceinline__ void add_parts(const Block& b, uint32_t choice, uint32_t chunk,
                                          float (&sum)[16 / Dtype::kBytes]) {
  constexpr uint32_t kElements = 16 / Dtype::kBytes;
  const uint32_t row = b.routing.row[choice];
  if (row == kDropped) return;
  float of_row[kElements] = {};
#pragma unroll 4
  for (uint32_t part = 0; part < b.args.few_parts; ++part) {
    const auto* const from = reinterpret_cast<const uint8_t*>(b.memory().part(part, b.routing.rows, row));
#pragma unroll
    for (uint32_t j = 0; j < kElements / 4; ++j) {
      const uint4 piece = load_once(from + (chunk * (kElements / 4) + j) * 16);
      of_row[4 * j] += __uint_as_float(piece.x);
      of_row[4 * j + 1] += __uint_as_float(piece.y);
      of_row[4 * j + 2] += __uint_as_float(piece.z);
      of_row[4 * j + 3] += __uint_as_float(piece.w);
    }
  }
  const float weight = b.args.weights_on_input != 0 ? 1.0f : b.routing.weights[choice];
  const uint32_t bias = static_cast<uint32_t>(b.routing.ids[choice]) * b.c.shape.hidden + chunk * kElements;
#pragma unroll
  for (uint32_t k = 0; k < kElements; ++k) {
    sum[k] += Dtype::widen(Dtype::narrow((of_row[k] + bias_at<Dtype>(b.args.down_bias, bias + k, true)) * weight));
  }
}

template <class Dtype>
__device__ __forceinline__ void add_rows(const Block& b, uint32_t token, uint32_t chunk,
                                         float (&sum)[16 / Dtype::kBytes]) {
  constexpr uint32_t kAtOnce = 8;
  const uint32_t n = b.args.few_choices;
  const uint64_t pitch = b.memory().row(1) - b.memory().row(0);
  const uint8_t* const rows = b.memory().row(0) + chunk * 16;
#pragma unroll 1
  for (uint32_t p = token * n; p < (token + 1) * n; p += kAtOnce) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t row = p + k < (token + 1) * n ? b.routing.row[p + k] : kDropped;
      pieces[k] = uint4{};
      if (row != kDropped) pieces[k] = load_once(rows + row * pitch);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) Dtype::accumulate(sum, pieces[k]);
  }
}

// All warps of all blocks, when all rows are stored: sum each token's rows. A lane makes 16 bytes of an output row at a
// time.
template <class Dtype>
__device__ __forceinline__ void sum_rows(const Block& b) {
  constexpr uint32_t kElements = 16 / Dtype::kBytes;
  const uint32_t chunks = b.c.shape.hidden / kElements, n = b.args.few_choices;
  const uint32_t first = (blockIdx.x + gridDim.x * b.warp()) * P::kLanes + P::lane();
  for (uint32_t i = first; i < chunks * b.c.shape.tokens; i += gridDim.x * kFewThreads) {
    const uint32_t token = i / chunks, chunk = i % chunks;
    float sum[kElements] = {};
    if (b.routing.ids[token * n] == ExpertId::kBad) {
      reinterpret_cast<uint4*>(b.args.out)[i] = filled_chunk<Dtype>(true);
      continue;
    }
    if (b.args.few_parts == 1) {
      add_rows<Dtype>(b, token, chunk, sum);
    } else {
      for (uint32_t p = token * n; p < (token + 1) * n; ++p) add_parts<Dtype>(b, p, chunk, sum);
    }
    reinterpret_cast<uint4*>(b.args.out)[i] = Dtype::round(sum);
  }
}

}  // namespace flashmoe::sm90::few

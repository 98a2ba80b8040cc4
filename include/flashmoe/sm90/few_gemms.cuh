// The consumers of the kernel for a few tokens (sm90/few.cuh): products, activations, weighted rows, and sums over k.
#pragma once

#include "flashmoe/gpu/activate.cuh"
#include "flashmoe/sm90/few_tasks.cuh"

namespace flashmoe::sm90::few {

// Two neighbouring columns of a row.
template <class Dtype>
struct alignas(2 * Dtype::kBytes) Pair {
  typename Dtype::Element low, high;
};

// A warp has 16 of a task's 128 rows of weights, two blocks of eight.
inline constexpr uint32_t kBlocks = 2;

// The two chunks of a stage's k-block that a lane has, of a row: swizzled so that lanes that read together meet in no bank.
inline constexpr uint32_t kChunks = 2;
__device__ __forceinline__ uint4 load_chunk(uint32_t stage, uint32_t row, uint32_t j) {
  const uint32_t chunk = P::lane() % 4 * kChunks + j;
  return load_shared16(stage + row * kRowBytes + (chunk ^ row % 8) * 16);
}

// Where a consumer warp is in the two rings.
struct Place {
  Slot weights{kFewStages}, rows;
};

// kStages stages at once: while one's operands are on their way from shared memory, another's are multiplied.
template <class Dtype, uint32_t kStages>
__device__ __forceinline__ void multiply_stages(const Block& b, uint32_t rows, Place& at,
                                                Products<Dtype, kBlocks>& sums) {
  FewPipeline& p = b.s.pipeline;
  const uint32_t feature = b.warp() * kBlocks * kProductRows + P::lane() / 4, stage_bytes = stage_rows(b) * kRowBytes;
  uint4 weights[kBlocks][kStages * kChunks];
  uint32_t from[kStages];
  Place next = at;
#pragma unroll
  for (uint32_t s = 0; s < kStages; ++s, next.weights.advance(), next.rows.advance()) {
    wait(barrier_of(p.weights_full, next.weights), next.weights.parity);
    const uint32_t stage = shared_address(b.s.weights) + next.weights.at * kFewStageBytes;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kChunks; ++j) {
        weights[i][s * kChunks + j] = load_chunk(stage, feature + i * kProductRows, j);
      }
    }
    wait(barrier_of(p.rows_full, next.rows), next.rows.parity);
    from[s] = shared_address(b.s.rows) + next.rows.at * stage_bytes;
  }
  sums.add(weights, rows, [&](uint32_t t, uint32_t j) { return load_chunk(from[j / kChunks], t, j % kChunks); });
  P::sync();
#pragma unroll
  for (uint32_t s = 0; s < kStages; ++s, at.weights.advance(), at.rows.advance()) {
    if (P::lane() != 0) continue;
    arrive(barrier_of(p.weights_empty, at.weights));
    arrive(barrier_of(p.rows_empty, at.rows));
  }
}

template <class Dtype>
__device__ __forceinline__ void multiply(const Block& b, uint32_t rows, uint32_t stages, Place& at,
                                         Products<Dtype, kBlocks>& sums) {
#pragma unroll 1
  for (; stages >= 2; stages -= 2) multiply_stages<Dtype, 2>(b, rows, at, sums);
  if (stages != 0) multiply_stages<Dtype, 1>(b, rows, at, sums);
}

// ---- GEMM0: intermediate rows ---------------------------------------------------------------------------------------

// Two values of a row with their biases, of weight rows `first` and `second`.
template <class Dtype>
__device__ __forceinline__ void scale_and_bias(const KernelArgs& args, float scale, uint32_t first, uint32_t second,
                                               float& a, float& b) {
  a = a * scale + bias_at<Dtype>(args.gate_up_bias, first, true);
  b = b * scale + bias_at<Dtype>(args.gate_up_bias, second, true);
}

// A block's two sums of a row: gates and ups are different blocks, else blocks are of different columns.
template <class Dtype, Activation kActivation>
__device__ __forceinline__ void store_intermediate(const Block& b, uint32_t expert, uint32_t column, uint32_t row,
                                                   const float (&sums)[kBlocks][2]) {
  constexpr bool kGated = is_gated(kActivation);
  const bool shared = b.is_shared(expert);
  const uint32_t biases = expert * b.c.shape.intermediate * (kGated ? 2 : 1);
  const float scale = b.args.weights_on_input != 0 ? b.routing.weights[b.routing.choice[row]] : 1.0f;
  auto* const to = reinterpret_cast<typename Dtype::Element*>(b.c.intermediate_row(0, row));
  if constexpr (kGated) {
    if (column >= b.c.shape.intermediate) return;
    const GatedRows at = shared ? b.args.shared_gated : b.args.gated;
    float low = sums[0][0], high = sums[0][1], low_up = sums[1][0], high_up = sums[1][1];
    const uint32_t gate = biases + column * at.step;
    scale_and_bias<Dtype>(b.args, scale, gate, gate + at.step, low, high);
    scale_and_bias<Dtype>(b.args, scale, gate + at.up, gate + at.step + at.up, low_up, high_up);
    activate_pair<Dtype, kActivation>(low, high, b.args.clamped);
    *reinterpret_cast<Pair<Dtype>*>(to + column) = {
        Dtype::narrow(low * shaped_up<kActivation>(low_up, b.args.clamped)),
        Dtype::narrow(high * shaped_up<kActivation>(high_up, b.args.clamped))};
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i, column += kProductRows) {
      if (column >= b.c.shape.intermediate) return;
      float low = sums[i][0], high = sums[i][1];
      scale_and_bias<Dtype>(b.args, scale, biases + column, biases + column + 1, low, high);
      activate_pair<Dtype, kActivation>(low, high, b.args.clamped);
      *reinterpret_cast<Pair<Dtype>*>(to + column) = {Dtype::narrow(low), Dtype::narrow(high)};
    }
  }
}

// ---- GEMM1: weighted rows -------------------------------------------------------------------------------------------

template <class Dtype>
__device__ __forceinline__ void store_weighted(const Block& b, uint32_t expert, uint32_t column, uint32_t row,
                                               const float (&sums)[kBlocks][2]) {
  const float weight = b.args.weights_on_input != 0 ? 1.0f : b.routing.weights[b.routing.choice[row]];
  auto* const to = reinterpret_cast<typename Dtype::Element*>(b.c.few_row(row));
#pragma unroll
  for (uint32_t i = 0; i < kBlocks; ++i, column += kProductRows) {
    if (column >= b.c.shape.hidden) return;
    const uint32_t bias = expert * b.c.shape.hidden + column;
    const float low = sums[i][0] + bias_at<Dtype>(b.args.down_bias, bias, true);
    const float high = sums[i][1] + bias_at<Dtype>(b.args.down_bias, bias + 1, true);
    *reinterpret_cast<Pair<Dtype>*>(to + column) = {Dtype::narrow(low * weight), Dtype::narrow(high * weight)};
  }
}

// The consumer warps, each its features of every task.
template <class Dtype, Activation kActivation, class Trace>
__device__ __forceinline__ void consume_tasks(const Block& b, const Trace& trace) {
  using TheTasks = Tasks<Dtype, is_gated(kActivation)>;
  const TheTasks tasks{b};
  FewPipeline& p = b.s.pipeline;
  Slot handed{kFewTasks};
  Place at{.rows = first_rows(b)};
  const uint32_t q = P::lane() % 4;
  while (true) {
    const uint32_t word = next_task(b, handed);
    P::sync();
    if (P::lane() == 0) arrive(barrier_of(p.task_empty, handed));
    handed.advance();
    if (word == kNoTask) return;
    const Task task = Task::unpack(word);
    trace.begin();
    const uint32_t expert = b.routing.unit_expert[task.unit], first = b.routing.unit_first[task.unit];
    const uint32_t rows = b.routing.unit_rows[task.unit];
    Products<Dtype, kBlocks> sums;
    multiply<Dtype>(b, rows, tasks.stages(task.product), at, sums);
    if (task.product == 0) {
      const uint32_t column =
          task.tile * TheTasks::kFeatures + b.warp() * (TheTasks::kFeatures / kFewConsumers) + 2 * q;
      sums.finish(rows, [&](uint32_t t, const float (&sum)[kBlocks][2]) {
        store_intermediate<Dtype, kActivation>(b, expert, column, first + t, sum);
      });
      P::sync();
      if (P::lane() == 0) P::fetch_add_acq_rel(b.c.few_done(task.unit), 1u);
    } else {
      const uint32_t column = task.tile * kBoxFeatures + b.warp() * kBlocks * kProductRows + 2 * q;
      sums.finish(rows, [&](uint32_t t, const float (&sum)[kBlocks][2]) {
        store_weighted<Dtype>(b, expert, column, first + t, sum);
      });
    }
    trace.end(task.product == 0 ? Product<kFirst>::kPhase : Product<kReturning>::kPhase, task.unit, task.tile);
  }
}

// ---- the sums over k ------------------------------------------------------------------------------------------------

// All warps of all blocks, when all weighted rows are stored: 16 bytes of an output row are a lane's job.
template <class Dtype>
__device__ __forceinline__ void sum_rows(const Block& b) {
  constexpr uint32_t kElements = 16 / Dtype::kBytes, kAtOnce = 8;
  const uint32_t chunks = b.c.shape.hidden / kElements, n = b.args.few_choices;
  const uint64_t pitch = b.c.few_row(1) - b.c.few_row(0);
  const uint32_t first = (blockIdx.x + gridDim.x * b.warp()) * P::kLanes + P::lane();
  for (uint32_t i = first; i < chunks * b.c.shape.tokens; i += gridDim.x * kFewThreads) {
    const uint32_t token = i / chunks, chunk = i % chunks;
    const uint8_t* const rows = b.c.few_row(0) + chunk * 16;
    float sum[kElements] = {};
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
    reinterpret_cast<uint4*>(b.args.out)[i] = Dtype::round(sum);
  }
}

}  // namespace flashmoe::sm90::few

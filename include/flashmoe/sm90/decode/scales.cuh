// The scales of a task's weights in the kernel for a few tokens (sm90/decode/alone.cuh): where the scales of an expert
// lie, for e4m3 and mxfp4, and how those of e4m3 are read.
//
// Lanes of warps that multiply or load rows run it, each for itself. They read the caller's scales in device memory, to
// registers.
#pragma once

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/decode/tasks.cuh"

namespace flashmoe::sm90::few {

// Those of the task's expert, fp32 of e4m3 or e8m0 of mxfp4. A slice of the shared expert is some rows of its gate_up, but
// some columns of its down: there the matrix is one, and the slice begins some k-blocks further on.
template <class Scale>
struct ExpertScales {
  static constexpr uint32_t kColumns = std::is_same_v<Scale, float> ? kScaleBlock : kMxFp4Block;  // of a block
  const ScaleTable& table;
  const Scale* first;

  __device__ __forceinline__ ExpertScales(const Block& b, const Task& task)
      : table(table_of(b, task)), first(table.as<Scale>()) {
    const uint32_t expert = b.routing.unit_expert[task.unit];
    const bool shared = b.is_shared(expert);
    const uint32_t matrix = shared ? expert - b.c.shape.routed_experts() : expert;
    if (shared && task.product != 0) {
      first += matrix * (b.c.shape.intermediate / kColumns) * table.step;
    } else {
      first += uint64_t{matrix} * table.expert;
    }
  }

 private:
  static __device__ __forceinline__ const ScaleTable& table_of(const Block& b, const Task& task) {
    const KernelArgs& a = b.args;
    const bool shared = b.is_shared(b.routing.unit_expert[task.unit]);
    if (task.product == 0) return shared ? a.shared_gate_up_scale : a.gate_up_scale;
    return shared ? a.shared_down_scale : a.down_scale;
  }
};

// Of two blocks of rows: the first one's, of the first k-block. Null: each row of weights has one.
struct TaskScales {
  const float* first;
  uint32_t second;  // to the other block's
  uint32_t step;    // to the next k-block's
};

// What the products of a task's two blocks of eight rows are multiplied by, k-block by k-block. A task's 128 rows lie in one
// block of scales, but for gates and ups that lie one behind the other: then the second block is of ups.
template <bool kGated>
__device__ __forceinline__ TaskScales scales_of(const Block& b, const Task& task) {
  if (b.args.scales_by_row != 0) return {nullptr, 0, 0};
  const ExpertScales<float> of{b, task};
  if (kGated && task.product == 0 && b.args.gated.step == 1) {
    return {of.first + task.tile / 2 * of.table.row, of.table.up, of.table.step};
  }
  return {of.first + task.tile * of.table.row, 0, of.table.step};
}

// What a lane's sums of a task are multiplied by in the end, where each row of weights has a scale: of two neighbouring
// columns in both blocks, of which `column` is the first.
template <bool kGated>
struct RowScales {
  float of[kBlocks][2];

  __device__ __forceinline__ RowScales(const Block& b, const Task& task, uint32_t column) {
    const bool by_row = b.args.scales_by_row != 0;
    const ExpertScales<float> expert{b, task};
    const bool halves = kGated && task.product == 0;
    const uint32_t columns = task.product == 0 ? b.c.shape.intermediate : b.c.shape.hidden;
    const GatedRows gated = b.is_shared(b.routing.unit_expert[task.unit]) ? b.args.shared_gated : b.args.gated;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint32_t at = halves ? column : column + i * kProductRows;
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t row = halves ? (at + j) * gated.step + i * gated.up : at + j;
        of[i][j] = by_row && at < columns ? expert.first[row] : 1.0f;
      }
    }
  }
  // Calls store(sums) with the lane's sums of a row, scaled.
  template <class Store>
  __device__ __forceinline__ void scale(const float (&sums)[kBlocks][2], Store&& store) const {
    float scaled[kBlocks][2];
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) scaled[i][j] = sums[i][j] * of[i][j];
    }
    store(scaled);
  }
};

}  // namespace flashmoe::sm90::few

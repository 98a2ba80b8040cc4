// The scales of a task's weights in the kernel for a few tokens (sm90/decode/alone.cuh): where the scales of an expert
// lie, for e4m3 and mxfp4, and how those of e4m3 are read.
//
// Lanes of warps that multiply or load rows run it, each for itself. They read the caller's scales in device memory, to
// registers.
#pragma once

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/decode/tasks.cuh"

namespace flashmoe::sm90::few {

// The scales of the task's expert: fp32 for e4m3, e8m0 for mxfp4. A slice of the shared expert is some rows of the
// shared gate_up matrix, but some columns of the shared down matrix. In the down matrix, therefore, the slice's scales
// begin some blocks along K after those of the matrix.
template <class Scale>
struct ExpertScales {
  static constexpr uint32_t kColumns = std::is_same_v<Scale, float> ? kScaleBlock : kMxFp4Block;  // that share a scale
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

// Where the scales of a warp's two blocks of eight rows of weights lie. first: the first block's, of the first k-block;
// null if each row of weights has a scale.
struct TaskScales {
  const float* first;
  uint32_t second;  // from there to the second block's
  uint32_t step;    // from one k-block's to the next one's
};

// The scales that the products of a warp's two blocks of eight rows are multiplied by, k-block by k-block. A task's 128
// rows have one scale for each k-block, unless all gates lie before all ups: then gates, in the first block, have one
// scale, and ups, in the second block, have another.
template <bool kGated>
__device__ __forceinline__ TaskScales scales_of(const Block& b, const Task& task) {
  if (b.args.scales_by_row != 0) return {nullptr, 0, 0};
  const ExpertScales<float> of{b, task};
  if (kGated && task.product == 0 && b.args.gated.step == 1) {
    return {of.first + task.tile / 2 * of.table.row, of.table.up, of.table.step};
  }
  return {of.first + task.tile * of.table.row, 0, of.table.step};
}

// If each row of weights has a scale: the scales that a lane's finished sums of a task are multiplied by. They are of
// two neighbouring columns in each of the two blocks. `column` is the first of these columns.
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

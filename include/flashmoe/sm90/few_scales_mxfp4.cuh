// The warp that loads the scales of weights in mxfp4 beside these, in the kernel for a few tokens (sm90/few.cuh).
//
// Of a row they are K / 32 bytes, and the next row's follow: they begin anywhere, which the copy engine does not take. A
// stage has eight of a row, and these lie in three words, wherever they begin. So words are copied, and behind them is
// where in the first they begin (StageScaleRow).
#pragma once

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/few_scales.cuh"

namespace flashmoe::sm90::few {

// Four lanes have a row, a warp eight rows at a time: those that lie together in a stage.
template <class Dtype, bool kGated>
class StageScaleLoader {
 public:
  __device__ __forceinline__ StageScaleLoader(const Block& block, const Task& task, const Stages& all)
      : b(block), stages(all) {
    const ExpertScales<uint8_t> expert{b, task};
    const bool halves = kGated && task.product == 0;
    const uint32_t columns = task.product == 0 ? b.c.shape.intermediate : b.c.shape.hidden;
    const uint32_t first = task.tile * (task.product == 0 ? Tasks<Dtype, kGated>::kFeatures : kBoxFeatures);
    const GatedRows gated = b.is_shared(b.routing.unit_expert[task.unit]) ? b.args.shared_gated : b.args.gated;
    const auto begin = reinterpret_cast<uint64_t>(expert.first);
    words = reinterpret_cast<const uint8_t*>(begin / 4 * 4);
    own = ceil_div(task.product == 0 ? b.c.shape.hidden : b.c.shape.intermediate, kMxFp4Block);
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      const uint32_t column = first + (halves ? g / 2 : g) * kProductRows + P::lane() / 4;
      const uint32_t row = halves ? column * gated.step + g % 2 * gated.up : column;
      at[g] = column < columns ? static_cast<uint32_t>(begin % 4) + row * expert.table.row : kOutside;
    }
  }

  // Stage s of the task, once it is empty.
  __device__ __forceinline__ void load(const StageSlot& slot, uint32_t s) const {
    const uint32_t full = barrier_of(b.s.pipeline.weights_full, slot), word = P::lane() % 4;
    uint8_t* const to = b.s.weights[slot.at] + kFewWeightScalesAt + P::lane() * 4;
    const uint32_t block = (stages.first + s) * kStageBlocks;
    wait(barrier_of(b.s.pipeline.empty, slot), slot.parity ^ 1);
    if (word == StageScaleRow::kWords) {
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) *reinterpret_cast<uint32_t*>(to + g * kGroupBytes) = at[g] % 4 * 8;
      arrive(full);
      return;
    }
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      // Bytes from the word on that are the row's: it ends within the word, or before.
      const int32_t left = static_cast<int32_t>(own - block + at[g] % 4) - static_cast<int32_t>(word * 4);
      const bool outside = at[g] == kOutside || left <= 0;
      cp_async4_or_zero(shared_address(to + g * kGroupBytes), words + (outside ? 0 : at[g] / 4 * 4 + block + word * 4),
                        outside ? 0 : min_of(left, 4));
    }
    cp_async_arrive_noinc(full);
  }

 private:
  static constexpr uint32_t kStageBlocks = kRowBytes / 16, kGroups = kBoxFeatures / kProductRows;
  static constexpr uint32_t kGroupBytes = kProductRows * sizeof(StageScaleRow);
  static constexpr uint32_t kOutside = ~0u;

  const Block& b;
  const Stages stages;
  const uint8_t* words;  // that in which the expert's scales begin, and those that follow
  uint32_t at[kGroups];  // behind it: where the lane's rows' begin
  uint32_t own;          // of a row
};

template <class Dtype, bool kGated>
__device__ __forceinline__ void load_scales(const Block& b) {
  const Tasks<Dtype, kGated> tasks{b};
  HandedSlot handed;
  StageSlot slot;
  while (true) {
    const uint32_t word = next_task(b, handed);
    if (word == kNoTask) return;
    const Task task = Task::unpack(word);
    const Stages stages = tasks.stages(task);
    const StageScaleLoader<Dtype, kGated> loader{b, task, stages};
    for (uint32_t s = 0; s < stages.count; ++s, slot.advance()) loader.load(slot, s);
  }
}

}  // namespace flashmoe::sm90::few

// The warps that load the scales of weights in mxfp4, in the kernel for a few tokens (sm90/decode/alone.cuh).
//
// Warps 10 and 11 run it, each for half of a stage's rows. They read the caller's scales in device memory. They store
// them behind the weights of the stages in shared memory.
//
// A row of weights has K / 32 bytes of scales, and the next row's scales follow at once. So a row's scales may begin at
// any byte, which TMA does not accept. A stage needs eight scales of a row, and these lie in three words, wherever they
// begin. So these words are copied, and behind them is stored at which bit the scales begin (StageScaleRow).
#pragma once

#include "flashmoe/gpu/mxfp4.cuh"
#include "flashmoe/sm90/decode/scales.cuh"

namespace flashmoe::sm90::few {

// Four lanes load the scales of a row. So a warp loads those of eight rows at a time, which lie together in a stage: an
// "eight". Each warp has the same number of eights. In all even eights, the scales of a lane's row begin at the same
// byte of a word, and so they do in all odd eights, because these rows are multiples of eight apart.
template <class Dtype, bool kGated>
class StageScaleLoader {
 public:
  // loader: this warp's number among those that load scales.
  __device__ __forceinline__ StageScaleLoader(const Block& block, const Task& task, const Stages& all, uint32_t loader)
      : b(block), stages(all), to(loader * kEights * kEightBytes + P::lane() * 4) {
    const ExpertScales<uint8_t> expert{b, task};
    const bool halves = kGated && task.product == 0;
    const uint32_t columns = task.product == 0 ? b.c.shape.intermediate : b.c.shape.hidden;
    const uint32_t first = task.tile * (task.product == 0 ? Tasks<Dtype, kGated, false>::kFeatures : kBoxFeatures);
    const GatedRows gated = b.is_shared(b.routing.unit_expert[task.unit]) ? b.args.shared_gated : b.args.gated;
    const auto begin = reinterpret_cast<uint64_t>(expert.first);
    words = reinterpret_cast<const uint8_t*>(begin / 4 * 4);
    own = ceil_div(task.product == 0 ? b.c.shape.hidden : b.c.shape.intermediate, kMxFp4Block);
#pragma unroll
    for (uint32_t g = 0; g < kEights; ++g) {
      uint32_t eight = loader * kEights + g;
      auto column_of = [&] { return first + (halves ? eight / 2 : eight) * kProductRows + P::lane() / 4; };
      // For an eight that lies beyond the last column, loads the scales of one of the first two eights once more,
      // because no result uses them. (The columns are a multiple of eight.)
      if (column_of() >= columns) eight %= 2;
      const uint32_t column = column_of();
      const uint32_t row = halves ? column * gated.step + eight % 2 * gated.up : column;
      const uint32_t byte = static_cast<uint32_t>(begin % 4) + row * expert.table.row;
      at[g] = byte / 4 * 4 + word() * 4;
      if (g < 2) behind[g] = byte % 4;
    }
  }

  // Loads the scales of the task's stage s, once that stage is empty.
  __device__ __forceinline__ void load(const StageSlot& slot, uint32_t s) const {
    const uint32_t full = barrier_of(b.s.pipeline.weights_full, slot), block = (stages.first + s) * kStageBlocks;
    uint8_t* const stage = b.s.weights[slot.at] + kFewWeightScalesAt + to;
    wait(barrier_of(b.s.pipeline.empty, slot), slot.parity ^ 1);
    if (word() == StageScaleRow::kWords) {
#pragma unroll
      for (uint32_t g = 0; g < kEights; ++g) *reinterpret_cast<uint32_t*>(stage + g * kEightBytes) = behind[g % 2] * 8;
      arrive(full);
      return;
    }
    const uint32_t to_shared = shared_address(stage);
    if (block + StageScaleRow::kWords * 4 <= own) {
#pragma unroll
      for (uint32_t g = 0; g < kEights; ++g) cp_async4(to_shared + g * kEightBytes, words + block + at[g]);
    } else {
      load_last(to_shared, block);
    }
    cp_async_arrive_noinc(full);
  }

 private:
  static constexpr uint32_t kStageBlocks = kRowBytes / 16;
  // The eights of a warp. (For weights in other types there are no such warps.)
  static constexpr uint32_t kEights = kBoxFeatures / kProductRows / max_of(kFewScaleLoaders, 1u);
  static constexpr uint32_t kEightBytes = kProductRows * sizeof(StageScaleRow);
  static_assert(kEights % 2 == 0);

  static __device__ __forceinline__ uint32_t word() { return P::lane() % 4; }
  // Loads words of which some lie beyond the row's last scale. Bytes beyond it become zeros.
  __device__ __forceinline__ void load_last(uint32_t to_shared, uint32_t block) const {
    int32_t own_bytes[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const auto left = static_cast<int32_t>(own - block + behind[j]) - static_cast<int32_t>(word() * 4);
      own_bytes[j] = min_of(max_of(left, 0), 4);
    }
#pragma unroll
    for (uint32_t g = 0; g < kEights; ++g) {
      const auto bytes = static_cast<uint32_t>(own_bytes[g % 2]);
      cp_async4_or_zero(to_shared + g * kEightBytes, words + (bytes == 0 ? 0 : block + at[g]), bytes);
    }
  }

  const Block& b;
  const Stages stages;
  const uint32_t to;     // where the lane stores its words of the first eight, from the beginning of a stage's scales
  const uint8_t* words;  // the word in which the expert's scales begin
  uint32_t at[kEights];  // [eight] the lane's word of the row's first scales, in bytes from `words`
  uint32_t behind[2];    // [0] for even eights, [1] for odd ones: at which byte of its first word a row begins
  uint32_t own;          // how many scales a row has
};

template <class Dtype, bool kGated>
__device__ __forceinline__ void load_scales(const Block& b, uint32_t loader) {
  HandedSlot handed;
  StageSlot slot;
  while (true) {
    const Handed next = next_task(b, handed);
    if (!next.exists()) return;
    const Task task = next.task();
    const Stages stages = next.stages();
    const StageScaleLoader<Dtype, kGated> load{b, task, stages, loader};
    for (uint32_t s = 0; s < stages.count; ++s, slot.advance()) load.load(slot, s);
  }
}

}  // namespace flashmoe::sm90::few

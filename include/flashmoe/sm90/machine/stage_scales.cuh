// The scales by which a stage of quantised rows and weights is multiplied. Loaders load them together with the stage.
//
// A stage is a k-block of 128 bytes, so of 128 elements. Each of its rows has one scale. The 256 features of a task
// have two scales: one for each half, or, with a gate, one for gates and one for ups.
#pragma once

#include "flashmoe/sm90/machine/load.cuh"

namespace flashmoe::sm90 {

struct alignas(16) StageScales {
  static constexpr uint32_t kWeights = 2;
  float rows[Wide::kTokens];
  float weights[kWeights];
};
static_assert(kRowBytes == kScaleBlock && kTaskFeatures == StageScales::kWeights * kScaleBlock);

// Where the scales of a task's weights lie. first: the scale of the features' first half in the first k-block; null
// if each row of weights has a scale, by which the epilogue multiplies.
struct TaskScales {
  const float* first;
  uint32_t second;  // from the first half's scale to the other half's, in elements
  uint32_t step;    // from a k-block's scale to the next one's, in elements

  // Loads the scale of half `i` for a k-block.
  __device__ __forceinline__ void load(uint32_t to, uint32_t k_block, uint32_t i) const {
    if (first == nullptr) return;
    cp_async4(to + offsetof(StageScales, weights) + i * sizeof(float), first + i * second + k_block * step);
  }
};

// The scales of the weights that make block of columns `column` of a product's results. `gated`: how the weight rows
// of gates and ups lie.
template <bool kGated>
__device__ __forceinline__ TaskScales scales_of_task(const ScaleTable& w, bool by_row, uint32_t expert, uint32_t column,
                                                     GatedRows gated) {
  if (by_row) return {nullptr, 0, 0};
  const float* const all = w.as<float>() + uint64_t{expert} * w.expert;
  if (kGated && gated.step == 1) return {all + column * w.row, w.up, w.step};
  const uint32_t block = column * StageScales::kWeights;
  return {all + block * w.row, block + 1 < w.blocks ? w.row : 0, w.step};
}

// Loads the scales of gathered rows for machine/load.cuh. The scales of a row lie behind its elements.
template <class RowsOf>
struct GatheredScales {
  uint32_t memory;  // shared address of stage 0's StageScales
  RowsOf rows_of;   // rows_of() makes the TokenRows anew at each stage, since registers are full of rows' addresses
  uint32_t offset;  // of the scales in a row, in bytes
  TaskScales weights;

  // Loads the scales of stage s of the task, which is in stage `stage` of the ring.
  __device__ __forceinline__ void gather(uint32_t stage, uint32_t s, uint32_t thread) const {
    const uint32_t to = memory + stage * sizeof(StageScales), at = offset + s * sizeof(float);
    if (thread < StageScales::kWeights) weights.load(to, s, thread);
    const TokenRows rows = rows_of();
#pragma unroll 1
    for (uint32_t r = thread; r < Wide::kTokens; r += kLoaders) {
      if (r < rows.rows) cp_async4(to + r * sizeof(float), rows.at(r) + at);
    }
  }
};

// The same for intermediate rows. Their scales lie behind the elements of the whole tile.
struct BoxScales {
  uint32_t memory;
  const uint8_t* tiles;  // the intermediate rows of all tiles
  uint64_t tile_bytes;
  uint32_t intermediate;
  TaskScales weights;

  static __device__ __forceinline__ uint32_t bytes(uint32_t rows) {
    return align_up<uint32_t>(rows * sizeof(float), 16);
  }

  // Loads the scales of k-block `k_block` for `rows` rows from number `row` on, which counts rows through all tiles.
  // For the scales of weights, `all_k` is the k-block's number, counted through all slices.
  __device__ __forceinline__ void load(const Pipeline& at, uint32_t row, uint32_t rows, uint32_t k_block,
                                       uint32_t all_k) const {
    const uint32_t to = memory + at.stage * sizeof(StageScales);
    for (uint32_t i = 0; i < StageScales::kWeights; ++i) weights.load(to, all_k, i);
    cp_async_arrive_noinc(at.full());
    if (rows == 0) return;  // a rehearsal has no rows
    const uint8_t* const tile = tiles + row / kTileTokens * tile_bytes;
    bulk_load(to, tile + quantised_scale(intermediate, k_block, row % kTileTokens), bytes(rows), at.full());
  }
};

}  // namespace flashmoe::sm90

// The warps that load rows of x and intermediate rows beside weights in e4m3, in the kernel for a few tokens
// (sm90/decode/alone.cuh). They quantise rows as they load them. So a row is quantised again for every task that
// multiplies it, by warps that would otherwise wait. Hence no block waits until others have quantised, and a task of
// GEMM0 may be half as wide as a block of columns that share a scale. In a group, rows of x are quantised before
// they are sent, and the rank's own rows, too (decode/send_quantised.cuh).
//
// Warps 9 to 11 run it, each for its own stages. They read x and its scales (in a group, rows in the own heap and
// behind the own workspace), the workspace's intermediate rows after those of their unit are stored (wait_for_unit),
// and the scales of weights. They store only to the stages in shared memory.
#pragma once

#include "flashmoe/sm90/decode/products_quantised.cuh"
#include "flashmoe/sm90/decode/scales.cuh"

namespace flashmoe::sm90::few {

// Eight lanes share the 128 elements that a row has in a stage, 16 each. So a warp has four rows at a time.
inline constexpr uint32_t kPartElements = 16, kParts = kScaleBlock / kPartElements, kRowsAtOnce = 32 / kParts;

// A lane's 16 elements of a row, as they lie in memory.
template <class From>
struct RowPart {
  static constexpr uint32_t kPieces = kPartElements * From::kBytes / 16;
  static constexpr bool kGiven = false;  // whether the rows have scales already
  uint4 pieces[kPieces];

  __device__ __forceinline__ void load(const uint8_t* from) {
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) pieces[i] = load_row16(from + i * 16);
  }
  __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      float v[kElements];
      From::spread(v, pieces[i]);
#pragma unroll
      for (uint32_t j = 0; j < kElements; ++j) most = larger(most, v[j]);
    }
    return most;
  }
  // The elements times `inverse`, rounded to e4m3 and then widened to fp16.
  __device__ __forceinline__ StepPairs quantised(float inverse) const {
    StepPairs to;
    for_fours(inverse, [&](uint32_t k, uint32_t four) { widen_e4m3(four, to.pair[k / 2], to.pair[k / 2 + 1]); });
    return to;
  }
  // The elements times `inverse`, in e4m3.
  __device__ __forceinline__ uint4 packed(float inverse) const {
    uint32_t to[kPartElements / 4];
    for_fours(inverse, [&](uint32_t k, uint32_t four) { to[k / 4] = four; });
    return {to[0], to[1], to[2], to[3]};
  }

 private:
  static constexpr uint32_t kElements = 16 / From::kBytes;

  // Calls to(k, four) with elements k, ..., k + 3 in e4m3.
  template <class To>
  __device__ __forceinline__ void for_fours(float inverse, To&& to) const {
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      float v[kElements];
      From::spread(v, pieces[i]);
#pragma unroll
      for (uint32_t j = 0; j < kElements; j += 4) {
        to(i * kElements + j, pack_e4m3(v[j], v[j + 1], inverse) | pack_e4m3(v[j + 2], v[j + 3], inverse) << 16);
      }
    }
  }
};

// The same for rows that are in e4m3 already, and have scales.
template <>
struct RowPart<E4M3> {
  static constexpr bool kGiven = true;
  uint4 piece;

  __device__ __forceinline__ void load(const uint8_t* from) { piece = load_row16(from); }
  __device__ __forceinline__ float largest() const { return 0.0f; }
  __device__ __forceinline__ StepPairs quantised(float) const {
    StepPairs to;
    const uint32_t fours[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) widen_e4m3(fours[i], to.pair[2 * i], to.pair[2 * i + 1]);
    return to;
  }
  __device__ __forceinline__ uint4 packed(float) const { return piece; }
};

// For each part, the largest magnitude of its whole block of columns, of which kParts lanes have a part each.
template <class From, uint32_t kCount>
__device__ __forceinline__ void largest_of_blocks(const RowPart<From> (&parts)[kCount], float (&largest)[kCount]) {
#pragma unroll
  for (uint32_t g = 0; g < kCount; ++g) largest[g] = parts[g].largest();
#pragma unroll
  for (uint32_t apart = kParts / 2; !RowPart<From>::kGiven && apart != 0; apart /= 2) {
#pragma unroll
    for (uint32_t g = 0; g < kCount; ++g) {
      largest[g] = fmaxf(largest[g], __shfl_xor_sync(kFullWarp, largest[g], apart));
    }
  }
}

// Finds rows by their places. A place has 32 bits, and counts units of 16 bytes from an address.
struct RowsBehind {
  const uint8_t* first;

  __device__ __forceinline__ const uint8_t* at(uint32_t place) const { return first + uint64_t{place} * 16; }
};
// The same in a group: rows as they were quantised to be sent. This rank's own rows lie in one memory, and those that
// it received in another.
class SentRows {
 public:
  explicit __device__ __forceinline__ SentRows(const Call& c)
      : received_(c.heap<uint8_t>(c.rank, HeapField::kRows)), own_(c.out_row(0)) {}

  __device__ __forceinline__ const uint8_t* at(uint32_t place) const {
    return ((place & kOwn) != 0 ? own_ : received_) + uint64_t{place & ~kOwn} * 16;
  }
  __device__ __forceinline__ uint32_t place_of(const Call& c, const SentRow& row) const {
    if (row.source == c.rank) return kOwn | static_cast<uint32_t>((c.out_row(row.token) - own_) / 16);
    return static_cast<uint32_t>((c.dispatched_row(c.rank, row.source, row.token) - received_) / 16);
  }

 private:
  static constexpr uint32_t kOwn = 1u << 31;
  const uint8_t *received_, *own_;
};

// Fills one warp's stages of a task, which are every kFewRowLoaders-th.
template <class Dtype, bool kGated>
class StageRowLoader {
 public:
  __device__ __forceinline__ StageRowLoader(const Block& block, const Task& of, const Stages& all)
      : b(block),
        task(of),
        stages(all),
        first(b.routing.unit_first[task.unit]),
        rows(b.routing.unit_rows[task.unit]),
        columns(task.product == 0 ? b.c.shape.hidden : b.c.shape.intermediate),
        weights(few::scales_of<kGated>(b, task)) {}

  // Fills the warp's own stages of the task, from stage number `next` on, into `slot` and those that follow. Afterwards
  // `next` is the warp's next stage, counted from the next task's first stage.
  __device__ __forceinline__ void load(uint32_t& next, StageSlot& slot) {
    if (next < stages.count) load_own(next, slot);
    next -= stages.count;
  }

 private:
  static constexpr uint32_t kGroups = kFewStageRows / kRowsAtOnce, kMostAtOnce = 4;

  const Block& b;
  const Task& task;
  const Stages stages;
  const uint32_t first, rows, columns;  // the unit's first row and number of rows; the columns of a row
  const TaskScales weights;
  uint32_t row_at[kGroups];  // places of the lane's rows

  __device__ __forceinline__ void load_own(uint32_t& next, StageSlot& slot) {
    auto x_at = [&](uint32_t row) { return b.token_at(token_of(row)); };
    auto inner_at = [&](uint32_t row) { return row * (b.c.shape.intermediate * Inner<Dtype>::kBytes / 16); };
    if (task.product != 0) {
      load_from<Inner<Dtype>>(next, slot, RowsBehind{b.inner_row<Dtype>(0)}, inner_at);
    } else if constexpr (kBuild.group) {
      const SentRows sent(b.c);
      load_from<E4M3>(next, slot, sent,
                      [&](uint32_t row) { return sent.place_of(b.c, SentRow::unpack(b.routing.ids[row])); });
    } else if (b.args.x_scale == nullptr) {
      load_from<Dtype>(next, slot, RowsBehind{b.args.x}, x_at);
    } else {
      load_from<E4M3>(next, slot, RowsBehind{b.args.x}, x_at);
    }
  }
  __device__ __forceinline__ uint32_t token_of(uint32_t row) const {
    return b.routing.choice[row] / b.args.few_choices;
  }
  // The lane's row in this group. In place of a row beyond the unit's last, it is the last: nobody uses those products.
  __device__ __forceinline__ uint32_t row_of(uint32_t group) const {
    return first + min_of(group * kRowsAtOnce + P::lane() / kParts, rows - 1);
  }

  // The given scale of a row's k-block.
  template <class Rows>
  __device__ __forceinline__ float given_scale(const Rows& from, uint32_t place, uint32_t row, uint32_t k_block) const {
    if constexpr (kBuild.group) return reinterpret_cast<const float*>(from.at(place) + scales_offset(columns))[k_block];
    return b.args.x_scale[uint64_t{token_of(row)} * scale_blocks(columns) + k_block];
  }

  // Loads from rows in type From, of which row i has place at_of(i).
  template <class From, class Rows, class AtOf>
  __device__ __forceinline__ void load_from(uint32_t& next, StageSlot& slot, const Rows& from, AtOf&& at_of) {
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      row_at[g] = g == 0 || g * kRowsAtOnce < rows ? at_of(row_of(g)) : row_at[0];
    }
    if (rows <= kRowsAtOnce) {
      load_stages<From, 1>(next, slot, from);
    } else if (rows <= 2 * kRowsAtOnce) {
      load_stages<From, 2>(next, slot, from);
    } else {
      load_stages<From, kMostAtOnce>(next, slot, from);
    }
  }
  // Loads kAtOnce groups of rows at a time. A stage's first kAtOnce groups are loaded to registers before the wait for
  // the stage to be empty.
  template <class From, uint32_t kAtOnce, class Rows>
  __device__ __forceinline__ void load_stages(uint32_t& next, StageSlot& slot, const Rows& from) const {
#pragma unroll 1
    for (; next < stages.count; next += kFewRowLoaders) {
      RowPart<From> parts[kAtOnce];
      float scales[kAtOnce];
      load_parts(parts, scales, from, 0, stages.first + next);
      wait(barrier_of(b.s.pipeline.empty, slot), slot.parity ^ 1);
      store_parts(parts, scales, slot, 0);
      if (kAtOnce == kMostAtOnce && rows > kAtOnce * kRowsAtOnce) {
        load_parts(parts, scales, from, kAtOnce, stages.first + next);
        store_parts(parts, scales, slot, kAtOnce);
      }
      arrive(barrier_of(b.s.pipeline.rows_full, slot));
#pragma unroll
      for (uint32_t i = 0; i < kFewRowLoaders; ++i) slot.advance();
    }
  }
  // Loads one k-block of kAtOnce groups of rows, from number `group` on (0 or kMostAtOnce), with zeros beyond the last
  // column. scales: those of the weights, times the rows' own if these are given.
  template <class From, uint32_t kAtOnce, class Rows>
  __device__ __forceinline__ void load_parts(RowPart<From> (&parts)[kAtOnce], float (&scales)[kAtOnce],
                                             const Rows& from, uint32_t group, uint32_t k_block) const {
    const uint32_t part = P::lane() % kParts, column = k_block * kScaleBlock + part * kPartElements;
    float of_weights = 1.0f;
    if (part < kBlocks && weights.first != nullptr) {
      of_weights = weights.first[part * weights.second + k_block * weights.step];
    }
#pragma unroll
    for (uint32_t g = 0; g < kAtOnce; ++g) {
      parts[g] = {};
      scales[g] = of_weights;
      const uint32_t at = group == 0 ? row_at[g] : row_at[kGroups - kAtOnce + g];
      if (column < columns) parts[g].load(from.at(at) + column * From::kBytes);
      if constexpr (RowPart<From>::kGiven) scales[g] *= given_scale(from, at, row_of(group + g), k_block);
    }
  }
  template <class From, uint32_t kAtOnce>
  __device__ __forceinline__ void store_parts(const RowPart<From> (&parts)[kAtOnce], const float (&scales)[kAtOnce],
                                              const StageSlot& slot, uint32_t group) const {
    const uint32_t part = P::lane() % kParts;
    uint8_t* const stage = b.s.rows[slot.at];
    auto* const stage_scales = reinterpret_cast<float*>(stage + kFewScalesAt);
    float largest[kAtOnce];
    largest_of_blocks(parts, largest);
#pragma unroll
    for (uint32_t g = 0; g < kAtOnce; ++g) {
      const uint32_t row = (group + g) * kRowsAtOnce + P::lane() / kParts;
      const BlockScale of_row(largest[g]);
      const StepPairs pairs = parts[g].quantised(of_row.inverse);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(stage + wide_chunk_offset(row, 2 * part + i)) = pairs.chunk(i);
      }
      if (part < kBlocks) {
        stage_scales[part * kFewStageRows + row] = RowPart<From>::kGiven ? scales[g] : of_row.scale * scales[g];
      }
    }
  }
};

// One of the warps that load rows: number `own` of them.
template <class Dtype, bool kGated>
__device__ __forceinline__ void load_quantised_rows(const Block& b, uint32_t own) {
  const Tasks<Dtype, kGated, false> tasks{b};
  HandedSlot handed;
  StageSlot slot;
  for (uint32_t i = 0; i < own; ++i) slot.advance();
  uint32_t next = own;
  while (true) {
    const Handed taken = next_task(b, handed);
    if (!taken.exists()) return;
    const Task task = taken.task();
    if (task.product != 0) wait_for_unit(b, task.unit, tasks.arrivals());
    StageRowLoader<Dtype, kGated>{b, task, taken.stages()}.load(next, slot);
  }
}

}  // namespace flashmoe::sm90::few

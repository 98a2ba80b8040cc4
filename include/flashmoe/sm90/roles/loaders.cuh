// Loaders: warps 8 and 9 of each block. For each task they fill the stages (buffers in shared memory, which the
// consumers empty): weights by TMA, GEMM0's token rows by cp.async, GEMM1's intermediate rows by TMA.
// They read the task ring (shared memory, clerk.cuh); the caller's weights, x and scales; token rows that other ranks
// have sent to this rank's heap; and, in this rank's workspace, intermediate rows and own token rows that dispatch has
// quantised.
// They write the stages. In a wide tile, both blocks of a cluster multiply the same weights, so each block's loaders
// write half of them to both blocks' stages.
// They wait at the ring's `full` and the stages' `empty`. They arrive at the stages' `full` and the ring's `done` (the
// slot is free).
// For GEMM1, warp 8 is enough. Warp 9 then adds the rows of tokens whose last row is stored (join.cuh: reads this
// rank's result rows, writes y), or sums a piece of Reduce or Combine. (sums.cuh: Reduce reads staged rows in this
// rank's workspace and writes return rows and signals to any rank's heap. Combine reads return rows in this rank's heap
// and writes y.) In a backward pass, loaders also load what gradients/load.cuh says, and warp 9 stores gradients of
// combine weights to all ranks' heaps. Apart from this, loaders write only shared memory.
#pragma once

#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/machine/load.cuh"
#include "flashmoe/sm90/machine/stage_scales.cuh"
#include "flashmoe/sm90/roles/join.cuh"
#include "flashmoe/sm90/roles/look_up.cuh"
#include "flashmoe/sm90/roles/operands.cuh"
#include "flashmoe/sm90/roles/sums.cuh"

namespace flashmoe::sm90 {

// Whether experts have at most one tile, on average, so that their weights are read once. If the L2 kept weights
// after that, they would push out everything else, even the kernel's own code.
__device__ __forceinline__ bool reads_weights_once(const Call& c) {
  return rows_of_all(c) <= uint64_t{kTileTokens} * c.shape.experts;
}

// For transposed weights: the spans that a block loads for its columns of results, from column `first` on.
template <uint32_t p, bool kGated>
__device__ __forceinline__ FeatureSpans spans_of(const KernelArgs& args, bool shared, uint32_t first, uint32_t expert,
                                                 bool read_once) {
  constexpr bool kBoth = kColumnsPerTask<p, kGated> != kTaskFeatures;  // the task has gates and ups
  if constexpr (!kBoth) return {weights_of<p>(args, shared), first, false, expert, read_once};
  return {weights_of<p>(args, shared), first * args.gated.step, args.gated.step == 1, expert, read_once};
}

// The bytes from one tile's intermediate rows to the next tile's.
__device__ __forceinline__ uint64_t tile_bytes(const Call& c) {
  return c.memory.work_layout.stride[static_cast<uint32_t>(WorkField::kIntermediate)][0];
}

// The block's share of a tile's intermediate rows, which the copy engine loads.
__device__ __forceinline__ BoxRows intermediate_rows(const KernelArgs& args, const Call& c, const TaskSlot& slot) {
  const uint32_t first = slot.share.first;
  return {&args.intermediate,  slot.inner * kTileTokens + first, slot.share.rows,
          slot.slices,         slot.later * kTileTokens + first, c.shape.shared,
          c.shape.intermediate};
}

// Whether loaders take a piece of the returns between two tasks. If ranks may be on several machines, a piece takes
// more registers than loaders have left, so only other warps take pieces.
inline constexpr bool kLoadersReturn = !kIsBackward && !SpansMachines<Platform>;

// Run by the loaders (two warps). The first thread counts the stages that it begins, for the clerk. Intermediate rows
// are loaded by the copy engine, so the tasks that multiply them (GEMM1) leave the second warp free. That warp finds
// and joins late rows of tasks that the consumers have stored, or, with several ranks, does a piece of the returns.
template <class Dtype, class Pass, bool kGated, bool kTransposed, class Trace>
__device__ __forceinline__ void load_tasks(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                           const Trace& trace) {
  TaskRing& tasks = s.ring;
  const bool loads_intermediate = threadIdx.x < kFirstLoader + kLoaders / 2;
  auto count = [&] { tasks.count_stage(); };
  const bool read_once = reads_weights_once(c);
  bool apart = false;  // the two warps may be at different stages
  JoinEngine<Dtype, Trace> adder(args, c, trace);
  Joiner<Platform, JoinEngine<Dtype, Trace>> joiner(c, adder, s.late);
  using Sums = SumEngine<Dtype, Trace, kQuantised<Dtype>>;
  Sums sums(c, args.out, trace);
  Returner<Platform, Sums, CursorOfWarp> returns(c, sums, s.returns);
  for (uint32_t n = 0;; ++n) {
    const TaskSlot& slot = tasks.wait_full(n);
    if (slot.kind == TaskKind::kStop) {
      if (!kIsBackward && !loads_intermediate) joiner.close();
      return;
    }
    if (apart && (is_one_of<kGathering>(slot.kind) || is_behind_stop(slot.kind))) {
      // The first warp may still load GEMM1's stages while the second is here. The second must not go on: a wait tells
      // phases apart by one parity bit, so a barrier that is two phases behind looks as if its phase had completed.
      named_barrier_sync(kLoaderBarrier, kLoaders);
      apart = false;
    }
    const uint32_t box = slot.column * kClusterBlocks + cluster_rank();
    const bool wide = slot.share.wide, shared = c.shape.is_shared(slot.expert);
    const uint32_t expert = shared ? slot.expert - c.shape.routed_local_experts() : slot.expert;
    if constexpr (kIsBackward) {
      if (is_behind_stop(slot.kind)) {
        apart = Pass::template load_behind_stop<Dtype>(args, c, slot, ring, count);
        tasks.put_done(n);
        continue;
      }
    }
    with_product(slot.kind, [&]<uint32_t p>() {
      constexpr uint32_t kColumns = kColumnsPerTask<p, kGated> / kClusterBlocks;  // columns of results of a box
      const auto features = [&] {
        if constexpr (kTransposed) {
          return spans_of<p, kGated>(args, shared, box * kColumns, expert, read_once);
        } else {
          const bool half = is_half<Dtype, kGated>(c, slot);
          return FeatureBox{weights_of<p>(args, shared), 0, 0, box * (kColumns / 8), expert, read_once, half};
        }
      }();
      using Factor = typename Factors<Dtype>::Type;
      const auto weights = [&] {
        constexpr bool kBoth = kColumnsPerTask<p, kGated> != kTaskFeatures;
        return scales_of_task<kBoth>(weight_scales<p>(args, shared), args.scales_by_row != 0, expert, slot.column,
                                     args.gated);
      };
      if constexpr (Product<p>::kLeft == Operand::kTokens) {
        const auto rows_of = [&]() -> TokenRows {
          return {own_rows<Dtype>(args, c), c.heap<uint8_t>(c.rank, HeapField::kRows), slot.offsets, slot.share.rows};
        };
        const TokenRows rows = rows_of();
        const auto beside = [&] {
          if constexpr (!kQuantised<Dtype>)
            return NoScales{};
          else
            return GatheredScales{scales_of(ring), rows_of, scales_offset(c.shape.hidden), weights()};
        }();
        load_stages<Factor>(ring, wide, features, rows, beside, slot.k_bytes, count);
      } else {
        const BoxRows rows = intermediate_rows(args, c, slot);
        const auto beside = [&] {
          if constexpr (!kQuantised<Dtype>)
            return NoScales{};
          else
            return BoxScales{scales_of(ring), c.intermediate_row(0, 0), tile_bytes(c), c.shape.intermediate, weights()};
        }();
        load_stages<Factor>(ring, wide, features, rows, beside, slot.k_bytes, count);
        apart = true;
      }
      if constexpr (p == kReturning && !kIsBackward) {
        if (!loads_intermediate && joins_late_rows(c)) {
          while (!tasks.is_stored(slot.stored)) {
            if (!joiner.step()) __nanosleep(kPause);
          }
          joiner.template find<Wide::kTokens>([&](uint32_t row) { return slot.tokens[row]; }, slot.share.rows,
                                              slot.column, wide ? 2 : 1);
        }
      }
    });
    if constexpr (kTrainsInGroup && kIsBackward) {
      if (!loads_intermediate) Pass::template return_weights<Dtype>(args, c, slot);
    }
    const bool free = kLoadersReturn && !loads_intermediate && !is_one_of<kGathering>(slot.kind) && c.shape.ranks > 1;
    tasks.put_done(n);
    // Not if the task after the next is in the ring already: a piece takes as long as one or two tasks.
    if (free && !tasks.is_full(n + 2)) returns.step(summing_between_tasks(c));
  }
}

}  // namespace flashmoe::sm90

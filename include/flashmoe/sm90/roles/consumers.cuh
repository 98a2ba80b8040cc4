// Consumers: the two warpgroups of warps 0 to 7 of each block. They multiply what is in the stages, task after task,
// and their epilogues store the results.
// Read: the task ring, the stages and the scales beside them (shared memory); biases, and weights' scales by row
// (global memory).
// Write: their own staging buffers, and in e4m3 `largest` of a task's slot (shared memory). GEMM0: intermediate rows
// (this rank's workspace). GEMM1: result rows. These go to return rows in the heap of the token's home, over NVLink
// if that is another rank; with the reduced return to staged rows (workspace); in a joined call (a rank alone) with
// one row a token to the output y. A pass that trains also reads or stores what its Pass keeps, and stores gradients.
// Barriers: wait at `full` of the ring and of the stages; arrive at `empty` of both blocks' stages, and at the ring's
// `done` and `stored`; named barriers 1 and 2 (one warpgroup each) and 5 (both).
// Never touch the input x, the weights' matrices in global memory, or counters and signals: the clerk retires tasks.
#pragma once

#include "flashmoe/sm90/epilogue/quantised.cuh"
#include "flashmoe/sm90/epilogue/rows.cuh"
#include "flashmoe/sm90/machine/mainloop_quantised.cuh"
#include "flashmoe/sm90/machine/stage_scales.cuh"
#include "flashmoe/sm90/roles/consumer.cuh"
#include "flashmoe/sm90/roles/look_up.cuh"
#include "flashmoe/sm90/roles/operands.cuh"

namespace flashmoe::sm90 {

// Calls f, a lambda `[&]<Columns kOrder>() {..}`, with the order of the accumulator columns of a task that activates.
template <bool kGated, Major kMajor, class F>
__device__ __forceinline__ void with_columns(const GatedRows& gated, F&& f) {
  if constexpr (!kGated) {
    f.template operator()<Columns::kResults>();
  } else if constexpr (kMajor == Major::kK) {
    f.template operator()<Columns::kGroups>();
  } else if (gated.step == 1) {
    f.template operator()<Columns::kSpans>();
  } else {
    f.template operator()<Columns::kPairs>();
  }
}

// Multiplies the sums by the scales of the weights' rows, if each row of the weights has a scale. first: the
// warpgroup's first column of results.
template <bool kGated, uint32_t kCount>
__device__ __forceinline__ void scale_by_row(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                             uint32_t staging, const Lane& at, uint32_t first,
                                             float (&acc)[1][kCount]) {
  const bool shared = c.shape.is_shared(slot.expert);
  const uint32_t expert = shared ? slot.expert - c.shape.routed_local_experts() : slot.expert;
  with_product(slot.kind, [&]<uint32_t p>() {
    constexpr uint32_t kColumns = kColumnsPerTask<p, kGated>;
    const ScaleTable& w = weight_scales<p>(args, shared);
    const float* const scales = w.as<float>() + uint64_t{expert} * w.expert;
    const uint32_t own = detail::own_staging(staging, at);
    if constexpr (kColumns != kTaskFeatures) {
      const GatedRows gated = shared ? args.shared_gated : args.gated;
      detail::scale_columns<Columns::kGroups>(acc[0], own, scales, at, first, c.shape.intermediate, gated);
    } else {
      const uint32_t columns = Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate : c.shape.hidden;
      detail::scale_columns<Columns::kResults>(acc[0], own, scales, at, first, columns);
    }
  });
}

// A consumer warpgroup's part of one task, in one of its shapes.
template <class Dtype, class Pass, Activation kActivation, class Shape, class Trace>
__device__ __forceinline__ void compute_task(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                             Pipeline& ring, const Consumer& consumer, const Trace& trace) {
  using Element = typename Dtype::Element;
  using Factor = typename Factors<Dtype>::Type;
  using Stage = typename Shape::Stage;
  constexpr bool kRows = kTokensDown<Shape>;
  constexpr bool kGated = is_gated(kActivation);
  const TaskKind kind = slot.kind;  // kept: otherwise the compiler reads it again after the mainloop
  const bool activates = is_one_of<kActivating>(kind);
  const uint32_t group = consumer.anew<Dtype>(ring).group;
  auto first_column = [&] {
    const uint32_t columns = columns_of<kGated>(kind);
    return slot.column * columns + (kHalvesColumns<Shape> ? consumer.anew<Dtype>(ring).group * columns / kConsumers
                                    : kQuantised<Dtype> || slot.share.wide ? 0
                                                                           : cluster_rank() * columns / kClusterBlocks);
  };
  auto expert_bias = [&]() -> const Element* {
    const auto* all = static_cast<const Element*>(with_product(kind, [&]<uint32_t p>() { return bias_of<p>(args); }));
    const uint32_t features = with_product(kind, [&]<uint32_t p>() { return weight_rows<p>(c, kGated); });
    return all == nullptr ? nullptr : all + uint64_t{slot.expert} * features;
  };
  if constexpr (Shape::kMajorB == Major::kMn || kBuild.keeps || (kQuantised<Dtype> && !kGated)) {
    if (slot.share.cover <= group * Shape::kNextA) return keep_pace<Factor, Stage>(ring, stages_of(slot));
  }
  [[maybe_unused]] FeatureBias bias[Stage::kMs];
  if constexpr (!kRows) {
    const Lane here = Lane::of_thread(group);
    if (activates) {
      load_activation_bias<Dtype, Stage, kActivation>(bias, expert_bias(), here, first_column(), c.shape.intermediate,
                                                      args.gated);
    } else {
      load_bias<Dtype>(bias, expert_bias(), here, first_column() + group * Stage::kGroupFeatures, c.shape.hidden);
    }
  }
  Accumulators<Shape> acc;
  const uint32_t stages = slot.slices * Stage::stages(slot.k_bytes);
  if constexpr (kQuantised<Dtype>) {
    const bool in_turn = kGated && activates && args.gated.step == 1;
    multiply_quantised<Shape>(ring, scales_of(ring), group, stages, in_turn, args.scales_by_row == 0, acc[0]);
  } else {
    multiply<Dtype, Shape>(ring, group, stages, is_one_of<kGathering>(kind), acc);
  }
  trace.begin(1);
  const auto [group_after, staging] = consumer.anew<Dtype>(ring);
  const Lane at = Lane::of_thread(group_after, kHalvesColumns<Shape> ? 0 : group_after);
  const uint32_t rows = slot.share.rows;
  if constexpr (kQuantised<Dtype>) {
    if (args.scales_by_row != 0) scale_by_row<kGated>(args, c, slot, staging, at, first_column(), acc);
  }
  if (kQuantised<Dtype> && activates) {
    if constexpr (kQuantised<Dtype>) {
      if (args.weights_on_input != 0) scale_rows(at, acc, slot.weights);
      store_quantised_rows<Dtype, kActivation>(staging, at, acc, expert_bias(), rows, first_column(),
                                               c.shape.intermediate, c.intermediate_row(slot.inner, 0),
                                               slot.share.first, args.gated, args.clamped, slot.largest);
    }
  } else if (activates) {
    const uint64_t pitch = c.memory.work_layout.stride[static_cast<uint32_t>(WorkField::kIntermediate)][1];
    uint8_t* const tile = c.intermediate_row(slot.inner, slot.share.first);
    if constexpr (kRows) {
      if (!kBuild.on_input && args.weights_on_input != 0) scale_rows(at, acc, slot.weights);
      with_columns<kGated, Shape::kMajorB>(args.gated, [&]<Columns kOrder>() {
        if constexpr (kBuild.on_input) {
          Pass::template kept_place<kGated>(args, c, slot, first_column())
              .template rows<Dtype, kOrder>(at, acc[0], rows);
          scale_rows(at, acc, slot.weights);
        }
        store_activated_rows<Dtype, kActivation, kOrder>(
            staging, at, acc, expert_bias(), rows, first_column(), c.shape.intermediate, tile, pitch, args.gated,
            args.clamped, Pass::template kept_place<kGated, kBuild.on_input>(args, c, slot, first_column()));
      });
    } else {
      if (args.weights_on_input != 0) scale_tokens<Stage, Shape::kN>(at, acc, slot.weights);
      store_activated<Dtype, Stage, kActivation, Shape::kN>(staging, at, acc, bias, rows, first_column(),
                                                            c.shape.intermediate, tile, pitch, args.clamped);
    }
  } else if constexpr (kRows) {
    store_returned_rows<Dtype>(staging, at, acc, expert_bias(), rows, first_column(), c.shape.hidden, slot.weights,
                               slot.to);
  } else {
    store_returned<Dtype, Stage, Shape::kN>(staging, at, acc, bias, rows, first_column(), c.shape.hidden, slot.weights,
                                            slot.to);
  }
  trace.end(Phase::kEpilogue, slot.tile, slot.column, 1);
}

// Run by a consumer warpgroup, `group` 0 or 1: computes tasks until the stop, and then returns false. If a task tells
// it to combine (kCombines), it returns true at that task, and n is the task's number.
template <class Dtype, class Pass, Activation kActivation, bool kTransposed, class Trace>
__device__ __forceinline__ bool compute_tasks(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                              uint32_t group, const Trace& trace, uint32_t& n) {
  TaskRing& tasks = s.ring;
  const auto consumer = Consumer::of_group(ring, group);
  // The stages were dispatch's scratch. Only now may the loaders of both blocks fill them.
  fence_cluster();
  for (uint32_t stage = 0; stage < kStages; ++stage)
    release_stage<typename Factors<Dtype>::Type, Wide>(ring.empty(stage));
  for (n = 0;; ++n) {
    const TaskSlot& slot = tasks.wait_full(n);
    if (slot.kind == TaskKind::kStop) {
      trace.end(Phase::kWait, 0, 0);
      return false;
    }
    if constexpr (kIsBackward) {
      if (slot.task().group() == Pass::kCombines) return true;
    }
    trace.end(Phase::kWait, slot.tile, slot.column);
    if constexpr (kIsBackward) {
      if (is_behind_stop(slot.kind)) {
        Pass::template compute_behind_stop<Dtype, !kTransposed>(args, slot, ring, consumer);
      } else {
        with_tokens<Dtype, kTransposed, is_gated(kActivation)>(
            slot.share.wide, slot.share.cover, false, [&]<class Shape>() {
              Pass::template compute<Dtype, kActivation, Shape>(args, c, slot, ring, consumer, trace);
            });
      }
    } else {
      const bool half = is_half<Dtype, is_gated(kActivation)>(c, slot);
      with_tokens<Dtype, kTransposed, is_gated(kActivation)>(
          slot.share.wide, slot.share.cover, half,
          [&]<class Shape>() { compute_task<Dtype, Pass, kActivation, Shape>(args, c, slot, ring, consumer, trace); });
    }
    trace.end_product(is_behind_stop(slot.kind) ? Phase::kGradients : phase_of_product(slot.kind), slot.tile,
                      slot.column, slot.expert);
    if (!kIsBackward && is_one_of<kHome>(slot.kind) && joins_late_rows(c))
      tasks.put_stored(slot.stored);  // other tasks have nobody who waits at `stored`
    if constexpr (kNumberAgain<Dtype>) n = *static_cast<const volatile uint32_t*>(&slot.stored);
    if constexpr (kQuantised<Dtype> || kIsBackward || kBuild.keeps)
      asm("" : "+r"(n));  // otherwise n % kSlots is kept during the task, and spilled
    tasks.put_done(n);
  }
}

}  // namespace flashmoe::sm90

// What the warps of a block do once its own tokens are dispatched: keep the tasks, load, compute.
#pragma once

#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/epilogue.cuh"
#include "flashmoe/sm90/epilogue_rows.cuh"
#include "flashmoe/sm90/load.cuh"
#include "flashmoe/sm90/mainloop.cuh"
#include "flashmoe/sm90/ring.cuh"

namespace flashmoe::sm90 {

// Where a row of a tile was dispatched to, for TokenRows.
__device__ __forceinline__ uint32_t place_of(const KernelArgs& args, const Call& c, const Row& row) {
  if (row.source == c.rank) return static_cast<uint32_t>(row.token * (args.x_row_bytes / 16));
  const uint64_t at = c.dispatched_row(c.rank, row.source, row.token) - c.heap<uint8_t>(c.rank, HeapField::kRows);
  return static_cast<uint32_t>(at / 16) | TokenRows::kRemote;
}

__device__ __forceinline__ uint64_t result_of(const KernelArgs& args, const Call& c, const Row& row) {
  uint8_t* to =
      c.reduced() ? c.staged_row(row.source, row.token, row.ordinal) : c.return_row(row.source, row.token, row.k);
  if (c.joined != 0 && c.top_k == 1) to = args.out + uint64_t{row.token} * c.token_row_bytes;
  return reinterpret_cast<uint64_t>(to);
}

// Looks up this block's share of a task: all that the other roles would have to wait for. One warp.
__device__ __forceinline__ void look_up(const KernelArgs& args, const Call& c, const Task& task, TaskSlot& slot) {
  using P = Platform;
  // Shape and rows are loaded side by side, those that the share does not have too: a round trip to the L2 is all it takes.
  const Tile::Shape shape = c.tile(task.index)->shape;
  constexpr uint32_t kEach = kTileTokens / P::kLanes;
  Row row[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) row[i] = *c.tile_row(task.index, P::lane() + i * P::kLanes);
  const Share share = share_of(shape.rows, pair_rank());
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t r = P::lane() + i * P::kLanes - share.first;
    if (r >= share.rows) continue;  // as are rows before the first
    if (task.kind == TaskKind::kGemm0) {
      slot.places[r] = place_of(args, c, row[i]);
    } else {
      slot.to[r] = result_of(args, c, row[i]);
      slot.weights[r] = row[i].weight;
      slot.tokens[r] = row[i].token;
    }
  }
  if (P::lane() == 0) {
    slot.tile = task.index;
    slot.column = task.column;
    slot.expert = shape.expert;
    slot.k_bytes = task.kind == TaskKind::kGemm0 ? c.token_row_bytes : c.hidden_row_bytes;
    slot.share = share;
  }
}

// Rehearsals. The first epilogue of a block takes 11 us, others 2 to 3: it fetches its code from memory. So while the first
// tiles form, each pair goes through a GEMM1 and a GEMM0 task of a full tile's shape, of one stage and without rows, by the
// very code of the tasks behind them. Only where tasks are retired and traced is there a case for them.
inline constexpr uint32_t kRehearsals = 2;

// Rows of all ranks' experts, were all ranks as large as this one.
__device__ __forceinline__ uint64_t rows_of_all(const Call& c) {
  return uint64_t{c.tokens} * c.top_k * c.ranks;
}

// How many tasks each ring begins with that are rehearsals. None where hardly a tile is full: the others run other code.
template <class Dtype>
__device__ __forceinline__ uint32_t rehearsals(const Call& c) {
  constexpr uint64_t kRows = kTileTokens / 2;  // of an expert, on average
  const bool full = rows_of_all(c) >= kRows * c.experts;
  return Dtype::kTensorCores && c.local_experts != 0 && full ? kRehearsals : 0;
}

// GEMM0 is the last, because it is needed first.
__device__ __forceinline__ Task rehearsal(uint32_t n) {
  return {n + 1 == kRehearsals ? TaskKind::kGemm0 : TaskKind::kGemm1, 0, kNoTile};
}

// Instead of look_up(). Of features it loads a stage of the first expert's; of tokens, without rows, none: the products are
// of what is there. Nothing is stored, so the slot's places, addresses and weights are left as they are.
__device__ __forceinline__ void look_up_rehearsal(TaskSlot& slot) {
  if (Platform::lane() != 0) return;
  slot.tile = kNoTile;
  slot.column = 0;
  slot.expert = 0;
  slot.k_bytes = kRowBytes;
  slot.share = {.wide = true, .first = 0, .rows = 0, .cover = Wide::kTokens};
}

// Of a clerk between two looks, nanoseconds: the consumers issue from the same scheduler, and draw on the same power.
inline constexpr uint32_t kPause = 250;

// Clerk: hands a task to its block's loaders and consumers. gemm1_tasks: of that kind so far.
__device__ __forceinline__ void put_task(const KernelArgs& args, const Call& c, TaskRing& ring, uint32_t n,
                                         const Task& task, uint32_t& gemm1_tasks) {
  using P = Platform;
  TaskSlot& slot = ring.at(n);
  if (task.index == kNoTile) {
    look_up_rehearsal(slot);
  } else if (task.kind != TaskKind::kStop) {
    look_up(args, c, task, slot);
  }
  if (P::lane() == 0) {
    slot.kind = task.kind;
    slot.stored = gemm1_tasks;
  }
  if (task.kind == TaskKind::kGemm1) ++gemm1_tasks;
  P::sync();
  ring.put_full(n);
}

// Stages that a task goes through.
__device__ __forceinline__ uint32_t stages_of(const TaskSlot& slot) {
  return slot.share.wide ? Wide::stages(slot.k_bytes) : Narrow::stages(slot.k_bytes);
}

// The leader's clerk, one warp: takes tasks from the ready queue to both blocks' rings, behind the rehearsals.
template <class Dtype>
__device__ __forceinline__ void lead_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  // A task is taken late, when the loaders have only so many stages left, which is the time that it takes to have the next
  // one looked up, four round trips to the L2: what is taken early runs late elsewhere.
  constexpr uint32_t kAhead = 10;
  const uint32_t rehearsed = rehearsals<Dtype>(c);
  uint32_t stages = 0, gemm1_tasks = 0;  // of the tasks so far
  uint32_t reported = 0;
  auto report_done = [&](uint32_t taken) {
    if (reported == taken || !ring.is_done(reported)) return false;
    if (P::lane() == 0) ring.report_done(reported);
    ++reported;
    return true;
  };
  for (uint32_t n = 0;; ++n) {
    while (ring.stages_loaded() + kAhead < stages || !ring.is_free(n)) {
      if (!report_done(n)) __nanosleep(kPause);
    }
    Task task = rehearsal(n);
    if (n >= rehearsed) {
      uint64_t ticket = 0;
      if (P::lane() == 0) ticket = take_ticket<P>(c);
      task = wait_task<P>(c, P::broadcast(ticket, 0), [&] { return report_done(n); });
    }
    if (P::lane() == 0) ring.hand_on(n, task);
    put_task(args, c, ring, n, task, gemm1_tasks);
    if (task.kind == TaskKind::kStop) {
      while (reported < n) report_done(n);
      return;
    }
    stages += stages_of(ring.at(n));
  }
}

// The follower's clerk, one warp: retires what the consumers of both blocks have done. Off their way, since each counter is
// a round trip to the L2. Their stores are ordered before a retirement by their arrivals (and the other clerk's), and
// before whoever sees its counters by those (cumulativity).
__device__ __forceinline__ void follow_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  uint32_t retired = 0, gemm1_tasks = 0;
  auto retire_done = [&](uint32_t taken) {
    if (retired == taken || !ring.is_done(retired)) return false;
    const TaskSlot& slot = ring.at(retired);
    if (slot.tile != kNoTile) retire<P>(c, {slot.kind, slot.column, slot.tile});
    P::sync();
    if (P::lane() == 0) ring.put_free(retired);
    ++retired;
    return true;
  };
  for (uint32_t n = 0;; ++n) {
    while (!ring.is_handed(n)) {
      if (!retire_done(n)) __nanosleep(kPause);
    }
    const Task task = ring.handed_task(n);
    put_task(args, c, ring, n, task, gemm1_tasks);
    if (task.kind != TaskKind::kStop) continue;
    while (retired < n) retire_done(n);
    return;
  }
}

// Whether rows are joined, and not there at once.
__device__ __forceinline__ bool joins_late_rows(const Call& c) {
  return c.joined != 0 && c.top_k == 2;
}

// Whether experts have a tile or less, on average. Their weights then take the L2 from all else, and from the kernel's own
// code, if they are kept there when they have been used.
__device__ __forceinline__ bool reads_weights_once(const Call& c) {
  return rows_of_all(c) <= uint64_t{kTileTokens} * c.experts;
}

// Loaders, two warps. The first thread counts the stages that it begins, for the clerk. GEMM1 leaves the second warp free to
// find and join the late rows of tasks that the consumers have done, or with several ranks to see to the returns.
template <class Dtype, bool kGated, class Trace>
__device__ __forceinline__ void load_tasks(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                           const Trace& trace) {
  TaskRing& tasks = s.ring;
  constexpr uint32_t kGroupsOf8 = kBoxFeatures / 8;  // of feature rows in a box
  const bool loads_hidden = threadIdx.x < kFirstLoader + kLoaders / 2;
  auto count = [&] { tasks.count_stage(); };
  const bool read_once = reads_weights_once(c);
  bool apart = false;  // the warps are at different stages
  Joiner<Dtype, Trace> joiner(args, c, s.late, trace);
  SumEngine<Dtype, Trace> sums(c, args.out, trace);
  Returner<Platform, SumEngine<Dtype, Trace>, PlaceOfWarp> returns(c, sums, s.returns);
  for (uint32_t n = 0;; ++n) {
    const TaskSlot& slot = tasks.wait_full(n);
    if (slot.kind == TaskKind::kStop) {
      if (!loads_hidden) joiner.close();
      return;
    }
    if (apart && slot.kind == TaskKind::kGemm0) {
      // Two phases ahead, a barrier looks as if it could be passed.
      named_barrier_sync(kLoaderBarrier, kLoaders);
      apart = false;
    }
    const uint32_t box = slot.column * kPair + pair_rank();
    const bool wide = slot.share.wide;
    if (slot.kind == TaskKind::kGemm0) {
      const uint32_t group = box * (kGated ? kGroupsOf8 / 2 : kGroupsOf8);
      const FeatureBox features{&args.gate_up, 0, 0, group, slot.expert, read_once};
      const TokenRows rows{args.x, c.heap<uint8_t>(c.rank, HeapField::kRows), slot.places, slot.share.rows};
      gather_load<Dtype>(ring, wide, features, rows, slot.k_bytes, count);
    } else {
      const FeatureBox features{&args.down, 0, 0, box * kGroupsOf8, slot.expert, read_once};
      hidden_load<Dtype>(ring, wide, features, &args.hidden, slot.tile * kTileTokens + slot.share.first,
                         slot.share.rows, slot.k_bytes, count);
      apart = true;
      if (!loads_hidden && joins_late_rows(c)) {
        while (!tasks.is_stored(slot.stored)) {
          if (!joiner.step()) __nanosleep(kPause);
        }
        joiner.find(slot.tokens, slot.share.rows, slot.column, wide ? 2 : 1);
      }
    }
    const bool free = !loads_hidden && slot.kind == TaskKind::kGemm1 && c.ranks > 1;
    tasks.put_done(n);
    // Not where tasks have piled up: a step takes as long as a task or two, and the slots are five.
    if (free && !tasks.is_full(n + 2)) returns.step();
  }
}

// A consumer warpgroup's part of one task, in one of its shapes.
template <class Dtype, Activation kActivation, class Shape, class Trace>
__device__ __forceinline__ void compute_task(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                             Pipeline& ring, uint32_t group, uint32_t staging, const Trace& trace) {
  using Element = typename Dtype::Element;
  using Stage = typename Shape::Stage;
  constexpr bool kRows = std::is_same_v<Shape, TokensByFeatures>;
  constexpr bool kGated = is_gated(kActivation);
  const bool first = slot.kind == TaskKind::kGemm0;
  auto first_column = [&] {
    const uint32_t columns = first ? gemm0_columns_per_task(kGated) : kGemm1ColumnsPerTask;
    return slot.column * columns + (slot.share.wide ? 0 : pair_rank() * columns / kPair);
  };
  auto expert_bias = [&]() -> const Element* {
    const auto* all = static_cast<const Element*>(first ? args.gate_up_bias : args.down_bias);
    const uint32_t features = first ? c.intermediate * (kGated ? 2 : 1) : c.hidden;
    return all == nullptr ? nullptr : all + uint64_t{slot.expert} * features;
  };
  [[maybe_unused]] FeatureBias bias[Stage::kMs];
  if constexpr (!kRows) {
    const Lane here = Lane::of_thread(group);
    if (first) {
      load_gemm0_bias<Dtype, Stage, kActivation>(bias, expert_bias(), here, first_column(), c.intermediate);
    } else {
      load_bias<Dtype>(bias, expert_bias(), here, first_column() + group * Stage::kGroupFeatures, c.hidden);
    }
  }
  Accumulators<Shape> acc;
  multiply<Dtype, Shape>(ring, group, slot.k_bytes, first, acc);
  trace.begin(1);
  const Lane at = Lane::of_thread(group);
  const uint32_t rows = slot.share.rows;
  if (first) {
    const uint64_t pitch = c.work_layout.stride[static_cast<uint32_t>(WorkField::kHidden)][1];
    uint8_t* const hidden = c.hidden_row(slot.tile, slot.share.first);
    if constexpr (kRows) {
      store_gemm0_rows<Dtype, kActivation>(staging, at, acc, expert_bias(), rows, first_column(), c.intermediate,
                                           hidden, pitch);
    } else {
      store_gemm0<Dtype, Stage, kActivation, Shape::kN>(staging, at, acc, bias, rows, first_column(), c.intermediate,
                                                        hidden, pitch);
    }
  } else if constexpr (kRows) {
    store_gemm1_rows<Dtype>(staging, at, acc, expert_bias(), rows, first_column(), c.hidden, slot.weights, slot.to);
  } else {
    store_gemm1<Dtype, Stage, Shape::kN>(staging, at, acc, bias, rows, first_column(), c.hidden, slot.weights, slot.to);
  }
  trace.end(TracePhase::kEpilogue, slot.tile, slot.column, 1);
}

// A consumer warpgroup: `group` 0 or 1. `staging`: its own buffer.
template <class Dtype, Activation kActivation, class Trace>
__device__ __forceinline__ void compute_tasks(const KernelArgs& args, const Call& c, TaskRing& tasks, Pipeline& ring,
                                              uint32_t group, uint32_t staging, const Trace& trace) {
  // The stages were scratch: only now may either block's loaders fill them.
  fence_pair();
  for (uint32_t s = 0; s < kStages; ++s) release_stage<Dtype, Wide>(ring.empty(s));
  for (uint32_t n = 0;; ++n) {
    trace.begin();
    const TaskSlot& slot = tasks.wait_full(n);
    if (slot.kind == TaskKind::kStop) return;
    trace.end(TracePhase::kWait, slot.tile, slot.column);
    trace.begin();
    with_tokens<Dtype>(slot.share.wide, slot.share.cover, [&]<class Shape>() {
      compute_task<Dtype, kActivation, Shape>(args, c, slot, ring, group, staging, trace);
    });
    trace.end(slot.kind == TaskKind::kGemm0 ? TracePhase::kGemm0 : TracePhase::kGemm1, slot.tile, slot.column);
    if (slot.kind == TaskKind::kGemm1 && joins_late_rows(c)) tasks.put_stored(slot.stored);  // else nobody waits for it
    tasks.put_done(n);
  }
}

}  // namespace flashmoe::sm90

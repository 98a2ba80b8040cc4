// What the warps of a block do once its own tokens are dispatched: look up tasks and retire them, load, compute.
#pragma once

#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/consumer.cuh"
#include "flashmoe/sm90/epilogue.cuh"
#include "flashmoe/sm90/epilogue_backward.cuh"
#include "flashmoe/sm90/epilogue_kept.cuh"
#include "flashmoe/sm90/epilogue_pre_activations.cuh"
#include "flashmoe/sm90/epilogue_quantised.cuh"
#include "flashmoe/sm90/epilogue_rows.cuh"
#include "flashmoe/sm90/expert_rows.cuh"
#include "flashmoe/sm90/load.cuh"
#include "flashmoe/sm90/mainloop.cuh"
#include "flashmoe/sm90/mainloop_quantised.cuh"
#include "flashmoe/sm90/received.cuh"
#include "flashmoe/sm90/ring.cuh"
#include "flashmoe/sm90/router_gradients.cuh"
#include "flashmoe/sm90/weight_gradients.cuh"

namespace flashmoe::sm90 {

// Where own token rows lie, as the experts multiply them, and how far apart.
template <class Dtype>
__device__ __forceinline__ const uint8_t* own_rows(const KernelArgs& args, const Call& c) {
  if constexpr (kQuantised<Dtype>) return c.out_row(0);
  return args.x;
}
template <class Dtype>
__device__ __forceinline__ uint64_t own_row_bytes(const KernelArgs& args, const Call& c) {
  if constexpr (kQuantised<Dtype>) return c.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kRows)][1];
  return args.x_row_bytes;
}

// Where the token row of a tile's row lies, as an offset of TokenRows.
template <class Dtype>
__device__ __forceinline__ uint32_t offset_of(const KernelArgs& args, const Call& c, const Row& row) {
  if (row.source == c.rank) return static_cast<uint32_t>(row.token * (own_row_bytes<Dtype>(args, c) / 16));
  const uint64_t at = c.dispatched_row(c.rank, row.source, row.token) - c.heap<uint8_t>(c.rank, HeapField::kRows);
  return static_cast<uint32_t>(at / 16) | TokenRows::kRemote;
}

__device__ __forceinline__ uint64_t result_of(const KernelArgs& args, const Call& c, const Row& row) {
  uint8_t* to =
      c.reduced() ? c.staged_row(row.source, row.token, row.ordinal) : c.return_row(row.source, row.token, row.k);
  if (c.policy.joined != 0 && c.shape.top_k == 1) to = args.out + uint64_t{row.token} * c.memory.return_row_bytes;
  return reinterpret_cast<uint64_t>(to);
}

// Where a row's pre-activations are kept (KeptOutputs).
__device__ __forceinline__ uint32_t kept_row(const Call& c, const Row& row, uint32_t slice) {
  return row.token * (c.shape.routed_top_k() + c.shape.shared) + row.k + slice;
}

// The bytes of a row of pre-activations.
__device__ __forceinline__ uint32_t kept_row_bytes(const KernelArgs& args) {
  return args.backward.z_columns * 2;
}

// Of a task of the shared expert, whose tile's first row is of `first_token`: what its slices change. One lane.
__device__ __forceinline__ void look_up_slices(const Call& c, uint32_t first_token, TaskSlot& slot) {
  if (TileIndex::has_slice(slot.index)) {
    const uint32_t slice = TileIndex::slice(slot.index);
    slot.inner = c.inner_tile(slot.tile, first_token, slice);
    slot.expert += slice;
  } else {
    slot.slices = c.shape.shared;
    slot.later = c.inner_tile(slot.tile, first_token, 1);
  }
}

// Bytes of an operand's rows that a task multiplies.
template <class Dtype>
__device__ __forceinline__ uint32_t contracted_bytes(const Call& c, TaskKind kind) {
  const bool hidden = is_one_of<kOverHidden>(kind);
  if constexpr (kQuantised<Dtype>) return hidden ? c.shape.hidden : c.shape.intermediate;
  return hidden ? c.memory.token_row_bytes : c.memory.intermediate_row_bytes;
}

// Where several ranks train: the number of a tile's first row, by which pre-activations are kept.
__device__ __forceinline__ uint32_t numbered_from(const KernelArgs& args, const Call& c, uint32_t tile,
                                                  uint32_t expert) {
  if constexpr (!kTrainsInGroup) return 0;
  return kIsBackward ? first_row_of(args.group, c, tile, expert) : tile * kTileTokens;
}

// Looks up this block's share of a task: all that the other roles would have to wait for. One warp.
template <class Dtype>
__device__ __forceinline__ void look_up(const KernelArgs& args, const Call& c, const Task& task, TaskSlot& slot) {
  using P = Platform;
  // Shape and rows, all that a tile may have, not the share's alone, are loaded side by side: one round trip to the L2.
  const uint32_t tile = TileIndex::tile(task.index);
  const Tile::Shape shape = c.tile(tile)->shape;
  [[maybe_unused]] const uint32_t first_row = numbered_from(args, c, tile, shape.expert);
  constexpr uint32_t kEach = kTileTokens / P::kLanes;
  Row row[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) row[i] = *c.tile_row(tile, P::lane() + i * P::kLanes);
  const Share share =
      kQuantised<Dtype> ? wide_share_of(shape.rows, cluster_rank()) : share_of(shape.rows, cluster_rank());
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t r = P::lane() + i * P::kLanes - share.first;
    if (r >= share.rows) continue;  // unsigned: of rows before share.first, r is larger too
    if (is_one_of<kGathering>(task.kind)) {
      slot.offsets[r] = offset_of<Dtype>(args, c, row[i]);
      if constexpr (kTrainsInGroup) {
        slot.tokens[r] = kIsBackward ? within(args.group, first_row + share.first + r) : first_row + share.first + r;
      } else if constexpr (kKeepBuild || kIsBackward) {
        slot.tokens[r] = kept_row(c, row[i], TileIndex::slice(task.index));
      }
      if (kTrainsInGroup && kIsBackward && task.column == 0) {
        args.group.gather[tile * kTileTokens + share.first + r] = gather_code(args.group, c, row[i]);
      }
      if (kIsBackward || args.weights_on_input != 0) slot.weights[r] = row[i].weight;
    } else {
      slot.to[r] = result_of(args, c, row[i]);
      slot.weights[r] = kIsBackward || args.weights_on_input != 0 ? 1.0f : row[i].weight;
      slot.tokens[r] = row[i].token;
    }
  }
  if (P::lane() == 0) {
    slot.index = task.index;
    slot.tile = slot.inner = tile;
    slot.column = task.column;
    slot.expert = shape.expert;
    slot.k_bytes = contracted_bytes<Dtype>(c, task.kind);
    slot.slices = 1;
    slot.share = share;
    if (c.shape.is_shared(shape.expert)) look_up_slices(c, row[0].token, slot);
  }
}

// The same for a task of an expert. Its rows are looked up by its loaders.
__device__ __forceinline__ void look_up_expert(const Call& c, const Task& task, TaskSlot& slot) {
  const uint32_t stages = stages_of_expert<Platform>(c, task.index) * column_passes(c);
  if (Platform::lane() != 0) return;
  slot.index = slot.tile = slot.expert = task.index;
  slot.column = task.column;
  slot.slices = 1;
  slot.k_bytes = stages * kRowBytes;  // so that Wide::stages(k_bytes) is `stages`
  slot.share = {.wide = true, .first = 0, .rows = 0, .cover = Wide::kTokens};
}

// The same for a product over an expert's rows behind the stop.
__device__ __forceinline__ void look_up_over_rows(const Call& c, const Task& task, TaskSlot& slot) {
  if (Platform::lane() != 0) return;
  const uint32_t rows = task.index == kCombines       ? 0
                        : is_of_router(c, task.index) ? c.shape.tokens
                                                      : rows_of_expert(c, task.index);
  slot.index = slot.tile = slot.expert = task.index;
  slot.column = task.column;
  slot.slices = 1;
  slot.k_bytes = ceil_div(rows, kStageRows) * kRowBytes;  // so that Wide::stages(k_bytes) is right
  slot.share = {.wide = true, .first = 0, .rows = rows, .cover = Wide::kTokens};
}

// Whether a task is one behind the stop.
__device__ __forceinline__ bool is_over_rows(TaskKind kind) {
  return kIsBackward && kind == kOverRows;
}

// Rehearsals. The first epilogue of a block takes 11 us, others 2 to 3: its code has to come from memory. So while the
// first tiles form, each cluster runs a task of each product, in a full tile's shape, of one stage and without rows, by
// the very code of the tasks after it. Only look-up, retirement and traces tell it apart, by kNoTile.
inline constexpr uint32_t kRehearsals = kProducts - kExpertProducts;

// Rows of all experts, if all ranks have as many tokens as this one.
__device__ __forceinline__ uint64_t rows_of_all(const Call& c) {
  return uint64_t{c.shape.tokens} * c.shape.top_k * c.shape.ranks;
}

// How many rehearsals each ring begins with. None where hardly a tile is full, since other tiles run other code.
template <class Dtype>
__device__ __forceinline__ uint32_t rehearsals(const Call& c) {
  constexpr uint64_t kRows = kTileTokens / 2;  // of an expert, on average
  const bool full = rows_of_all(c) >= kRows * c.shape.experts;
  return Dtype::kTensorCores && c.shape.local_experts != 0 && full ? kRehearsals : 0;
}

// Rehearses the last product first, and the first last: its tasks are the next to come.
__device__ __forceinline__ Task rehearsal(uint32_t n) {
  Task task{TaskKind::kNone, 0, kNoTile};
  for_each_product([&]<uint32_t m>() {
    if (n + 1 + m == kRehearsals) task.kind = Product<m>::kKind;
  });
  return task;
}

// Instead of look_up(). The task loads one stage of the first expert's features and, having no rows, no tokens: it
// multiplies what lies there. Nothing is stored, so the slot's offsets, addresses and weights are left as they are.
__device__ __forceinline__ void look_up_rehearsal(TaskSlot& slot) {
  if (Platform::lane() != 0) return;
  slot.index = slot.tile = kNoTile;
  slot.column = 0;
  slot.expert = 0;
  slot.k_bytes = kRowBytes;
  slot.slices = 1;
  slot.share = {.wide = true, .first = 0, .rows = 0, .cover = Wide::kTokens};
}

// Nanoseconds that a clerk rests between two looks: it shares its instruction scheduler, and the power, with consumers.
inline constexpr uint32_t kPause = 250;

// Has the L2 fetch what a task reads of kept rows, since these come from memory otherwise, when its epilogue wants them. One warp, when
// it looks up the task behind it: some ten stages before the epilogue. Fetched with the task's own look-up, they are out of the L2
// again by then.
__device__ __forceinline__ void prefetch_kept(const KernelArgs& args, const Call& c, const TaskSlot& slot) {
  if (!is_one_of<kDifferentiating>(slot.kind) || slot.index == kNoTile) return;
  const uint32_t bytes = kept_row_bytes(args), each = kTaskFeatures * (bytes == c.shape.intermediate * 2 ? 2 : 4);
  const uint8_t* const from = args.backward.kept.pre_activations + slot.column * each;
  const uint32_t size = min_of(each, bytes - slot.column * each);
  for (uint32_t r = Platform::lane(); r < slot.share.rows; r += Platform::kLanes) {
    prefetch_to_l2(from + uint64_t{slot.tokens[r]} * bytes, size);
  }
}

// Clerk: hands a task to its block's loaders and consumers. stored: how many that return rows it has handed on before.
template <class Dtype>
__device__ __forceinline__ void put_task(const KernelArgs& args, const Call& c, TaskRing& ring, uint32_t n,
                                         const Task& task, uint32_t& stored) {
  using P = Platform;
  TaskSlot& slot = ring.at(n);
  if constexpr (kIsBackward) {
    if (n != 0) prefetch_kept(args, c, ring.at(n - 1));
  }
  if (task.index == kNoTile) {
    look_up_rehearsal(slot);
  } else if (is_one_of<kOfExpert>(task.kind)) {
    look_up_expert(c, task, slot);
  } else if (is_over_rows(task.kind)) {
    if constexpr (kIsBackward) {
      if (is_of_router_dx(c, task.index)) {
        look_up_router_dx(args, c, task, slot);
      } else {
        look_up_over_rows(c, task, slot);
      }
    }
  } else if (task.kind != TaskKind::kStop) {
    look_up<Dtype>(args, c, task, slot);
  }
  if (P::lane() == 0) {
    slot.kind = task.kind;
    slot.stored = kTrainsInGroup && kIsBackward ? n : stored;  // else unused there, see compute_tasks()
  }
  if (is_one_of<kHome>(task.kind)) ++stored;
  P::sync();
  ring.put_full(n);
}

// Stages that a task goes through.
__device__ __forceinline__ uint32_t stages_of(const TaskSlot& slot) {
  return slot.slices * (slot.share.wide ? Wide::stages(slot.k_bytes) : Narrow::stages(slot.k_bytes));
}

// The leader's clerk, one warp: takes tasks from the ready queue to both blocks' rings, behind the rehearsals.
template <class Dtype>
__device__ __forceinline__ void lead_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  // A task is taken when the loaders have only so many stages left to begin, which takes them as long as the clerk
  // takes to get and look up a task: four round trips to the L2. One taken sooner would wait here, while another
  // cluster could begin it.
  constexpr uint32_t kAhead = 10;
  const uint32_t rehearsed = rehearsals<Dtype>(c);
  uint32_t stages = 0, stored = 0;  // of the tasks so far
  uint32_t reported = 0;
  bool stopped = false;  // the queue has no more tasks
  [[maybe_unused]] TasksBehindStop behind(args);
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
    if (n >= rehearsed && !stopped) {
      uint64_t ticket = 0;
      if (P::lane() == 0) ticket = take_ticket<P>(c);
      task = wait_task<P>(c, P::broadcast(ticket, 0), [&] { return report_done(n); });
    }
    if constexpr (kIsBackward) {
      if constexpr (kTrainsInGroup) {
        if (!stopped && task.kind == TaskKind::kStop) {
          const auto received = [&] {
            if (all_received(c)) return Step::kDone;
            return report_done(n) ? Step::kProgress : Step::kIdle;
          };
          wait_until<P>(c, received, OsLiveness<P>{c});
        }
      }
      stopped |= task.kind == TaskKind::kStop;
      if (stopped) task = behind.next(args, c, [&] { return report_done(n); });
    }
    if (P::lane() == 0) ring.hand_on(n, task);
    put_task<Dtype>(args, c, ring, n, task, stored);
    if (task.kind == TaskKind::kStop) {
      while (reported < n) report_done(n);
      return;
    }
    stages += stages_of(ring.at(n));
  }
}

// The follower's clerk, one warp: retires what the consumers of both blocks have done. Consumers do not do that
// themselves, since each counter is a round trip to the L2. Their stores are ordered before the counters' changes by
// their arrivals (and the leading clerk's), and so before all that whoever sees the counters does (cumulativity).
template <class Dtype>
__device__ __forceinline__ void follow_tasks(const KernelArgs& args, const Call& c, TaskRing& ring) {
  using P = Platform;
  uint32_t retired = 0, stored = 0;
  auto retire_done = [&](uint32_t taken) {
    if (retired == taken || !ring.is_done(retired)) return false;
    const TaskSlot& slot = ring.at(retired);
    if (slot.index != kNoTile && !is_over_rows(slot.kind)) retire<P>(c, {slot.kind, slot.column, slot.index});
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
    put_task<Dtype>(args, c, ring, n, task, stored);
    if (task.kind != TaskKind::kStop) continue;
    while (retired < n) retire_done(n);
    return;
  }
}

// Whether experts have a tile or less, on average, so that their weights are read once. Kept in the L2 after that, they
// would push out all else, and the kernel's own code.
__device__ __forceinline__ bool reads_weights_once(const Call& c) {
  return rows_of_all(c) <= uint64_t{kTileTokens} * c.shape.experts;
}

// The weights of product p: their tensor map, of the experts or of the shared expert's slices, how many rows an expert has
// of them, and their biases.
template <uint32_t p>
__device__ __forceinline__ const TensorMap* weights_of(const KernelArgs& args, bool shared) {
  if constexpr (Product<p>::kRight == Operand::kGateUp) return shared ? &args.shared_gate_up : &args.gate_up;
  return shared ? &args.shared_down : &args.down;
}
template <uint32_t p>
__device__ __forceinline__ const ScaleTable& weight_scales(const KernelArgs& args, bool shared) {
  if constexpr (Product<p>::kRight == Operand::kGateUp) return shared ? args.shared_gate_up_scale : args.gate_up_scale;
  return shared ? args.shared_down_scale : args.down_scale;
}
template <uint32_t p>
__device__ __forceinline__ uint32_t weight_rows(const Call& c, bool gated) {
  return Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate * (gated ? 2 : 1) : c.shape.hidden;
}
template <uint32_t p>
__device__ __forceinline__ const void* bias_of(const KernelArgs& args) {
  return Product<p>::kRight == Operand::kGateUp ? args.gate_up_bias : args.down_bias;
}

// Where they are transposed, what a block loads of them for its columns of results, `first` and those behind it.
template <uint32_t p, bool kGated>
__device__ __forceinline__ FeatureSpans spans_of(const KernelArgs& args, bool shared, uint32_t first, uint32_t expert,
                                                 bool read_once) {
  constexpr bool kBoth = kColumnsPerTask<p, kGated> != kTaskFeatures;  // gates and ups
  if constexpr (!kBoth) return {weights_of<p>(args, shared), first, false, expert, read_once};
  return {weights_of<p>(args, shared), first * args.gated.step, args.gated.step == 1, expert, read_once};
}

// Columns of results that a task of this kind has, and how many there are from the task's first one on.
template <bool kGated>
__device__ __forceinline__ uint32_t columns_of(TaskKind kind) {
  return with_product(kind, [&]<uint32_t p>() { return kColumnsPerTask<p, kGated>; });
}
template <bool kGated>
__device__ __forceinline__ uint32_t columns_left(const Call& c, const TaskSlot& slot) {
  const uint32_t all = with_product(slot.kind, [&]<uint32_t p>() {
    return Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate : c.shape.hidden;
  });
  return all - slot.column * columns_of<kGated>(slot.kind);
}
// Whether the first block's half of the features has all that are left, so that the products take no more. (Not of rows in
// e4m3: those behind would change the scales of the columns before them. Nor in passes that train: it is one more shape.)
template <class Dtype, bool kGated>
__device__ __forceinline__ bool is_half(const Call& c, const TaskSlot& slot) {
  if constexpr (kQuantised<Dtype> || kKeepBuild || kIsBackward) return false;
  return 2 * columns_left<kGated>(c, slot) <= columns_of<kGated>(slot.kind);
}

// From a tile's intermediate rows to the next one's.
__device__ __forceinline__ uint64_t tile_bytes(const Call& c) {
  return c.memory.work_layout.stride[static_cast<uint32_t>(WorkField::kIntermediate)][0];
}

// Loaders: a task over an expert's rows.
template <class Dtype, class Count>
__device__ __forceinline__ void load_over_rows(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                               Pipeline& ring, Count&& count) {
  const BackwardArgs& b = args.backward;
  const WeightTask task = WeightTask::of(args, slot.column);
  const uint32_t first_row = task.first_row + cluster_rank() * (kTaskFeatures / kClusterBlocks);
  const uint32_t first_column = task.first_column + cluster_rank() * kBoxFeatures;
  const uint32_t columns = first_row < c.shape.hidden ? c.shape.hidden - first_row : 0;
  const FeatureSpans spans{task.of_down ? &b.weighted_columns : &b.z_columns_map, first_column, false, 0, false};
  const uint32_t first_byte = columns != 0 ? first_row * Dtype::kBytes : 0;
  const GatheredRows rows{(task.of_down ? args.x : b.x) + first_byte,
                          static_cast<uint32_t>((task.of_down ? args.x_row_bytes : b.x_row_bytes) / 16),
                          kTrainsInGroup ? (task.of_down ? args.group.received : args.group.x) + first_byte : nullptr,
                          kTrainsInGroup ? c.memory.token_row_bytes / 16 : 0,
                          kTrainsInGroup ? args.group.gather : nullptr};
  load_weight_task<Dtype>(ring, c, slot.expert, slot.share.rows, rows, columns, spans, count);
}

// Loaders: a task behind the stop. Whether the warps are at different stages then.
template <class Dtype, class Count>
__device__ __forceinline__ bool load_behind_stop(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                                 Pipeline& ring, Count&& count) {
  if (!is_of_router(c, slot.index)) {
    load_over_rows<Dtype>(args, c, slot, ring, count);
    return false;
  }
  if (is_of_router_dx(c, slot.index)) {
    load_router_dx<Dtype>(args, slot, ring, count);
  } else if (slot.index != kCombines) {  // which loads nothing
    load_router_weights<Dtype>(args, slot, ring, count);
  }
  return true;
}

// The loader warp that a task of dX leaves free: gradients of combine weights to other ranks.
template <class Dtype>
__device__ __forceinline__ void return_weights(const KernelArgs& args, const Call& c, const TaskSlot& slot) {
  if constexpr (kTrainsInGroup && kIsBackward) {
    if (is_one_of<kHome>(slot.kind) && slot.tile != kNoTile)
      send_weight_gradients<Dtype>(args, c, slot.tile, slot.column, slot.share, slot.expert);
  }
}

// Loaders, two warps. The first thread counts the stages that it begins, for the clerk. Tasks on intermediate rows
// (GEMM1), which the copy engine loads, leave the second warp free: it finds and joins late rows of tasks that the
// consumers have stored, or, with several ranks, does a piece of the returns.
template <class Dtype, bool kGated, bool kTransposed, class Trace>
__device__ __forceinline__ void load_tasks(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                           const Trace& trace) {
  TaskRing& tasks = s.ring;
  const bool loads_intermediate = threadIdx.x < kFirstLoader + kLoaders / 2;
  auto count = [&] { tasks.count_stage(); };
  const bool read_once = reads_weights_once(c);
  bool apart = false;  // the warps are at different stages
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
    if (apart && (is_one_of<kGathering>(slot.kind) || is_over_rows(slot.kind))) {
      // The first warp may still load GEMM1's stages, while the second is here. It must not go on: a wait tells phases
      // apart by one parity bit, and a barrier that is two phases behind looks as if it had been passed.
      named_barrier_sync(kLoaderBarrier, kLoaders);
      apart = false;
    }
    const uint32_t box = slot.column * kClusterBlocks + cluster_rank();
    const bool wide = slot.share.wide, shared = c.shape.is_shared(slot.expert);
    const uint32_t expert = shared ? slot.expert - c.shape.routed_local_experts() : slot.expert;
    if constexpr (kIsBackward) {
      if (is_over_rows(slot.kind)) {
        apart = load_behind_stop<Dtype>(args, c, slot, ring, count);
        tasks.put_done(n);
        continue;
      }
    }
    with_product(slot.kind, [&]<uint32_t p>() {
      constexpr uint32_t kColumns = kColumnsPerTask<p, kGated> / kClusterBlocks;  // of results, that a box makes
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
      if constexpr (Product<p>::kOfExpert) {
        gather_expert<Dtype>(
            ring, c, slot.expert, slot.column * kColumnsPerTask<p, kGated>,
            [&](const Row& row) {
              return row.source == c.rank ? args.x + row.token * args.x_row_bytes
                                          : c.dispatched_row(c.rank, row.source, row.token);
            },
            count);
      } else if constexpr (Product<p>::kLeft == Operand::kTokens) {
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
        gather_load<Factor>(ring, wide, features, rows, beside, slot.k_bytes, count);
      } else {
        const BoxRows rows{&args.intermediate, slot.inner * kTileTokens + slot.share.first, slot.share.rows,
                           slot.slices, slot.later * kTileTokens + slot.share.first};
        const auto beside = [&] {
          if constexpr (!kQuantised<Dtype>)
            return NoScales{};
          else
            return BoxScales{scales_of(ring), c.intermediate_row(0, 0), tile_bytes(c), c.shape.intermediate, weights()};
        }();
        intermediate_load<Factor>(ring, wide, features, rows, beside, slot.k_bytes, count);
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
    if (!loads_intermediate) return_weights<Dtype>(args, c, slot);
    const bool free = !kIsBackward && !loads_intermediate && !is_one_of<kGathering>(slot.kind) && c.shape.ranks > 1;
    tasks.put_done(n);
    // Not while the next tasks are in the ring already: a piece takes as long as one or two, and there are five slots.
    if (free && !tasks.is_full(n + 2)) returns.step();
  }
}

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

// Multiplies by the scales of the weights' rows, of weights that have one for each.
template <bool kGated>
__device__ __forceinline__ void scale_by_row(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                             uint32_t staging, const Lane& at, float (&acc)[1][128]) {
  const bool shared = c.shape.is_shared(slot.expert);
  const uint32_t expert = shared ? slot.expert - c.shape.routed_local_experts() : slot.expert;
  with_product(slot.kind, [&]<uint32_t p>() {
    constexpr uint32_t kColumns = kColumnsPerTask<p, kGated>;
    const ScaleTable& w = weight_scales<p>(args, shared);
    const float* const scales = w.as<float>() + uint64_t{expert} * w.expert;
    const uint32_t own = detail::own_staging(staging, at), first = slot.column * kColumns;
    if constexpr (kColumns != kTaskFeatures) {
      const GatedRows gated = shared ? args.shared_gated : args.gated;
      detail::scale_columns<Columns::kGroups>(acc[0], own, scales, at, first, c.shape.intermediate, gated);
    } else {
      const uint32_t columns = Product<p>::kRight == Operand::kGateUp ? c.shape.intermediate : c.shape.hidden;
      detail::scale_columns<Columns::kResults>(acc[0], own, scales, at, first, columns);
    }
  });
}

// Who keeps the pre-activations of a task that activates, whose first column of results is `first_column`.
template <bool kGated>
__device__ __forceinline__ auto keeper(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                       uint32_t first_column) {
  if constexpr (!kKeepBuild)
    return NothingKept{};
  else
    return PreActivations<kGated>{args.keep.pre_activations, slot.tokens, first_column, c.shape.intermediate};
}

// A consumer warpgroup's part of one task, in one of its shapes.
template <class Dtype, Activation kActivation, class Shape, class Trace>
__device__ __forceinline__ void compute_task(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                             Pipeline& ring, const Consumer& consumer, const Trace& trace) {
  using Element = typename Dtype::Element;
  using Factor = typename Factors<Dtype>::Type;
  using Stage = typename Shape::Stage;
  constexpr bool kRows = kTokensDown<Shape>;
  constexpr bool kGated = is_gated(kActivation);
  const TaskKind kind = slot.kind;  // kept: else it is read again after the mainloop
  const bool activates = is_one_of<kActivating>(kind);
  const uint32_t group = consumer.anew<Dtype>(ring).group;
  auto first_column = [&] {
    const uint32_t columns = columns_of<kGated>(kind);
    return slot.column * columns +
           (kQuantised<Dtype> || slot.share.wide ? 0 : cluster_rank() * columns / kClusterBlocks);
  };
  auto expert_bias = [&]() -> const Element* {
    const auto* all = static_cast<const Element*>(with_product(kind, [&]<uint32_t p>() { return bias_of<p>(args); }));
    const uint32_t features = with_product(kind, [&]<uint32_t p>() { return weight_rows<p>(c, kGated); });
    return all == nullptr ? nullptr : all + uint64_t{slot.expert} * features;
  };
  if constexpr (Shape::kMajorB == Major::kMn || kQuantised<Dtype> || kKeepBuild) {
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
    multiply_quantised(ring, scales_of(ring), group, stages, in_turn, args.scales_by_row == 0, acc[0]);
  } else {
    multiply<Dtype, Shape>(ring, group, stages, is_one_of<kGathering>(kind), acc);
  }
  trace.begin(1);
  const auto [group_after, staging] = consumer.anew<Dtype>(ring);
  const Lane at = Lane::of_thread(group_after);
  const uint32_t rows = slot.share.rows;
  if constexpr (kQuantised<Dtype>) {
    if (args.scales_by_row != 0) scale_by_row<kGated>(args, c, slot, staging, at, acc);
  }
  if (kQuantised<Dtype> && activates) {
    if constexpr (kQuantised<Dtype>) {
      if (args.weights_on_input != 0) scale_rows(at, acc, slot.weights);
      store_quantised_rows<Dtype, kActivation>(staging, at, acc, expert_bias(), rows, first_column(),
                                               c.shape.intermediate, c.intermediate_row(slot.inner, 0),
                                               slot.share.first, args.gated, args.clamped);
    }
  } else if (activates) {
    const uint64_t pitch = c.memory.work_layout.stride[static_cast<uint32_t>(WorkField::kIntermediate)][1];
    uint8_t* const tile = c.intermediate_row(slot.inner, slot.share.first);
    if constexpr (kRows) {
      if (args.weights_on_input != 0) scale_rows(at, acc, slot.weights);
      with_columns<kGated, Shape::kMajorB>(args.gated, [&]<Columns kOrder>() {
        store_activated_rows<Dtype, kActivation, kOrder>(staging, at, acc, expert_bias(), rows, first_column(),
                                                         c.shape.intermediate, tile, pitch, args.gated, args.clamped,
                                                         keeper<kGated>(args, c, slot, first_column()));
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

// Where a task that differentiates has its rows and columns (store_gradients).
template <bool kGated>
struct GradientPlace {
  const KernelArgs& args;
  const Call& c;
  const TaskSlot& slot;

  __device__ __forceinline__ uint32_t first_column() const {
    return slot.column * kTaskFeatures + (slot.share.wide ? 0 : cluster_rank() * (kTaskFeatures / kClusterBlocks));
  }
  __device__ __forceinline__ uint32_t rows() const { return slot.share.rows; }
  __device__ __forceinline__ uint32_t columns() const {
    const uint32_t first = first_column();
    return first < c.shape.intermediate ? c.shape.intermediate - first : 0;
  }
  // Rows from rows() to here are to be zeros: a tile's, by one block.
  __device__ __forceinline__ uint32_t padded() const {
    const uint32_t end = slot.share.first + slot.share.rows;
    const bool last = !slot.share.wide || cluster_rank() == kClusterBlocks - 1;
    return last ? align_up(end, kStageRows) - slot.share.first : 0;
  }
  __device__ __forceinline__ float weight(uint32_t r) const { return slot.weights[r]; }
  // Where z's rows lie, from the first column on; how many bytes apart; the number of a row's, and of one that does not exist any.
  __device__ __forceinline__ const uint8_t* z() const {
    return args.backward.kept.pre_activations + first_column() * (kGated ? 4 : 2);
  }
  __device__ __forceinline__ uint32_t z_bytes() const { return kept_row_bytes(args); }
  __device__ __forceinline__ uint32_t kept_row(uint32_t r) const { return r < rows() ? slot.tokens[r] : 0; }
  // dZ lies gate beside up, or gates before ups.
  __device__ __forceinline__ bool in_turn() const { return args.gated.step != 1; }
  __device__ __forceinline__ uint32_t to_up() const { return args.gated.up; }
  __device__ __forceinline__ uint32_t gradient_bytes() const { return args.backward.z_columns * 2; }
  __device__ __forceinline__ uint8_t* gradients(uint32_t r, uint32_t element) const {
    return args.backward.z_gradients + row(r) * gradient_bytes() + (first_column() * args.gated.step + element) * 2;
  }
  // From arguments alone: what the block has in shared memory is waited for, each row anew.
  __device__ __forceinline__ uint32_t weighted_bytes() const { return args.backward.z_columns * (kGated ? 1 : 2); }
  __device__ __forceinline__ uint8_t* weighted(uint32_t r, uint32_t column) const {
    return args.backward.weighted + row(r) * weighted_bytes() + (first_column() + column) * 2;
  }
  // A row of a wide task has one part of dS, and zero in place of the other block's.
  __device__ __forceinline__ void store_part(uint32_t r, float sum) const {
    const uint64_t all =
        kTrainsInGroup ? args.group.rows : uint64_t{c.shape.tokens} * (c.shape.routed_top_k() + c.shape.shared);
    float* const parts = args.backward.weight_parts + all * slot.column * kClusterBlocks + slot.tokens[r];
    parts[slot.share.wide ? 0 : cluster_rank() * all] = sum;
    if (slot.share.wide) parts[all] = 0.0f;
  }

 private:
  __device__ __forceinline__ uint64_t row(uint32_t r) const {
    return uint64_t{slot.inner} * kTileTokens + slot.share.first + r;
  }
};

// A combine weight's gradient, the sum of its parts, by all warps that have seen the stop: not the last one of a block.
__device__ __forceinline__ void sum_weight_parts(const KernelArgs& args, const Call& c) {
  constexpr uint32_t kSummers = (kWarps - 1) * 32;
  uint32_t thread;  // volatile, so that it is not kept along the roles
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if (thread >= kSummers || args.backward.weights == nullptr) return;
  const uint32_t parts = weight_parts_of(c);
  const uint32_t top_k = c.shape.top_k, all = c.shape.tokens * top_k;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kSummers + thread; i < all; i += gridDim.x * kSummers) {
    args.backward.weights[i] = choice_gradient(args, i / top_k, i % top_k, parts);
  }
}

// A consumer warpgroup's part of one task of an expert.
template <class Dtype>
__device__ __forceinline__ void compute_expert(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                               Pipeline& ring, uint32_t group) {
  const uint32_t stages = Wide::stages(slot.k_bytes) / column_passes(c);
  float* const to = args.kept + uint64_t{slot.expert} * c.shape.intermediate * c.shape.hidden;
#pragma unroll 1
  for (uint32_t pass = 0; pass < column_passes(c); ++pass) {
    float acc[128];
    multiply_rows<Dtype>(ring, group, stages, acc);
    const uint32_t first_row = first_of_pass(pass) + group * (kBlockColumns / kConsumers);
    store_kept(Lane::of_thread(group), acc, to, first_row, c.shape.intermediate, slot.column * kTaskFeatures,
               c.shape.hidden);
  }
}

// A consumer warpgroup's part of one task of a backward pass, in one of its shapes.
template <class Dtype, Activation kActivation, class Shape, class Trace>
__device__ __forceinline__ void compute_gradients(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                                  Pipeline& ring, const Consumer& consumer, const Trace& trace) {
  using Stage = typename Shape::Stage;
  const TaskKind kind = slot.kind;  // kept: else it is read again after the mainloop
  const uint32_t group = consumer.anew<Dtype>(ring).group;
  if (slot.share.cover <= group * Shape::kNextA) return keep_pace<Dtype, Stage>(ring, stages_of(slot));
  Accumulators<Shape> acc;
  multiply_and_hold<Dtype, Shape>(ring, group, Stage::stages(slot.k_bytes), is_one_of<kGathering>(kind), acc);
  trace.begin(1);
  const auto [group_after, staging] = consumer.anew<Dtype>(ring);
  const Lane at = Lane::of_thread(group_after);
  const GradientPlace<is_gated(kActivation)> where{args, c, slot};
  const uint32_t last = ring.last();
  if (is_one_of<kDifferentiating>(kind)) {
    // The loaders have three stages to go on with meanwhile, which they fill long before this ends.
    const uint32_t landing = ring.data(last) + Shape::a(0) + group_after * Shape::kNextA * kRowBytes;
    store_gradients<Dtype, kActivation>(staging, landing, acc, where, args.clamped);
    release_stage<Dtype, Stage>(ring.empty(ring.last()));
  } else {
    release_stage<Dtype, Stage>(ring.empty(last));
    store_returned_rows<Dtype>(staging, at, acc, nullptr, where.rows(), where.first_column(), c.shape.hidden,
                               slot.weights, slot.to);
  }
  trace.end(Phase::kEpilogue, slot.tile, slot.column, 1);
}

// A consumer warpgroup's part of one task behind the stop.
template <class Dtype, bool kTransposedLayer>
__device__ __forceinline__ void compute_over_rows(const KernelArgs& args, const TaskSlot& slot, Pipeline& ring,
                                                  const Consumer& consumer) {
  const uint32_t stages = Wide::stages(slot.k_bytes);
  const bool accumulates = args.backward.accumulates != 0;
  if (stages == 0) {
    if (accumulates) return;
    const WeightOutput to = WeightOutput::of<Dtype, kTransposedLayer>(args, slot.expert, slot.column);
    return store_no_gradients<Dtype>(to, Lane::of_thread(consumer.anew<Dtype>(ring).group));
  }
  float acc[1][128];
  multiply_rows<Dtype>(ring, consumer.anew<Dtype>(ring).group, stages, acc[0]);
  const auto [group, staging] = consumer.anew<Dtype>(ring);
  const WeightOutput to = WeightOutput::of<Dtype, kTransposedLayer>(args, slot.expert, slot.column);
  if (accumulates) return add_weight_gradients(Lane::of_thread(group), acc, to);
  store_weight_gradients<Dtype>(staging, Lane::of_thread(group), acc, to);
}

// A consumer warpgroup: `group` 0 or 1. Until the stop, or where it combines (kCombines): then true, and n is the task's number.
template <class Dtype, Activation kActivation, bool kTransposed, class Trace>
__device__ __forceinline__ bool compute_tasks(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                              uint32_t group, const Trace& trace, uint32_t& n) {
  TaskRing& tasks = s.ring;
  const auto consumer = Consumer::of_group(ring, group);
  // The stages were scratch: only now may either block's loaders fill them.
  fence_cluster();
  for (uint32_t stage = 0; stage < kStages; ++stage)
    release_stage<typename Factors<Dtype>::Type, Wide>(ring.empty(stage));
  for (n = 0;; ++n) {
    trace.begin();
    const TaskSlot& slot = tasks.wait_full(n);
    if (slot.kind == TaskKind::kStop) return false;
    if (kIsBackward && slot.index == kCombines) return true;
    trace.end(Phase::kWait, slot.tile, slot.column);
    trace.begin();
    if constexpr (kIsBackward) {
      if (is_over_rows(slot.kind)) {
        compute_over_rows<Dtype, !kTransposed>(args, slot, ring, consumer);
      } else {
        with_tokens<Dtype, kTransposed>(slot.share.wide, slot.share.cover, false, [&]<class Shape>() {
          compute_gradients<Dtype, kActivation, Shape>(args, c, slot, ring, consumer, trace);
        });
      }
    } else if (is_one_of<kOfExpert>(slot.kind)) {
      if constexpr (kExpertProducts != 0) compute_expert<Dtype>(args, c, slot, ring, group);
    } else {
      const bool half = is_half<Dtype, is_gated(kActivation)>(c, slot);
      with_tokens<Dtype, kTransposed>(slot.share.wide, slot.share.cover, half, [&]<class Shape>() {
        compute_task<Dtype, kActivation, Shape>(args, c, slot, ring, consumer, trace);
      });
    }
    trace.end(phase_of_product(slot.kind), slot.tile, slot.column);
    if (!kIsBackward && is_one_of<kHome>(slot.kind) && joins_late_rows(c))
      tasks.put_stored(slot.stored);  // else nobody waits for it
    // Not kept over the epilogue, whose place in registers a spill would take.
    if constexpr (kTrainsInGroup && kIsBackward) n = *static_cast<const volatile uint32_t*>(&slot.stored);
    if constexpr (kQuantised<Dtype> || kIsBackward || kKeepBuild)
      asm("" : "+r"(n));  // else n % kSlots is kept meanwhile, and spilled
    tasks.put_done(n);
  }
}

}  // namespace flashmoe::sm90

// Products over an expert's rows, which are the gradients of its weights. Clusters compute these products when the
// ready queue has no more tasks for the clusters:
//
//   down_proj     [H, I]   dY^T (w a)  (w: combine weight, a: activated value)
//   gate_up_proj  [2I, H]  dZ^T x      (transposed layers: [I, H] and [H, 2I])
//
// After them come the products of a router (gradients/router.cuh).
//
// The queue's stop words come after all its tasks. Among these are the tasks of dX, and a tile's tasks of dX become
// ready when all its tasks of dA are done. So when a cluster takes a stop word, all rows of dZ and of w a are stored,
// and the cluster may read them. Clusters take tasks by tickets. A task is of one expert: 256 rows of H (each block
// has 128 of them, a warpgroup 64) by 256 columns of I or 2I.
//
// A stage has 64 rows of the expert, where a Wide stage has its operands (machine/pipeline.cuh). Both operands are
// MN-major, in spans of 64 columns. In fp32, which threads multiply by fragments, a stage has 32 rows, in twice as
// many spans of 32 columns:
//   dY or x    at 32 KiB  2 spans of 64 columns of H, one for each warpgroup, gathered; zeros beyond the expert's rows
//   w a or dZ  at 0       4 spans of 64 columns; each block loads two for both blocks by TMA, from rows of tiles; zeros
//                         beyond the expert's rows (gradients/epilogue.cuh)
// A sum adds rows in the order of the expert's tiles. All tiles of an expert except the last are full.
#pragma once

#include "flashmoe/gpu/choice_gradient.cuh"
#include "flashmoe/sm90/gradients/epilogue.cuh"
#include "flashmoe/sm90/gradients/mainloop_rows.cuh"
#include "flashmoe/sm90/machine/load.cuh"

namespace flashmoe::sm90 {

// Rows of an expert, or tokens, that a stage has.
template <class Dtype>
inline constexpr uint32_t kRowsOfStage = span_side(Dtype::kBytes);

// The number of groups of weights (Task::group). A group has the weights of one local expert, and the expert's
// number. In these products, each slice of the shared expert counts as an expert, numbered behind the others. Its
// matrices are parts of the shared expert's: I columns of down_proj, and 2I or I rows of gate_up_proj; if all gates
// lie before all ups, twice I rows.
__device__ __forceinline__ uint32_t weight_groups(const CallShape& s) {
  return kBuild.sliced ? s.routed_local_experts() + s.shared : s.local_experts;
}
__device__ __forceinline__ bool is_of_shared(const CallShape& s, uint32_t group) {
  return kBuild.sliced && group >= s.routed_local_experts();
}
// The local expert over whose rows a group's products go.
__device__ __forceinline__ uint32_t local_expert_of(const Call& c, uint32_t group) {
  return kBuild.sliced ? min_of(group, c.shape.local_experts - 1) : group;
}
// In how many separate parts a slice's rows of gate_up_proj, and its columns of dZ, lie: 2 if gates lie apart from
// ups.
__device__ __forceinline__ uint32_t z_halves(const KernelArgs& args) {
  return args.backward.z_columns != args.call.shape.intermediate && args.gated.step == 1 ? 2 : 1;
}

// How many tasks an expert has: first `down` tasks for the gradient of down_proj, then `gate_up` for gate_up_proj's.
struct WeightTasks {
  uint32_t down, gate_up;

  static __device__ __forceinline__ WeightTasks of(const KernelArgs& args) {
    const CallShape& s = args.call.shape;
    const uint32_t blocks = ceil_div(s.hidden, kTaskFeatures);
    return {args.backward.down_gradient == nullptr ? 0 : blocks * ceil_div(s.intermediate, kTaskFeatures),
            args.backward.gate_up_gradient == nullptr ? 0 : blocks * ceil_div(args.backward.z_columns, kTaskFeatures)};
  }
  // The same for a slice of the shared expert. No task has columns of two parts (z_halves()).
  static __device__ __forceinline__ WeightTasks of_slice(const KernelArgs& args) {
    const CallShape& s = args.call.shape;
    const uint32_t blocks = ceil_div(s.hidden, kTaskFeatures), halves = z_halves(args);
    const uint32_t of_half = ceil_div(args.backward.z_columns / halves, kTaskFeatures);
    return {args.options.shared_down_gradient == nullptr ? 0 : blocks * ceil_div(s.intermediate, kTaskFeatures),
            args.options.shared_gate_up_gradient == nullptr ? 0 : blocks * of_half * halves};
  }
  __device__ __forceinline__ uint32_t all() const { return down + gate_up; }
};

// How many tasks a router has: `weights` for its own gradient, and `x` for its part of dX (gradients/router.cuh).
struct RouterTasks {
  uint32_t weights, x;

  static __device__ __forceinline__ RouterTasks of(const KernelArgs& args) {
    const CallShape& s = args.call.shape;
    const uint32_t blocks = ceil_div(s.hidden, kTaskFeatures);
    if (args.backward.logit_gradients == nullptr) return {0, 0};
    return {args.backward.router_gradient == nullptr ? 0 : blocks * ceil_div(gate_experts_of(s), kTaskFeatures),
            blocks * ceil_div(s.tokens, kTileTokens)};
  }
};
// The group of the task that makes a cluster's consumers combine. Each cluster has it once, between the experts' tasks
// and dX's.
inline constexpr uint32_t kCombines = kNoTile - 1;  // no tile has this number
// Whether a group is a router's. The router's own gradient has the first group behind the experts' groups. Behind
// that group, dX has a group for each tile of tokens. (kCombines counts as a router's group, too.)
__device__ __forceinline__ bool is_of_router(const Call& c, uint32_t group) {
  return group >= weight_groups(c.shape);
}
__device__ __forceinline__ bool is_of_router_dx(const Call& c, uint32_t group) {
  return group > weight_groups(c.shape) && group != kCombines;
}

// What a task of these products multiplies. Task::column is the task's number in its group.
struct WeightTask {
  bool of_down;
  uint32_t first_row, first_column;  // a row of H; a column of the other axis, which is that of dZ or of `weighted`
  uint32_t columns;                  // where the other axis ends, or the slice's part of it
  uint32_t skipped = 0, more = 0;    // slices: column 0 is column `skipped` of a matrix of columns + more columns

  static __device__ __forceinline__ WeightTask of(const KernelArgs& args, uint32_t group, uint32_t n) {
    if (is_of_shared(args.call.shape, group)) {
      return of_slice(args, group - args.call.shape.routed_local_experts(), n);
    }
    const WeightTasks tasks = WeightTasks::of(args);
    const CallShape& s = args.call.shape;
    const bool of_down = n < tasks.down;
    const uint32_t m = of_down ? n : n - tasks.down, blocks = ceil_div(s.hidden, kTaskFeatures);
    return {of_down, m % blocks * kTaskFeatures, m / blocks * kTaskFeatures,
            of_down ? s.intermediate : args.backward.z_columns};
  }
  static __device__ __forceinline__ WeightTask of_slice(const KernelArgs& args, uint32_t slice, uint32_t n) {
    const CallShape& s = args.call.shape;
    const uint32_t down = WeightTasks::of_slice(args).down, blocks = ceil_div(s.hidden, kTaskFeatures);
    const bool of_down = n < down;
    const uint32_t m = of_down ? n : n - down, halves = of_down ? 1 : z_halves(args);
    const uint32_t each = (of_down ? s.intermediate : args.backward.z_columns) / halves;
    const uint32_t of_half = ceil_div(each, kTaskFeatures), half = m / blocks / of_half;
    return {of_down,
            m % blocks * kTaskFeatures,
            half * each + m / blocks % of_half * kTaskFeatures,
            (half + 1) * each,
            (half * s.shared + slice - half) * each,
            (s.shared * halves - half - 1) * each};
  }
  static __device__ __forceinline__ WeightTask of_router(const KernelArgs& args, uint32_t n) {
    const CallShape& s = args.call.shape;
    const uint32_t blocks = ceil_div(s.hidden, kTaskFeatures);
    return {false, n % blocks * kTaskFeatures, n / blocks * kTaskFeatures, gate_experts_of(s)};
  }
};

// The task of the n-th ticket, or the stop. The tasks of the router's own gradient are few and long. They come after
// three quarters of the experts' tasks: by then, the gradients of logits are there, and other clusters still have
// experts' tasks to do meanwhile. dX's tasks, which are short, come last.
__device__ __forceinline__ Task task_behind_stop(const KernelArgs& args, uint32_t n) {
  const CallShape& s = args.call.shape;
  const uint32_t each = WeightTasks::of(args).all();
  const uint32_t of_routed = each * (kBuild.sliced ? s.routed_local_experts() : s.local_experts);
  const uint32_t of_slice = kBuild.sliced ? WeightTasks::of_slice(args).all() : 1;
  const uint32_t of_experts = kBuild.sliced ? of_routed + of_slice * s.shared : of_routed;
  const RouterTasks router = RouterTasks::of(args);
  const uint32_t before = of_experts - of_experts / 4;
  if (n >= before && n - before < router.weights) return {TaskKind::kBehindStop, n - before, weight_groups(s)};
  if (n >= before) n -= router.weights;
  if (n < of_routed) return {TaskKind::kBehindStop, n % each, n / each};
  if (kBuild.sliced && n < of_experts) {
    n -= of_routed;
    return {TaskKind::kBehindStop, n % of_slice, s.routed_local_experts() + n / of_slice};
  }
  n -= of_experts;
  if (n >= router.x) return {TaskKind::kStop};
  const uint32_t blocks = ceil_div(s.hidden, kTaskFeatures);
  return {TaskKind::kBehindStop, n % blocks, weight_groups(s) + 1 + n / blocks};
}

// Takes the next ticket, and returns its task or the stop. Run by one warp.
__device__ __forceinline__ Task take_weight_task(const KernelArgs& args, const Call& c) {
  using P = Platform;
  uint64_t ticket = 0;
  // If the call has failed, tiles may be incomplete, so no task is taken.
  const bool failed = P::ballot(P::load_relaxed(&c.control()->abort.value) != 0) != 0;
  if (P::lane() == 0 && !failed) ticket = P::fetch_add(&c.control()->weight_tickets.value, uint64_t{1});
  const auto n = static_cast<uint32_t>(P::broadcast(ticket, 0));
  return failed ? Task{TaskKind::kStop} : task_behind_stop(args, n);
}

// The token rows that products over an expert's rows gather, from the block's first column on: own rows and, among
// several ranks, received rows (GroupArgs). The units are the distance from row to row, in units of 16 bytes. codes:
// among several ranks, which row each row of a tile gathers (GroupArgs::gather).
struct GatheredRows {
  const uint8_t* own;
  uint32_t own_units;
  const uint8_t* received;
  uint32_t received_units;
  const uint32_t* codes;

  // Where the row with this code lies, as an offset of TokenRows. (On a rank alone, a row's code is its token.)
  __device__ __forceinline__ uint32_t offset(uint32_t code) const {
    if constexpr (!kTrainsInGroup) return code * own_units;
    const uint32_t remote = code & TokenRows::kRemote;
    return (code - remote) * (remote != 0 ? received_units : own_units) | remote;
  }
  __device__ __forceinline__ const uint8_t* row(uint64_t offset) const {
    if constexpr (!kTrainsInGroup) return own + offset * 16;
    return ((offset & TokenRows::kRemote) != 0 ? received : own) + (offset & ~uint64_t{TokenRows::kRemote}) * 16;
  }
};

// How many rows an expert has. Called by one lane.
__device__ __forceinline__ uint32_t rows_of_expert(const Call& c, uint32_t expert) {
  const uint32_t tiles = *c.expert_tile_count(expert);
  if (tiles == 0) return 0;
  return (tiles - 1) * kTileTokens + c.tile(c.expert_tiles(expert)[tiles - 1])->shape.rows;
}

namespace detail {

// The numbers of the rows of a tile that a loader warp gathers. Of each 64 rows (one stage, or two in fp32), the warp
// gathers 32. Each lane holds the number of one of these, and other lanes get it by a shuffle. All numbers of a tile
// are loaded while the rows of the tile before it are gathered, because a lane that uses a number waits for its load,
// and a round trip to the L2 takes about as long as the products of a stage.
struct LoaderRows {
  static constexpr uint32_t kSteps = kTileTokens / kStageRows;

  uint32_t token[kSteps];

  // row: the lane's row, of the tile's first 64.
  __device__ __forceinline__ void look_up(const Call& c, const GatheredRows& rows, uint32_t tile, uint32_t row) {
    const Row* const from = c.tile_row(tile, row);
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {  // for rows behind the tile's last one, any number
      token[s] = kTrainsInGroup ? rows.codes[tile * kTileTokens + row + s * kStageRows] : from[s * kStageRows].token;
    }
  }
  __device__ __forceinline__ void next_step() {
#pragma unroll
    for (uint32_t s = 1; s < kSteps; ++s) token[s - 1] = token[s];
  }
};

}  // namespace detail

// The place of the rows of dZ and w a that belong to tile number `tile`, the t-th tile of its expert. (For slices of
// the shared expert, see Call::inner_tile.)
__device__ __forceinline__ uint32_t inner_tile_of(const Call& c, uint32_t group, uint32_t t, uint32_t tile) {
  if (!is_of_shared(c.shape, group)) return tile;
  return c.inner_tile(tile, t * kTileTokens, group - c.shape.routed_local_experts());
}

// Loads all stages of a task whose group has `rows` rows. Run by all loader threads; the first calls count() for each
// stage. columns: how many columns of H exist from the block's first one on.
//
// The number of instructions limits how fast a loader warp is: a thread takes about six for each of its rows, of
// which two are the copies.
template <class Dtype, class Count>
__device__ __forceinline__ void load_weight_task(Pipeline& ring, const Call& c, uint32_t group, uint32_t rows,
                                                 GatheredRows from, uint32_t columns, const FeatureSpans& spans,
                                                 Count&& count) {
  constexpr uint32_t kChunks = kRowBytes / 16, kRowsApart = kLoaders / kChunks;
  static_assert(kStageRows / kRowsApart == kChunks);  // 8 lanes copy 8 rows, a chunk each; each lane has a row's number
  constexpr uint32_t kRows = kRowsOfStage<Dtype>, kEach = kRows / kRowsApart;  // rows of a stage; of these, a thread's
  constexpr uint32_t kSide = span_side(Dtype::kBytes), kEachSpan = span_bytes(Dtype::kBytes);
  if (rows == 0) return;
  const uint32_t thread = loader_thread();
  const uint32_t chunk = thread % kChunks, first = thread / kChunks, own_row = first + chunk * kRowsApart;
  const uint32_t slot = first * kRowBytes + (chunk ^ first % 8) * 16;
  const uint32_t* const tiles = c.expert_tiles(local_expert_of(c, group));
  const uint32_t last_tile = (rows - 1) / kTileTokens;
  from.own += chunk * 16;
  if constexpr (kTrainsInGroup) from.received += chunk * 16;
  // Tiles were formed, and other blocks stored their rows, through the generic proxy. The clerk acquired these writes
  // with the stop.
  if (thread == 0) fence_proxy_async_global();
  uint32_t tile = tiles[0], next_tile = tiles[min_of(1u, last_tile)];
  detail::LoaderRows now, next;
  now.look_up(c, from, tile, own_row);
#pragma unroll 1
  for (uint32_t t = 0; t <= last_tile; ++t) {
    next.look_up(c, from, next_tile, own_row);
    const uint32_t later_tile = tiles[min_of(t + 2, last_tile)];
    const uint32_t tile_rows = min_of(rows - t * kTileTokens, kTileTokens);
    const uint32_t inner = inner_tile_of(c, group, t, tile);
#pragma unroll 1
    for (uint32_t base = 0; base < tile_rows; base += kRows) {
      wait(ring.empty(), ring.parity);
      if (thread == 0) {
        arrive_expect_tx(ring.full(), Wide::kFeatureBytes);
        spans.template load<Dtype, Wide>(ring, (inner * kTileTokens + base) * Dtype::kBytes);
        count();
      }
      const uint32_t left = tile_rows - base, to = ring.data() + Wide::tokens(0) + slot;
      // fp32: of 64 rows, the second stage has the last 32. Their numbers are in lanes 4 to 7 of each 8.
      const uint32_t behind = kRows == kStageRows ? 0 : base % kStageRows / kRowsApart;
      const uint32_t own = own_row < left + base % kStageRows * (kRows != kStageRows) ? from.offset(now.token[0]) : 0;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint64_t units = __shfl_sync(kFullWarp, own, static_cast<int>(behind + i), kChunks);
        const uint8_t* const row = from.row(units);
        const bool exists = first + i * kRowsApart < left;
#pragma unroll
        for (uint32_t s = 0; s < kBoxBytes / kEachSpan; ++s) {
          const bool valid = exists && s * kSide + chunk * (16 / Dtype::kBytes) < columns;
          cp_async16_or_zero(to + s * kEachSpan + i * kRowsApart * kRowBytes, row + s * kRowBytes, valid ? 16 : 0);
        }
      }
      cp_async_arrive_noinc(ring.full());
      ring.advance();
      if (kRows == kStageRows || base % kStageRows != 0) now.next_step();
    }
    now = next;
    tile = next_tile, next_tile = later_tile;
  }
}

namespace detail {

// Stands in for StagedRow's Stage: the accumulators have 64 rows, those of one wgmma.
struct OneProduct {
  static constexpr uint32_t kMs = 1;
};

}  // namespace detail

// Where a block's part of a task's results goes: 128 rows of H by 256 columns of an expert's matrix.
struct WeightOutput {
  uint8_t* to;
  bool across;             // the matrix is transposed: each of the columns is a row of it, and H goes along that row
  uint32_t rows, columns;  // how many rows of H and how many columns exist from the first on
  uint64_t row_bytes;      // from row to row of the matrix

  template <class Dtype, bool kTransposedLayer>
  static __device__ __forceinline__ WeightOutput of(const KernelArgs& args, uint32_t group, uint32_t n) {
    const bool of_router = is_of_router(args.call, group);
    const WeightTask task = of_router ? WeightTask::of_router(args, n) : WeightTask::of(args, group, n);
    const uint32_t hidden = args.call.shape.hidden;
    const uint32_t block = kByFragments<Dtype> ? cluster_rank_anew() : cluster_rank();
    const uint32_t first_row = task.first_row + block * (kTaskFeatures / kClusterBlocks);
    const bool across = of_router || task.of_down == kTransposedLayer;
    const uint64_t pitch = across ? hidden : task.columns + task.more;
    const uint32_t bytes = args.backward.accumulates != 0 ? sizeof(float) : Dtype::kBytes;
    const uint32_t column = task.skipped + task.first_column;
    const uint64_t first = across ? column * pitch + first_row : first_row * pitch + column;
    uint8_t* all = of_router      ? args.backward.router_gradient
                   : task.of_down ? args.backward.down_gradient
                                  : args.backward.gate_up_gradient;
    uint32_t expert = of_router ? 0 : group;
    if (!of_router && is_of_shared(args.call.shape, expert)) {
      const bool ups = 2 * task.first_column >= args.backward.z_columns;
      all = task.of_down ? args.options.shared_down_gradient
            : ups        ? args.shared_ups_gradient
                         : args.options.shared_gate_up_gradient;
      expert = 0;
    }
    return {all + (uint64_t{expert} * hidden * task.columns + first) * bytes, across,
            first_row < hidden ? hidden - first_row : 0, task.columns - task.first_column, pitch * bytes};
  }
};

// Stores a warpgroup's 64 rows of H by 256 columns, rounded once.
template <class Dtype>
__device__ __forceinline__ void store_weight_gradients(uint32_t staging, const Lane& at, float (&acc)[1][128],
                                                       const WeightOutput& out) {
  if (out.across) {
    using Row = detail::StagedRow<Dtype, detail::OneProduct, false>;
    const uint32_t group_row = at.group * Row::kColumns, rows = group_row < out.rows ? out.rows - group_row : 0;
    uint8_t* const base = out.to + group_row * Dtype::kBytes;
    detail::store_tokens<Dtype, Row, 1, 256>(
        staging, at, acc, out.columns, rows, [](uint32_t, uint32_t, float (&)[4]) {},
        [&](uint32_t column) { return base + column * out.row_bytes; });
  } else {
    detail::store_rows<Dtype, Columns::kResults>(
        detail::own_staging(staging, at), at, acc[0], out.rows, out.columns,
        [](uint32_t, float&, float&, float, float) {}, [&](uint32_t row) { return out.to + row * out.row_bytes; });
  }
}

// Adds to float32 numbers in global memory. The L2 adds, and no thread waits for it.
__device__ __forceinline__ void add_global(uint8_t* to, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void add_global(uint8_t* to, float low, float high) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(low), "f"(high) : "memory");
}

// Adds a warpgroup's results to float32 numbers in global memory, straight from registers. Each number gets exactly
// one addition, so the result does not depend on an order.
__device__ __forceinline__ void add_weight_gradients(const Lane& at, const float (&acc)[1][128],
                                                     const WeightOutput& out) {
  const uint32_t first_row = at.group * 64 + at.warp * detail::kWarpRows + at.row(), first_column = at.lane % 4 * 2;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t row = first_row + h * 8;
    if (row >= out.rows) continue;
    uint8_t* to = out.to + (out.across ? row * sizeof(float) + first_column * out.row_bytes
                                       : row * out.row_bytes + first_column * sizeof(float));
#pragma unroll
    for (uint32_t j = 0; j < 32; ++j) {
      const uint32_t column = j * 8 + first_column;
      const float low = acc[0][4 * j + 2 * h], high = acc[0][4 * j + 2 * h + 1];
      if (out.across) {
        if (column < out.columns) add_global(to, low);
        if (column + 1 < out.columns) add_global(to + out.row_bytes, high);
      } else if (column < out.columns) {  // then column + 1 exists, too: there is a multiple of 8 columns
        add_global(to, low, high);
      }
      to += out.across ? 8 * out.row_bytes : 8 * sizeof(float);
    }
  }
}

// Stores zeros in place of these results, for an expert without rows.
template <class Dtype>
__device__ __forceinline__ void store_no_gradients(const WeightOutput& out, const Lane& at) {
  const uint32_t skipped = min_of(out.rows, at.group * 64), rows = min_of(out.rows - skipped, 64u);
  const uint32_t columns = min_of(out.columns, kTaskFeatures), thread = at.warp * 32 + at.lane;
  if (out.across) {
    detail::store_zeros(out.to + skipped * Dtype::kBytes, out.row_bytes, 0, columns, rows * Dtype::kBytes, thread);
  } else {
    detail::store_zeros(out.to + skipped * out.row_bytes, out.row_bytes, 0, rows, columns * Dtype::kBytes, thread);
  }
}

}  // namespace flashmoe::sm90

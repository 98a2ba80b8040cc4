// Products with the gradients of a router's logits. Clusters compute these products when the ready queue has no more
// tasks for the clusters:
//
//   router  [E, H]  dlogits^T x       a task has 256 experts by 256 columns of H, and contracts over all tokens
//   dX      [T, H]  dlogits router    a task has 256 tokens by 256 columns of H; added to what Combine has stored
//
// Clusters take these tasks by tickets, like the tasks over an expert's rows (gradients/weights.cuh). TMA loads both
// operands. A task of the router's own gradient is multiplied and stored by the code of the tasks over an expert's
// rows. A task of dX is loaded and multiplied like a task of the backward pass's last product (dX = dZ gate_up). Its
// rows are the gradients of logits, which lie in memory in the order of tokens.
//
// The last warp of each block computes the gradients of logits while the clusters do the experts' tasks, since it has
// no other role left. This warp begins when all returned rows of dX are here. All parts of the gradients of combine
// weights (dS) are then here, too. Then the warp combines its block's pieces. Combining takes longer than the
// experts' tasks. So the consumers of each cluster help to combine, after the cluster's last task of experts or of
// the router's own gradient, and before its first task of dX. A task that needs gradients of logits, or combined
// rows, waits until all blocks have made these. Such a wait counts a fixed number of warps in each block
// (kCombiners): the consumers and the last warp. So with a router no other warps combine. Without a router, all warps
// do.
#pragma once

#include "flashmoe/gpu/router_backward.cuh"
#include "flashmoe/sm90/gradients/returned.cuh"
#include "flashmoe/sm90/gradients/weights.cuh"
#include "flashmoe/sm90/roles/consumer.cuh"
#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// The number of parts of a combine weight's gradient: one for each thread block of each task of dA.
__device__ __forceinline__ uint32_t weight_parts_of(const Call& c) {
  return ceil_div(c.shape.intermediate, kTaskFeatures) * kClusterBlocks;
}

// The warps of a block that combine if there is a router: the consumers and the last warp.
inline constexpr uint32_t kCombiners = kConsumers * kWarpgroup / 32 + 1;
// What a warp that has combined adds to Control::routed. (A block that has the gradients of its logits adds 1.)
inline constexpr uint64_t kOneCombined = uint64_t{1} << 32;

// Counts a warp that has no piece of Combine left. (Without a router, nobody reads this count.)
__device__ __forceinline__ void count_combined(const Call& c) {
  using P = Platform;
  P::sync();  // lanes may have left a wait one by one; also orders all lanes' stores before the count
  if (P::lane() == 0) P::fetch_add_acq_rel(&c.control()->routed.value, kOneCombined);
}

// Waits until all of dX's rows are here. Then computes the gradients of the logits of this block's tokens. False if
// the wait fails. Run by one warp.
template <class Dtype>
__device__ __forceinline__ bool route_back(const KernelArgs& args, const Call& c) {
  using P = Platform;
  if (!wait_for_returns(c)) return false;
  const uint32_t parts = weight_parts_of(c), lanes = lanes_of_token(c.shape), at_once = P::kLanes / lanes;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * at_once; first < c.shape.tokens; first += gridDim.x * at_once) {
    differentiate_logits<Dtype>(args, first, lanes, parts);
  }
  P::sync();  // orders all lanes' stores before the count
  if (P::lane() == 0) P::fetch_add_acq_rel(&c.control()->routed.value, uint64_t{1});
  return true;
}

struct CombinesWithRouter {
  // What each warp does after its role. Without a router, it reduces and combines. With a router, only the last warp
  // of the block goes on: among several ranks it first reduces what other ranks wait for. Then it computes the
  // gradients of logits, and then it combines.
  template <class Dtype, class Returner>
  static __device__ __forceinline__ void combine_and_route(const KernelArgs& args, const Call& c, Returner& returner) {
    const auto routes = [&] { return args.backward.logit_gradients != nullptr; };
    const uint32_t thread = thread_anew();
    if (routes() && thread / 32 != kWarps - 1) return;
    if constexpr (kTrainsInGroup) {
#pragma unroll 1
      for (bool routed = !routes();; routed = true) {  // a loop, because with two copies of run() the kernel spills
        returner.run(c, routed ? Summing::kAll : Summing::kReduces);
        if (routed) break;
        if (!route_back<Dtype>(args, c)) return;
      }
    } else {
      if (routes() && !route_back<Dtype>(args, c)) return;
      returner.run(c);
    }
    count_combined(c);
  }
};

// Waits until all blocks have made what the task needs, and returns the task; the stop if the wait fails. Run by the
// leading clerk (one warp).
template <class Meanwhile>
__device__ __forceinline__ Task wait_for_logits(const Call& c, const Task& task, Meanwhile&& meanwhile) {
  using P = Platform;
  const bool adds = is_of_router_dx(c, task.group());  // whether the task adds to rows that must have been combined
  const uint64_t all = gridDim.x + (adds ? gridDim.x * kCombiners * kOneCombined : 0);
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        uint64_t counted = 0;
        if (P::lane() == 0) counted = P::load_acquire(&c.control()->routed.value, kDevice);
        counted = P::broadcast(counted, 0);
        if ((adds ? counted : counted % kOneCombined) == all) return Step::kDone;
        return meanwhile() ? Step::kProgress : Step::kIdle;
      },
      OsLiveness<P>{c});
  P::sync();  // every lane may now read what lane 0 has acquired
  if (end == WaitEnd::kDone) return task;
  if (end == WaitEnd::kExpired && P::lane() == 0) {
    post_fault<P>(c, {.kind = FaultKind::kLocal, .actor = Actor::kProcessor, .awaited = c.rank, .culprit = c.rank});
  }
  return {TaskKind::kStop};
}

// The tasks that a cluster does after the queue's stop, for the leading clerk (one warp).
class TasksBehindStop {
 public:
  __device__ __forceinline__ explicit TasksBehindStop(const KernelArgs& args)
      : combines_(args.backward.logit_gradients != nullptr) {}

  template <class Meanwhile>
  __device__ __forceinline__ Task next(const KernelArgs& args, const Call& c, Meanwhile&& meanwhile) {
    Task task = held_.kind != TaskKind::kNone ? held_ : take_weight_task(args, c);
    held_.kind = TaskKind::kNone;
    const bool of_experts = task.kind == TaskKind::kBehindStop && !is_of_router_dx(c, task.group());
    if (combines_ && !of_experts) {
      combines_ = false;
      held_ = task;
      return {TaskKind::kBehindStop, 0, kCombines};
    }
    if (task.kind == TaskKind::kBehindStop && is_of_router(c, task.group())) task = wait_for_logits(c, task, meanwhile);
    return task;
  }

 private:
  bool combines_;  // the cluster still has to be told to combine
  Task held_;
};

// Fills the slot with this block's share of a task of dX. Run by the block's clerk (one warp).
template <class Dtype>
__device__ __forceinline__ void look_up_router_dx(const KernelArgs& args, const Call& c, const Task& task,
                                                  TaskSlot& slot) {
  using P = Platform;
  const uint32_t tile = task.group() - weight_groups(c.shape) - 1, first = cluster_rank() * Wide::kTokens;
  const uint32_t left = c.shape.tokens - tile * kTileTokens;
  const uint32_t rows = left > first ? min_of(left - first, Wide::kTokens) : 0;
#pragma unroll 1
  for (uint32_t r = P::lane(); r < Wide::kTokens; r += P::kLanes) {
    const uint64_t token = tile * kTileTokens + first + r;
    slot.to[r] = reinterpret_cast<uint64_t>(args.dx() + token * c.memory.return_row_bytes);
    slot.weights[r] = 1.0f;
  }
  if (P::lane() != 0) return;
  slot.of = task.of;
  slot.tile = tile;
  slot.expert = weight_groups(c.shape);
  slot.column = task.column;
  slot.slices = 1;
  slot.k_bytes = gate_experts_of(c.shape) * Dtype::kBytes;
  slot.share = {.wide = true, .first = first, .rows = rows, .cover = Wide::kTokens};
}

// Run by the loaders: load all stages of a task of dX, or of a task of the router's own gradient. In both, the first
// loader thread loads everything.
template <class Dtype, class Count>
__device__ __forceinline__ void load_router_dx(const KernelArgs& args, const TaskSlot& slot, Pipeline& ring,
                                               Count&& count) {
  const uint32_t box = slot.column * kClusterBlocks + cluster_rank();
  const FeatureSpans features{&args.router, box * kBoxFeatures, false, 0, false};
  const BoxRows rows{&args.logit_gradient_rows(), slot.tile * kTileTokens + slot.share.first, slot.share.rows};
  load_stages<Dtype>(ring, true, features, rows, NoScales{}, slot.k_bytes, count);
}
template <class Dtype, class Count>
__device__ __forceinline__ void load_router_weights(const KernelArgs& args, const TaskSlot& slot, Pipeline& ring,
                                                    Count&& count) {
  const uint32_t blocks = ceil_div(args.call.shape.hidden, kTaskFeatures), stages = Wide::stages(slot.k_bytes);
  if (threadIdx.x == kFirstLoader) {
    const uint32_t first_row = (slot.column % blocks * kClusterBlocks + cluster_rank()) * kBoxFeatures;
    const uint32_t first_column = slot.column / blocks * kTaskFeatures + cluster_rank() * kBoxFeatures;
    const FeatureSpans experts{&args.backward.logit_columns, first_column, false, 0, false};
    Pipeline at = ring;
    fence_proxy_async_global();  // gradients of logits were stored through the generic proxy
#pragma unroll 1
    for (uint32_t s = 0; s < stages; ++s, at.advance()) {
      wait(at.empty(), at.parity);
      arrive(at.full(), kLoaders);
      arrive_expect_tx(at.full(), Wide::kFeatureBytes + kBoxBytes);
      experts.template load<Dtype, Wide>(at, s * kRowsOfStage<Dtype> * Dtype::kBytes);
      count();
#pragma unroll
      for (uint32_t span = 0; span < kBoxBytes / span_bytes(Dtype::kBytes); ++span) {
        tma_load(at.data() + Wide::tokens(0) + span * span_bytes(Dtype::kBytes), &args.backward.x_columns, at.full(),
                 first_row + span * span_side(Dtype::kBytes), s * kRowsOfStage<Dtype>, 0, 0, 0, kEvictNormally);
      }
    }
  }
  __syncwarp();
  ring.advance(stages);
}

// A consumer warpgroup's part of a task of dX.
template <class Dtype>
__device__ __forceinline__ void compute_router_dx(const KernelArgs& args, const TaskSlot& slot, Pipeline& ring) {
  using Shape = TokensByFeatures<Wide, Major::kMn>;
  const auto consumer = Consumer::of_group(ring, threadIdx.x / kWarpgroup);
  Accumulators<Shape> acc;
  multiply<Dtype, Shape>(ring, consumer.group, Wide::stages(slot.k_bytes), false, acc);
  store_returned_rows<Dtype, true>(consumer.staging, Lane::of_thread(consumer.group), acc, nullptr, slot.share.rows,
                                   slot.column * kTaskFeatures, args.call.shape.hidden, slot.weights, slot.to);
}

struct AddsRouterDx {
  // Run by a consumer warpgroup: does task n, which combines (kCombines), and then the tasks of dX. These have a loop
  // of their own because what combining keeps in registers would leave too few registers for the tasks before task n.
  template <class Dtype, class Trace, class WarpTrace>
  static __device__ __forceinline__ void combine_and_add(const KernelArgs& args, const Call& c, Shared& s,
                                                         Pipeline& ring, uint32_t n, const Trace& trace,
                                                         const WarpTrace& each_warp) {
    trace.end(Phase::kWait, s.ring.at(n).tile, 0);
    SumEngine<Dtype, WarpTrace> sums(c, args.dx(), each_warp);
    Returner<Platform, SumEngine<Dtype, WarpTrace>, CursorOfWarp> returner(c, sums, s.returns);
    each_warp.begin(1);
    returner.run(c);
    each_warp.end(Phase::kReturn, blockIdx.x, 0, 1);
    count_combined(c);
    trace.begin();
    s.ring.put_done(n);
#pragma unroll 1
    for (++n;; ++n) {
      const TaskSlot& slot = s.ring.wait_full(n);
      if (slot.kind == TaskKind::kStop) {
        trace.end(Phase::kWait, 0, 0);
        return;
      }
      trace.end(Phase::kWait, slot.tile, slot.column);
      compute_router_dx<Dtype>(args, slot, ring);
      trace.end_product(phase_of_product(slot.kind), slot.tile, slot.column, kNoExpert);
      s.ring.put_done(n);
    }
  }
};

}  // namespace flashmoe::sm90

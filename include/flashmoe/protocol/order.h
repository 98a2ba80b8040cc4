// The order in which ready tasks are published: data (OrderPolicy), and a pure function of what is ready (choose).
#pragma once

#include "flashmoe/protocol/heap_layout.h"
#include "flashmoe/protocol/task.h"

namespace flashmoe {

inline constexpr uint32_t kMaxRaster = 32;

struct OrderPolicy {
  // A field that has this value, in a policy that a user gives, is left to the engine.
  static constexpr uint32_t kBuiltIn = 0xffffffffu;

  // While GEMM0 tasks are ready, a GEMM1 task is published only if at least this many more tasks of GEMM0 than of
  // GEMM1 have been published. The reason: early returns would slow down dispatch, which shares the link. (132: the
  // first GEMM1 task follows 132 of GEMM0.) 0: GEMM1 tasks are never held back.
  uint32_t gemm1_lag = 0;
  // The most tiles of a band, in [1, kMaxRaster]. The tasks of a band are published column by column: the first block
  // of columns of each tile, then the second block of each, and so on. So the tiles of an expert use the weights of a
  // block, and the blocks of a tile use its rows, while both are in the cache. (GEMM1 has bands for one return group
  // after the other, COMET section 3.1.2, so that the first columns of all tiles travel while the last are computed.)
  uint32_t raster = 1;
  // The most tasks that are published ahead of those that processors have asked for. A task that becomes ready later
  // waits behind them. With 0, the order is decided as late as possible. With a few, processors need not wait for the
  // scheduler.
  uint32_t window = 0;
  // 2: tiles with rows of other ranks go first in GEMM1, since their results have to travel. 1: tiles go as they become
  // ready, so that an expert's tiles run side by side, with own rows or others', and its weights are read once.
  uint32_t gemm1_lists = kMaxGemm1Lists;
  // If this is n, the tiles of the first El / n routed local experts (rounded up) do not wait for other ranks' packets.
  // The former announces them by its usual rules. The other experts' tiles wait until all packets of some other rank
  // are here. So an expert's tiles, those with own rows and those with other ranks' rows, run side by side, and its
  // weights are read less often. The tiles of the first experts fill the time until then. 1 or 0: no expert waits.
  uint32_t own_first = 1;
  // The number of thread blocks all of whose warps send this rank's rows before they compute (GPU, several ranks).
  uint32_t senders = 0;
  // With the reduced return, this number of clusters get their stop words once the scheduler has published as many
  // GEMM1 tasks as the first return group has. From then on all of their warps sum and send what other ranks wait for
  // (Reduce), while the other clusters compute the later groups (COMET, section 3.2: thread blocks that only
  // communicate). Between tasks those others leave Reduce alone. 0: no cluster stops early, and all take Reduce between
  // tasks. No bit of a result depends on the number.
  uint32_t link_clusters = 0;

  // A policy that leaves every field to the engine.
  static constexpr OrderPolicy built_in() {
    return {kBuiltIn, kBuiltIn, kBuiltIn, kBuiltIn, kBuiltIn, kBuiltIn, kBuiltIn};
  }
};

// What choose() looks at: for each product, whether a task is ready, and how many were published in this call.
struct ReadyState {
  bool product[kProducts] = {};
  uint64_t published[kProducts] = {};
};

// The product whose task is published next. It is GEMM1, whose results return, because it completes rows, if a task
// of it is ready and gemm1_lag does not hold it back; else the first product in the program's table with a ready
// task. kNone only if no task is ready. (Reduce and Combine have no order: workers without a task take them,
// actors/returner.h.)
FLASHMOE_FN TaskKind choose(const OrderPolicy& policy, const ReadyState& ready) {
  const bool held = policy.gemm1_lag != 0 && ready.product[kBeforeReturning] &&
                    ready.published[kReturning] + policy.gemm1_lag > ready.published[kBeforeReturning];
  if (ready.product[kReturning] && !held) return Product<kReturning>::kKind;
  TaskKind kind = TaskKind::kNone;
  for_each_product([&]<uint32_t n>() {
    if (kind == TaskKind::kNone && ready.product[n]) kind = Product<n>::kKind;
  });
  return kind;
}

}  // namespace flashmoe

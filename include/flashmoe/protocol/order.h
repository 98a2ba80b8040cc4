// The order in which ready tasks are published: data, and a pure function of what is ready.
#pragma once

#include "flashmoe/protocol/heap_layout.h"
#include "flashmoe/protocol/task.h"

namespace flashmoe {

inline constexpr uint32_t kMaxRaster = 32;

struct OrderPolicy {
  // GEMM1 is held back until it trails GEMM0 by this many tasks, as long as GEMM0 tasks are ready: early return
  // traffic starves dispatch, which shares the link. 0: never held back.
  uint32_t gemm1_lag = 0;
  // Tiles whose tasks are ordered column by column: the tiles of such a band use a column's weights, and the columns
  // a tile's rows, while both are in the cache. In [1, kMaxRaster]. (Between bands GEMM1 goes by return group, COMET
  // section 3.1.2: the first columns of all tiles travel while the last are computed.)
  uint32_t raster = 1;
  // Tasks published beyond those already asked for: what becomes ready later waits behind them. 0 binds latest; a few hide
  // the scheduler's latency.
  uint32_t window = 0;
  // 2: GEMM1's tiles with rows of remote homes go first, since these have a way to go. 1: all go as they are ready, so that an
  // expert's tiles run side by side, whosever rows they have, and its weights are read once.
  uint32_t gemm1_lists = kMaxGemm1Lists;
  // One in so many local experts, the first of them, has the tiles of this rank's own rows announced as they fill. The others'
  // wait until all of another rank's rows are here, so that an expert's tiles run side by side and its weights are read less
  // often; the first ones' bridge the time until then. 1, and 0: none waits.
  uint32_t own_first = 1;
  // Thread blocks that first send this rank's rows, all their warps, and then compute (GPU, several ranks).
  uint32_t senders = 0;
};

// What is ready and what was published, as the choice sees it.
struct ReadyState {
  bool product[kProducts] = {};
  uint64_t published[kProducts] = {};
};

// First the product whose results return, since it completes rows, unless the lag holds it back behind the one that it
// follows; the others as the table has them. Never kNone while something is ready. (Reduce and Combine are nobody's to order: idle
// processors take them, actors/returner.h.)
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

// Which ready tiles the next band of tasks takes.
#pragma once

#include "flashmoe/protocol/order.h"
#include "flashmoe/protocol/platform.h"
#include "flashmoe/protocol/task.h"

namespace flashmoe {

// The first `most` ready tiles, as they come. All lanes of a warp.
template <class P>
FLASHMOE_FN void take_in_order(uint32_t* to, uint32_t most, const uint64_t* ready) {
  P::sync();
  for (uint32_t i = P::lane(); i < most; i += P::kLanes) to[i] = Task::unpack(ready[i]).index;
  P::sync();
}

// `most` of n ready tiles, most <= min(n, kMaxRaster). Of those within sight it takes the first, then the others of that
// expert, then the first of what is left, and so on: with several ranks the experts' tiles fill side by side, and taken as
// they come, each would have its expert's weights read anew. What is passed over moves back, in order; the list keeps all
// tiles, since GEMM1's is gone through once for each return group. All lanes of a warp.
template <class P>
FLASHMOE_FN void take_by_expert(uint32_t* to, uint32_t most, uint32_t n, uint64_t* ready) {
  // Tiles within a lane's sight: in all at least as many as a band has.
  constexpr uint32_t kAhead = max_of(4u, kMaxRaster / P::kLanes);
  constexpr uint32_t kNone = 0xffffffffu;
  uint64_t word[kAhead];
  uint32_t expert[kAhead];    // kNone: no tile
  uint32_t left[kAhead];      // lanes whose tile's expert has not had its turn
  uint32_t position[kAhead];  // in the band and the list, if it is taken
  P::sync();
  FLASHMOE_UNROLL
  for (uint32_t j = 0; j < kAhead; ++j) {
    const uint32_t i = j * P::kLanes + P::lane();
    word[j] = i < n ? ready[i] : 0;
    expert[j] = i < n ? ReadyTile::expert(Task::unpack(word[j])) : kNone;
    left[j] = P::ballot(i < n);
    position[j] = kNone;
  }
  // A turn is short, since tasks of a few k-blocks are computed as fast as a band of them is put together.
  for (uint32_t taken = 0; taken < most;) {
    uint32_t lanes = left[0], turn = expert[0];
    FLASHMOE_UNROLL
    for (uint32_t j = 1; j < kAhead; ++j) {
      turn = lanes != 0 ? turn : expert[j];
      lanes = lanes != 0 ? lanes : left[j];
    }
    turn = P::broadcast(turn, lowest_bit<P>(lanes));
    FLASHMOE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t same = P::ballot(expert[j] == turn);
      const uint32_t at = taken + P::popcount(same & ((1u << P::lane()) - 1));
      if (expert[j] == turn && at < most) position[j] = at;
      left[j] &= ~same;
      taken += P::popcount(same);
    }
  }
  P::sync();  // all lanes have read what others now overwrite
  uint32_t end = most;
  FLASHMOE_UNROLL
  for (uint32_t j = 0; j < kAhead; ++j) {
    const bool passed = expert[j] != kNone && position[j] == kNone;
    uint32_t total;
    const uint32_t back = end + count_before<P>(passed, total), at = passed ? back : position[j];
    end += total;
    if (expert[j] == kNone) continue;
    if (!passed) to[at] = Task::unpack(word[j]).index;
    if (at != j * P::kLanes + P::lane()) ready[at] = word[j];
  }
  P::sync();
}

}  // namespace flashmoe

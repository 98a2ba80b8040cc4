// Which ready tiles the next band of tasks takes.
#pragma once

#include "flashmoe/protocol/order.h"
#include "flashmoe/protocol/platform.h"
#include "flashmoe/protocol/task.h"

namespace flashmoe {

// Takes the first `most` ready tiles, in the order in which they became ready. All lanes of a warp.
template <class P>
FLASHMOE_FN void take_in_order(TileIndex* to, uint32_t most, const uint64_t* ready) {
  P::sync();
  for (uint32_t i = P::lane(); i < most; i += P::kLanes) to[i] = Ready::unpack(ready[i]).tile();
  P::sync();
}

// Takes `most` of n ready tiles, most <= min(n, kMaxRaster), expert by expert: the first tile and all others of its
// expert, then the first that is left and the others of its expert, and so on, among the first kAhead * kLanes tiles
// (GPU: 128). From ready tiles of experts A B A C B, a band of three is A A B. The reason: with several ranks, tiles
// of several experts fill at the same time; if they were taken in the order in which they became ready, each would
// need its expert's weights to be read anew. The tiles that are not taken (C B) move back in the list, in order. The
// tiles that are taken come first in the list, because the scheduler goes through GEMM1's list once for each return
// group. All lanes of a warp.
template <class P>
FLASHMOE_FN void take_by_expert(TileIndex* to, uint32_t most, uint32_t n, uint64_t* ready) {
  // The number of tiles that a lane looks at. All lanes together look at no fewer tiles than a band may have.
  constexpr uint32_t kAhead = max_of(4u, kMaxRaster / P::kLanes);
  constexpr uint32_t kNone = 0xffffffffu;
  uint64_t word[kAhead];
  uint32_t expert[kAhead];    // kNone: no tile
  uint32_t left[kAhead];      // bit i: lane i has a tile whose expert has not had its turn
  uint32_t position[kAhead];  // the tile's place in the band and in the list, if it is taken
  P::sync();
  FLASHMOE_UNROLL
  for (uint32_t j = 0; j < kAhead; ++j) {
    const uint32_t i = j * P::kLanes + P::lane();
    word[j] = i < n ? ready[i] : 0;
    expert[j] = i < n ? Ready::unpack(word[j]).expert() : kNone;
    left[j] = P::ballot(i < n);
    position[j] = kNone;
  }
  // Each round of this loop takes the tiles of one expert. A round has few instructions, because a band of short tasks
  // is computed in about the time that this function takes to choose the next band.
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
    if (!passed) to[at] = Ready::unpack(word[j]).tile();
    if (at != j * P::kLanes + P::lane()) ready[at] = word[j];
  }
  P::sync();
}

}  // namespace flashmoe

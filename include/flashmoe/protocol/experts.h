// Products of a whole expert: ready when all of its tiles are formed, and done with the product that this one follows.
//
// One counter per expert and product. A tile that is done adds 1; the expert's former, when it has formed the last of n
// tiles, adds kExpertFormed - n (kExpertFormed, if the product waits for no tile to be done). The add that brings the
// counter to kExpertFormed, a tile's or the former's, makes the expert ready; whoever made it resets the counter.
#pragma once

#include "flashmoe/protocol/ready_list.h"

namespace flashmoe {

inline constexpr uint64_t kExpertFormed = uint64_t{1} << 32;

// Lanes with `has` add `change` to the counter of product m and local expert l. All lanes call it.
template <uint32_t m, class P>
FLASHMOE_FN void change_expert(const Call& c, bool has, uint32_t l, uint64_t change) {
  bool complete = false;
  if (has) {
    uint64_t* counter = &c.expert_state(l)->done[Product<m>::kExpertSlot];
    complete = P::fetch_add_acq_rel(counter, change) + change == kExpertFormed;
    if (complete) P::store_relaxed(counter, uint64_t{0});
  }
  push_ready<P>(c, complete, {Product<m>::kKind, ReadyTile::column(l, 0), l});
}

// All tiles of local expert l, `tiles` in number, are announced. All lanes.
template <class P>
FLASHMOE_FN void close_expert(const Call& c, uint32_t l, uint32_t tiles) {
  if constexpr (kExpertProducts != 0 || kIsBackward || kTrainsInGroup) {
    if (P::lane() == 0) c.expert_state(l)->tiles = tiles;
    for_each_product([&]<uint32_t m>() {
      if constexpr (Product<m>::kOfExpert) {
        const uint64_t waits_for = Product<m>::kAfter == TaskKind::kFormed ? 0 : tiles;
        change_expert<m, P>(c, P::lane() == 0, l, kExpertFormed - waits_for);
      }
    });
  }
}

}  // namespace flashmoe

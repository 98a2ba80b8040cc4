// Products of a whole expert: ready when all of its tiles are formed, and done as far as the product waits for them.
//
// One counter per expert and product. Tiles that are done add one each; the former of the expert, when it has formed them all,
// adds kFormed less their number. Whoever brings it to kFormed, the last tile or the former, has completed it and resets it.
#pragma once

#include "flashmoe/protocol/ready_list.h"

namespace flashmoe {

inline constexpr uint64_t kExpertFormed = uint64_t{1} << 32;

// Product m has `change` more of what it waits for of local expert l. By the lanes with `has`; called by all.
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

// Local expert l has so many tiles, all announced. All lanes.
template <class P>
FLASHMOE_FN void close_expert(const Call& c, uint32_t l, uint32_t tiles) {
  if constexpr (kExpertProducts != 0) {
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

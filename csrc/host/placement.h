// Which rank holds which expert, as the protocol looks it up (Call::owner, by_owner, owner_base).
#pragma once

#include <vector>

#include "flashmoe/protocol/heap_layout.h"

namespace flashmoe::host {

struct PlacementTables {
  std::vector<uint32_t> owner;       // [E, and the shared expert]
  std::vector<uint32_t> by_owner;    // as many experts, ascending by (owner, expert)
  std::vector<uint32_t> owner_base;  // [R + 1] where each rank's experts begin in by_owner

  uint32_t local_experts(uint32_t rank) const { return owner_base[rank + 1] - owner_base[rank]; }
};

// As `rank` looks it up, which behind its own experts has a shared one, if there is one. Throws Error where an owner is no
// rank, or one holds more experts than other ranks' heaps have room for.
PlacementTables placement_tables(const std::vector<uint32_t>& owners, const Limits& limits, uint32_t rank, bool shared);

}  // namespace flashmoe::host

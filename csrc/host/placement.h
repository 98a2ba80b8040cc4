// Which ranks hold which expert: in the form that a caller gives, and in the form that the protocol looks up
// (CallPlacement).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "flashmoe/protocol/call.h"

namespace flashmoe::host {

// The ranks that hold each expert. If there are several, each of them has a copy of all the expert's weights.
class Holders {
 public:
  // Adds the next expert, and says that this rank holds it.
  void expert(uint32_t rank) {
    begin_.push_back(ranks_.size());
    ranks_.push_back(rank);
  }
  // Says that one more rank holds the expert added last.
  void copy(uint32_t rank) { ranks_.push_back(rank); }

  uint32_t experts() const { return static_cast<uint32_t>(begin_.size()); }
  std::span<const uint32_t> of(uint32_t expert) const;
  // The rank to which `rank` sends all its tokens of the expert. This is `rank` itself if it holds a copy. The ranks
  // that hold no copy are distributed over the holders: in ascending order, each is given the next holder in turn.
  uint32_t for_rank(uint32_t expert, uint32_t rank) const;
  bool operator==(const Holders&) const = default;
  auto operator<=>(const Holders&) const = default;

 private:
  std::vector<uint32_t> ranks_;
  std::vector<size_t> begin_;  // [E] where each expert's holders begin in ranks_
};

struct PlacementTables {
  std::vector<uint32_t> owner;       // [E, and the shared expert]
  std::vector<uint32_t> by_owner;    // each rank's local experts, see CallPlacement
  std::vector<uint32_t> owner_base;  // [R + 1] where each rank's experts begin in by_owner

  uint32_t local_experts(uint32_t rank) const { return owner_base[rank + 1] - owner_base[rank]; }
};

// The tables of `rank`. If there is a shared expert, it follows the rank's own experts. Throws Error if a holder is not
// a rank, is named twice for one expert, or has more experts than other ranks' heaps have room for.
PlacementTables placement_tables(const Holders& holders, const Limits& limits, uint32_t rank, bool shared);

}  // namespace flashmoe::host

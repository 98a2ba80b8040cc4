// Which ranks hold which expert, as a caller says it and as the protocol looks it up (CallPlacement).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "flashmoe/protocol/call.h"

namespace flashmoe::host {

// The ranks that hold each expert: one, or more, each of which then has a copy of its weights.
class Holders {
 public:
  // The next expert, held by that rank.
  void expert(uint32_t rank) {
    begin_.push_back(ranks_.size());
    ranks_.push_back(rank);
  }
  // One more rank that holds the last expert.
  void copy(uint32_t rank) { ranks_.push_back(rank); }

  uint32_t experts() const { return static_cast<uint32_t>(begin_.size()); }
  std::span<const uint32_t> of(uint32_t expert) const;
  // That of the copies to which `rank` sends all its tokens of the expert: its own, if it has one. The ranks that have
  // none are dealt out, ascending, to the holders in turn.
  uint32_t for_rank(uint32_t expert, uint32_t rank) const;
  bool operator==(const Holders&) const = default;
  auto operator<=>(const Holders&) const = default;

 private:
  std::vector<uint32_t> ranks_;
  std::vector<size_t> begin_;  // [E] where each expert's begin in ranks_
};

struct PlacementTables {
  std::vector<uint32_t> owner;       // [E, and the shared expert]
  std::vector<uint32_t> by_owner;    // each rank's local experts, see CallPlacement
  std::vector<uint32_t> owner_base;  // [R + 1] where each rank's experts begin in by_owner

  uint32_t local_experts(uint32_t rank) const { return owner_base[rank + 1] - owner_base[rank]; }
};

// As `rank` looks it up, which behind its own experts has a shared one, if there is one. Throws Error where a holder is no
// rank, or has an expert twice, or more experts than other ranks' heaps have room for.
PlacementTables placement_tables(const Holders& holders, const Limits& limits, uint32_t rank, bool shared);

}  // namespace flashmoe::host

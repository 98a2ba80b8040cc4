// How the ranks of a group are spread over machines: the tables that the protocol looks up (protocol/machines.h).
#pragma once

#include <vector>

#include "flashmoe/protocol/machines.h"

namespace flashmoe::host {

// The most bytes of rows in one message to a relay. They are enough to keep a network busy, and few enough that the
// relay passes on the first messages while others are on their way. Tests set a smaller number, before there are
// calls.
inline uint64_t batch_bytes = 512 << 10;

class MachineTables {
 public:
  // of: the machine of each rank, by any numbers; empty: all ranks are on one machine. Throws Error if there is not one
  // number for each rank.
  MachineTables(const std::vector<uint32_t>& of, uint32_t ranks, uint32_t rank);

  // Sets the limits that say how much of every rank's heap the relays need.
  void set(Limits& limits) const;
  // The tables in the protocol's form, for heaps of these limits. They point to this object's memory.
  Machines machines(const Limits& limits);
  // Zeroes what relays have counted. Needed after a call that was not completed.
  void clear();

 private:
  uint32_t count_ = 0, most_ = 0, fewest_ = 0;
  Machines::Counts counts_[2] = {};
  std::vector<uint32_t> of_, place_, ranks_, first_, sources_;
  std::vector<uint64_t> passed_;
};

}  // namespace flashmoe::host

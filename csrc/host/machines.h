// How the ranks of a group are spread over machines: the tables that the protocol looks up (protocol/machines.h).
#pragma once

#include <vector>

#include "flashmoe/protocol/machines.h"

namespace flashmoe::host {

// Rows of a message to a relay: enough bytes for a network to be busy with, and few enough that the first are passed on
// while others are on their way. Tests make it smaller, before there are calls.
inline uint64_t batch_bytes = 512 << 10;

class MachineTables {
 public:
  // of: the machine of each rank, by any numbers; empty: all are on one. Throws Error where they are not as many as ranks.
  MachineTables(const std::vector<uint32_t>& of, uint32_t ranks, uint32_t rank);

  // What they need of every rank's heap.
  void set(Limits& limits) const;
  // As the protocol has them, in heaps of these limits; they point to this object's memory.
  Machines machines(const Limits& limits);
  // Forgets what relays have counted, as behind a call that was not carried through.
  void clear();

 private:
  uint32_t count_ = 0, most_ = 0, fewest_ = 0;
  Machines::Counts counts_[2] = {};
  std::vector<uint32_t> of_, place_, ranks_, first_, sources_;
  std::vector<uint64_t> passed_;
};

}  // namespace flashmoe::host

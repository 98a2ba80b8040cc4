// Memory of simulated ranks: symmetric heaps in which another source's place is a constant distance away, so that one rank's
// heap can stand for those of others (Group).
#pragma once

#include "flashmoe/protocol/machines.h"
#include "sim/world.h"

namespace flashmoe::sim {

// All that one source writes lies together, source by source; behind that, what a relay has of each source, whose slots are as
// far apart as the sources of two machines: so the same distance leads from machine to machine in both.
//
// Rows are never written. A byte stands for each, behind all that there is memory for.
struct SourceLayout {
  SourceLayout(const Limits& limits, uint32_t gpus);

  HeapLayout heap;
  RelayLayout relay;
  uint64_t first_source = 0, source_bytes = 0;
  uint64_t first_slot = 0, slot_bytes = 0, signal_bytes = 0;  // signal_bytes: of batches' signals, where a slot begins
  uint64_t bytes = 0;
  SignalMap signals;  // without base and ranks

 private:
  void place_sources(const Limits& limits);
  uint64_t place_slots(const Limits& limits);
};

}  // namespace flashmoe::sim

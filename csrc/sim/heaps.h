// Memory of simulated ranks: symmetric heaps in which neighbouring sources' places are a constant distance apart. So
// one rank's heap can stand for the heaps of others (Group).
#pragma once

#include "flashmoe/protocol/machines.h"
#include "sim/world.h"

namespace flashmoe::sim {

// All fields that one source writes lie together, source by source. Behind them lies what a relay has of each source,
// slot by slot. The distance of two slots is the distance of the sources of two neighbouring machines. So in both parts
// the same distance leads from machine to machine.
//
// Rows are never written. A byte stands for each row, at an address behind all memory that is there.
struct SourceLayout {
  SourceLayout(const Limits& limits, uint32_t gpus);

  HeapLayout heap;
  RelayLayout relay;
  uint64_t first_source = 0, source_bytes = 0;
  uint64_t first_slot = 0, slot_bytes = 0, signal_bytes = 0;  // signal_bytes: of batches' signals, with which a slot
                                                              // begins
  uint64_t bytes = 0;
  SignalMap signals;  // base and ranks are left unset

 private:
  void place_sources(const Limits& limits);
  uint64_t place_slots(const Limits& limits);
};

}  // namespace flashmoe::sim

// The layout of simulated ranks' symmetric heaps. In such a heap, the fields of neighbouring sources are a constant
// distance apart, so that one rank's heap can stand for the heaps of other ranks (Group).
#pragma once

#include "flashmoe/protocol/machines.h"
#include "sim/world.h"

namespace flashmoe::sim {

// All fields that one source writes lie together, source by source. Behind them lies what a relay has for each
// source, slot by slot. A slot is as large as the fields of all sources of one machine together. So in both parts,
// the same distance leads from one machine to the next.
//
// Rows are never written, so they need no memory. Their addresses lie behind all memory that is there.
struct SourceLayout {
  SourceLayout(const Limits& limits, uint32_t gpus);

  HeapLayout heap;
  RelayLayout relay;
  uint64_t first_source = 0, source_bytes = 0;
  uint64_t first_slot = 0, slot_bytes = 0, signal_bytes = 0;  // signal_bytes: of the batches' signals, which lie at
                                                              // the beginning of a slot
  uint64_t bytes = 0;
  SignalMap signals;  // base and ranks are left unset

 private:
  void place_sources(const Limits& limits);
  uint64_t place_slots(const Limits& limits);
};

}  // namespace flashmoe::sim

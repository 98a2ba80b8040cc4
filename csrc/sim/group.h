// The simulated ranks: their memory, who is whose peer, and how words and rows travel between them.
//
// Ranks of all machines are simulated, or (folded) those of the first machine alone, where every machine does the same: then
// what is sent d machines on arrives here as if from d machines back. With routing that is the same on every machine, counted
// from itself, this is no approximation: the group is mapped to itself by a step of one machine.
#pragma once

#include <vector>

#include "flashmoe/protocol/call.h"
#include "sim/links.h"
#include "sim/world.h"

namespace flashmoe::sim {

// Zeroed memory of which pages are there when they are touched.
class Pages {
 public:
  explicit Pages(uint64_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* base() const { return base_; }

 private:
  uint64_t bytes_;
  uint8_t* base_;
};

// A symmetric heap in which all that one source writes lies together, so that the place of another source is a multiple of
// source_bytes away. Rows are never written: they lie behind all that there is memory for.
struct SourceLayout {
  explicit SourceLayout(const Limits& limits);
  HeapLayout layout;
  uint64_t first_source = 0, source_bytes = 0, bytes = 0;
  SignalMap signals;  // without base and ranks
};

class Group {
 public:
  Group(const Machine& machine, const Limits& limits, uint32_t machines, bool folded);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // The group of the running lane.
  static Group& of_lane() { return *group_; }

  uint32_t ranks() const { return ranks_; }
  uint32_t gpus() const { return gpus_; }
  uint32_t simulated() const { return simulated_; }
  const HeapLayout& heap_layout() const { return source_.layout; }
  const Machine& machine() const { return machine_; }
  Links& links() { return links_; }
  World& world() { return world_; }
  uint8_t* work(uint32_t rank) const { return pages_.base() + work_at_ + rank * work_stride_; }
  // [ranks] of a simulated rank: every rank's heap as it addresses it.
  std::vector<uint8_t*> heaps_of(uint32_t rank) const;

  struct Peer {
    uint32_t rank;  // the simulated rank that stands for it
    bool remote;    // of another machine
    uint8_t* heap;  // its heap, as `from` addresses it
  };
  Peer peer(uint32_t from, uint32_t to) const;

  // When a word that a rank stores is visible where it lies; what it signals is counted as sent.
  Time signalled(uint32_t from, const uint64_t* word, uint64_t value, Time at);
  // Puts bytes to the place in `to`'s heap that `at_home` has in the own. Copies what there is memory for.
  Links::Transfer put(uint32_t from, uint32_t to, void* at_home, const void* data, uint64_t bytes, Time at);
  // The word in `to`'s heap at the place that this one has in the own.
  uint64_t* word_of(uint32_t from, uint32_t to, uint64_t* at_home) const;

 private:
  static Group* group_;

  const Machine& machine_;
  const uint32_t ranks_, gpus_, simulated_;
  const bool folded_;
  const SourceLayout source_;
  const uint64_t heap_stride_, work_stride_, work_at_;
  Pages pages_;
  World world_;
  Links links_;
};

}  // namespace flashmoe::sim

// The simulated ranks: their memory, who is whose peer, and how words and rows travel between them.
//
// Ranks of all machines are simulated, or (folded) those of the first machine alone, where every machine does the same: then
// what is sent d machines on arrives here as if from d machines back. With routing that is the same on every machine, counted
// from itself, this is no approximation: the group is mapped to itself by a step of one machine.
#pragma once

#include <vector>

#include "host/mapping.h"
#include "sim/heaps.h"
#include "sim/links.h"

namespace flashmoe::sim {

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
  const HeapLayout& heap_layout() const { return layout_.heap; }
  const Machine& machine() const { return machine_; }
  Links& links() { return links_; }
  World& world() { return world_; }
  uint8_t* work(uint32_t rank) const { return memory_.base() + work_at_ + rank * work_stride_; }
  // [ranks] of a simulated rank: every rank's heap as it addresses it.
  std::vector<uint8_t*> heaps_of(uint32_t rank) const;

  // Where relays' fields lie, of those of the own machine and of the others': where a rank's heap stands for another's, what
  // is sent there has a slot as of a source further back.
  const RelayLayout& relay_layout() const { return layout_.relay; }
  uint64_t behind_own() const { return layout_.slot_bytes; }
  uint64_t behind_others() const { return folded_ ? 0 : layout_.slot_bytes; }
  // A rank's call, and that of its senders: they say what a message carries.
  void set_calls(uint32_t rank, const SpreadCall& call, const SpreadCall& sending) { calls_[rank] = {&call, &sending}; }

  struct Peer {
    uint32_t rank;  // the simulated rank that stands for it
    bool remote;    // of another machine
  };
  Peer peer(uint32_t from, uint32_t to) const;
  // To a rank of the same machine, by its number in the group.
  Links::Transfer send(uint32_t from, uint32_t to, uint64_t bytes, Time at) {
    return links_.send(from, peer(from, to).rank, bytes, at);
  }

  // A rank stores a word, which is visible later where it lies. What it signals to another machine is sent with it, a message.
  void signal(uint32_t from, uint64_t* word, uint64_t value, Time at);

 private:
  static Group* group_;

  // The rank that a simulated one stands for, as seen by one that seems to be so many machines back.
  uint32_t rank_of(uint32_t simulated, uint64_t machines_back) const {
    return folded_ ? static_cast<uint32_t>((ranks_ - machines_back * gpus_) % ranks_) + simulated : simulated;
  }
  struct Message {
    uint32_t from, to;  // simulated ranks
    uint64_t bytes;
    uint64_t* word;
    uint64_t value;
  };
  uint64_t message_of_source(uint32_t from, uint32_t to, uint64_t in_heap, const uint64_t* word) const;
  uint64_t message_of_slot(uint32_t from, uint32_t to, uint64_t in_slots) const;
  void send_message(const Message& m, Time at);

  const Machine& machine_;
  const uint32_t ranks_, gpus_, simulated_;
  const bool folded_;
  SourceLayout layout_;
  const uint64_t work_stride_, work_at_, rows_at_;
  const host::Mapping memory_;  // heaps, then workspaces
  World world_;
  Links links_;
  struct Calls {
    const SpreadCall *own, *sending;
  };
  std::vector<Calls> calls_;
};

}  // namespace flashmoe::sim

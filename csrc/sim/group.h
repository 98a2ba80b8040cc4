// The simulated ranks: their memory, which ranks are peers, and how words and rows travel between them.
//
// Either the ranks of all machines are simulated, or only those of the first machine, as if every machine did the
// same (the group is then *folded*). If it is folded, what is sent to a rank d machines further on arrives at the
// first machine, as if it came from d machines back. This is no approximation if the tokens of every machine choose
// as those of the first machine do, counted from their own machine: then moving all ranks by one machine gives the
// same group again.
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

  // The group to which the running lane belongs.
  static Group& of_lane() { return *group_; }

  uint32_t ranks() const { return ranks_; }
  uint32_t gpus() const { return gpus_; }
  uint32_t simulated() const { return simulated_; }
  const HeapLayout& heap_layout() const { return layout_.heap; }
  const Machine& machine() const { return machine_; }
  Links& links() { return links_; }
  World& world() { return world_; }
  uint8_t* work(uint32_t rank) const { return memory_.base() + work_at_ + rank * work_stride_; }
  // [ranks]: the heap of every rank, at the address that the simulated rank `rank` uses for it.
  std::vector<uint8_t*> heaps_of(uint32_t rank) const;

  // Machines::behind, which says where the fields of relays begin in a heap: behind_own() for what a rank reads and
  // writes as a relay or on its own machine, behind_others() for what its senders write to relays on other machines.
  // They differ if the group is folded, because a heap then stands for a heap of another machine: what is sent there
  // must get into the slot of a source further back.
  const RelayLayout& relay_layout() const { return layout_.relay; }
  uint64_t behind_own() const { return layout_.slot_bytes; }
  uint64_t behind_others() const { return folded_ ? 0 : layout_.slot_bytes; }
  // Sets a rank's call, and its senders' call. The size of a message is computed from them.
  void set_calls(uint32_t rank, const SpreadCall& call, const SpreadCall& sending) { calls_[rank] = {&call, &sending}; }

  struct Peer {
    uint32_t rank;  // the simulated rank that stands for the peer
    bool remote;    // the peer is on another machine
  };
  Peer peer(uint32_t from, uint32_t to) const;
  // Sends over NVLink, to a rank of the same machine. `to` is its number in the group.
  Links::Transfer send(uint32_t from, uint32_t to, uint64_t bytes, Time at) {
    return links_.send(from, peer(from, to).rank, bytes, at);
  }

  // Called when a rank stores a word. The word becomes visible later. If it goes to another machine, one message
  // brings the word and the data that it announces.
  void signal(uint32_t from, uint64_t* word, uint64_t value, Time at);

 private:
  static Group* group_;

  // The rank for which a simulated rank stands when it gets a message. `machines_back`: the number of the machine on
  // which the source seems to be, if the group is folded.
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

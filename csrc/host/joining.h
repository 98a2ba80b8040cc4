// How ranks that are processes form a group, or the part of a group that is on one machine, from the view of one rank.
// The rank makes its own segment. It opens every peer's segment, whose control page describes the peer. Once every rank
// has opened all segments, it compares limits. (So if ranks disagree, all of them see with whom.) Then it maps the
// heaps. From then on nobody needs the names. Once every rank has removed its own name, the next group of this name may
// form.
#pragma once

#include <string>
#include <vector>

#include "host/segment.h"

namespace flashmoe::host {

class Joining {
 public:
  // members: the ranks of this machine, ascending, this rank among them.
  Joining(const std::string& name, uint32_t rank, std::vector<uint32_t> members, const Limits& limits,
          uint64_t heap_bytes, uint64_t timeout_ns);

  // The whole segment of every member; an empty mapping for other ranks. If the group does not form, tells the peers
  // why, and throws Error.
  std::vector<Mapping> join();

 private:
  ControlPage* page(uint32_t p) const { return page_of(pages_[p]); }
  uint32_t state(uint32_t p) const { return std::atomic_ref(page(p)->state).load(std::memory_order_acquire); }
  void set_state(ControlPage::State s) { std::atomic_ref(page(rank_)->state).store(s, std::memory_order_release); }
  Error error(Error::Kind kind, const std::string& what) const;

  void meet();
  void open_peers();
  bool try_open(uint32_t p);
  bool goes_with_another(uint32_t p) const;
  uint32_t in_another_round() const;
  bool failed_before(uint32_t p) const;
  void forget(uint32_t p);
  void check_agreement(uint32_t p);
  void reach(ControlPage::State s);
  void await_state(uint32_t p, ControlPage::State wanted);
  void pause(uint32_t p, const char* what);
  void check_peer(uint32_t q);
  void leave(Error::Kind kind, const char* why);
  void await_witnesses() const;

  const std::string name_;
  const uint32_t rank_;
  const std::vector<uint32_t> members_;
  const Limits limits_;
  const uint64_t bytes_, timeout_ns_, began_ns_, deadline_;
  std::vector<FileDescriptor> files_;  // the peers' files, until their heaps are mapped
  std::vector<Mapping> pages_;         // segments; until they are mapped whole, their control pages alone
  OwnSegment own_;
  std::vector<uint64_t> counted_;  // [p] rank p's attempt in whose `seen_by` this rank has counted itself
  uint64_t cause_ns_ = 0;          // when the cause of this rank's failure arose, if a peer told it; 0: it arises here
  bool disagrees_ = false;         // this rank's limits differ from a peer's
  uint32_t looks_ = 0;
};

}  // namespace flashmoe::host

// How ranks that are processes of one machine form a group, or the part of one that is on this machine, as seen by one of them: it makes its own segment; opens every
// peer's, whose control page says what it is; once every rank has opened all, compares limits, so that ranks which disagree all
// see with whom; and maps the heaps. Then nobody needs a name any more; and once every rank has taken its own away, the next
// group of this name may form.
#pragma once

#include <string>
#include <vector>

#include "host/segment.h"

namespace flashmoe::host {

class Joining {
 public:
  // members: the ranks of this machine, this one among them, ascending.
  Joining(const std::string& name, uint32_t rank, std::vector<uint32_t> members, const Limits& limits,
          uint64_t heap_bytes, uint64_t timeout_ns);

  // Every member's segment, mapped whole; nothing for other ranks. Throws Error where the group does not form, after it has told the peers why.
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
  std::vector<FileDescriptor> files_;  // the peers', until their heaps are mapped
  std::vector<Mapping> pages_;         // segments, as yet their control pages alone
  OwnSegment own_;
  std::vector<uint64_t> counted_;  // the peers' attempts that know that this rank has opened them
  uint64_t cause_ns_ = 0;          // when that arose for which this rank fails, if a peer told it; 0: it arises here
  bool disagrees_ = false;         // with a peer, by its limits
  uint32_t looks_ = 0;
};

}  // namespace flashmoe::host

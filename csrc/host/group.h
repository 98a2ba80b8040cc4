// A group of ranks: where each rank's symmetric heap is mapped in this process. If the rank is on another machine, its
// mirror stands here instead.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flashmoe/protocol/machines.h"
#include "host/bell.h"

namespace flashmoe::host {

class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  uint8_t* const* heaps() const { return heaps_.data(); }
  // A sentence about rank p if it is known to be gone, else empty.
  virtual std::string obituary(uint32_t) const { return {}; }

  // For groups on several machines: the bell that an actor rings after it has signalled a peer. Null if all ranks are
  // on one machine.
  virtual Bell* bell() { return nullptr; }
  // begin_call: the call's actors are about to start. end_call: all of them have left. Signals that they have set by
  // then are carried to other machines, if necessary after end_call.
  virtual void begin_call(const SpreadCall&) {}
  virtual void end_call() {}
  // Called between calls. Brings to rank q's heap first the `bytes` bytes at `from`, then `word`, which belongs at
  // `at`. Both addresses lie in heaps()[q].
  virtual void tell(uint32_t q, const void* from, uint64_t bytes, uint64_t* at, uint64_t word);

 protected:
  Group() = default;
  std::vector<uint8_t*> heaps_;
};

// Ranks are processes, heaps are POSIX shared memory. Returns once every rank has mapped every heap. By then all names
// are removed. So nothing outlives the processes however they end, and a new group of the same name may form. If a rank
// dies, does not join within timeout_ns, or has other limits, every rank throws an Error that names it. members: the
// ranks of this machine, ascending, if others are on other machines; heaps() of the others are null. Empty: all ranks.
std::unique_ptr<Group> join_process_group(const std::string& name, uint32_t rank, const Limits& limits,
                                          uint64_t heap_bytes, uint64_t timeout_ns, std::vector<uint32_t> members = {});

// A group of one rank.
std::unique_ptr<Group> make_single_rank_group(uint64_t heap_bytes);

// Ranks are threads of one process; the stress tests run these groups under sanitizers. Each rank takes one of the
// groups.
std::vector<std::unique_ptr<Group>> make_thread_groups(uint32_t ranks, uint64_t heap_bytes);

}  // namespace flashmoe::host

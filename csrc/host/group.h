// A group of ranks: where each rank's symmetric heap is mapped in this process, or what stands for it here, if the rank
// is on another machine.
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

  // Of groups on several machines: what to ring when an actor has signalled a peer; null where all ranks are on one.
  virtual Bell* bell() { return nullptr; }
  // A call's actors are about to start, and have all left. What they have signalled by then is carried, also after it.
  virtual void begin_call(const SpreadCall&) {}
  virtual void end_call() {}
  // Between calls. Writes to rank q's heap the `bytes` at `from`, which lie in what heaps() has of it, and then the word.
  virtual void tell(uint32_t q, const void* from, uint64_t bytes, uint64_t* at, uint64_t word);

 protected:
  Group() = default;
  std::vector<uint8_t*> heaps_;
};

// Ranks are processes, heaps are POSIX shared memory. Returns once every rank has mapped every heap; by then all names
// are unlinked, so that nothing outlives the processes however they end, and a group of the same name may form anew.
// Where a rank dies, does not join within timeout_ns, or has other limits, every rank throws Error and names it.
// members: the ranks of this machine, ascending, where others are elsewhere, whose heaps() are null; empty: all ranks.
std::unique_ptr<Group> join_process_group(const std::string& name, uint32_t rank, const Limits& limits,
                                          uint64_t heap_bytes, uint64_t timeout_ns, std::vector<uint32_t> members = {});

// A rank alone.
std::unique_ptr<Group> make_single_rank_group(uint64_t heap_bytes);

// Ranks are threads of one process: what the stress tests run under sanitizers. Each rank takes one of the groups.
std::vector<std::unique_ptr<Group>> make_thread_groups(uint32_t ranks, uint64_t heap_bytes);

}  // namespace flashmoe::host

// The symmetric heaps of a group of GPUs, as this rank's kernels address them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/group.h"
#include "cuda/device.h"

namespace flashmoe::cuda {

class Heaps {
 public:
  virtual ~Heaps() = default;
  Heaps(const Heaps&) = delete;
  Heaps& operator=(const Heaps&) = delete;

  // [R] zeroed before any rank has returned from its joining.
  const std::vector<uint8_t*>& all() const { return heaps_; }
  // A sentence about rank p if it is known to be gone, else empty.
  virtual std::string obituary(uint32_t) const { return {}; }

 protected:
  Heaps() = default;
  std::vector<uint8_t*> heaps_;
};

// Who joins what.
struct Membership {
  uint32_t rank = 0;
  std::string name;     // of the group, with several ranks
  std::string nvshmem;  // path of its library
};

// A rank alone: memory of its own.
std::unique_ptr<Heaps> make_own_heap(const Device& device, uint64_t bytes);

// Ranks are processes of one machine, each with a GPU of its own whose memory the others have mapped: NVSHMEM's. They meet
// in shared memory (cpu::join_process_group), so that a rank that is missing, dies or disagrees is named within timeout_ns.
// NVSHMEM is initialised by the first group of a process, whose ranks all its later groups have.
std::unique_ptr<Heaps> join_heaps(const Device& device, const Membership& who, const Limits& limits, uint64_t bytes,
                                  uint64_t timeout_ns);

}  // namespace flashmoe::cuda

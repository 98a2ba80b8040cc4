// NVSHMEM as this process has it: initialised once, for the ranks of the process's first group of several GPUs; and the
// symmetric memory that was allocated since.
//
// Symmetric memory is allocated and freed by all ranks together, so a rank that closes its context cannot free: others may
// never come to it. It gives its block back, and the next joining of the group, where all ranks are, takes it again or
// frees it. Allocations are numbered alike on all ranks.
#pragma once

#include <mutex>
#include <vector>

#include "cuda/device/device.h"
#include "cuda/transport/notices.h"
#include "cuda/transport/nvshmem.h"

namespace flashmoe::cuda {

struct SymmetricMemory {
  uint64_t number, bytes;
  uint8_t* address;
  bool taken;
};

struct World {
  // Held while a rank joins. Recursive: the hook that a joining rank calls runs the user's code, which may drop another
  // context, and its lease.
  std::recursive_mutex mutex;
  uint32_t rank = 0, ranks = 0;  // 0: not initialised
  bool broken = false;           // this rank gave up on what all should do together; a thread may still be in it
  uint64_t allocations = 0;
  std::vector<SymmetricMemory> blocks;
};
World& world();

// A block that this rank uses, given back at the end.
class Lease {
 public:
  Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();
  uint8_t* take(SymmetricMemory& b);

 private:
  uint64_t number_ = 0;
};

// What ranks that are joining do together, the world's mutex held.
class Together {
 public:
  Together(const Device& device, const Notices& notices, const Nvshmem& api)
      : device_(device), notices_(notices), api_(api) {}

  // Initialises NVSHMEM, unless it is.
  void enter_world() const;
  // A block of that size that no rank uses any more; else a new one, before which all that no rank uses are freed.
  uint8_t* take_block(uint64_t bytes, Lease& lease) const;

 private:
  template <class F>
  auto run(const char* what, F f) const;

  const Device& device_;
  const Notices& notices_;
  const Nvshmem& api_;
};

}  // namespace flashmoe::cuda

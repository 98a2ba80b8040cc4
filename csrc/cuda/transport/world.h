// NVSHMEM in this process: it is initialised once, for the ranks of the process's first group of several GPUs. Also the
// symmetric memory that was allocated since.
//
// Symmetric memory is allocated and freed by all ranks together. So a rank that closes its context cannot free its
// memory: the others may never free theirs. Instead the rank gives its block back. The next joining of the group, where
// all ranks are present, takes the block again or frees it. Allocations have the same numbers on all ranks.
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
  // Held while a rank joins. Recursive, because a joining rank calls the interrupt hook. The hook runs the user's code,
  // which may drop another context and with it its lease.
  std::recursive_mutex mutex;
  uint32_t rank = 0, ranks = 0;  // ranks 0: not initialised
  bool broken = false;           // this rank gave up on something that ranks do together; a thread may still be in it
  uint64_t allocations = 0;
  std::vector<SymmetricMemory> blocks;
};
World& world();

// A block that this rank uses. The destructor gives it back.
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

// What joining ranks do together, with the world's mutex held.
class Together {
 public:
  Together(const Device& device, const Notices& notices, const Nvshmem& api)
      : device_(device), notices_(notices), api_(api) {}

  // Initialises NVSHMEM, unless this process has done so.
  void enter_world() const;
  // Takes a block of that size that no rank uses any more. If there is none, frees all blocks that no rank uses, then
  // allocates a new one.
  uint8_t* take_block(uint64_t bytes, Lease& lease) const;

 private:
  template <class F>
  auto run(const char* what, F f) const;

  const Device& device_;
  const Notices& notices_;
  const Nvshmem& api_;
};

}  // namespace flashmoe::cuda

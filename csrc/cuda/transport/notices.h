// What ranks tell one another in shared memory while they join a group of GPUs, and how they wait for one another.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cuda/transport/nvshmem.h"
#include "flashmoe/protocol/heap_layout.h"
#include "host/group.h"

namespace flashmoe::cuda {

struct Notice {
  static constexpr uint32_t kMostFree = 64;
  enum Stage : uint32_t { kNothing, kPosted, kLooked, kReady };

  uint32_t stage;
  uint32_t failed;  // 1: this rank goes no further, see failure
  uint32_t world_rank, world_ranks;
  uint32_t maps_all;  // set with kLooked: whether this rank has mapped every other's memory
  uint32_t free_blocks;
  uint64_t free[kMostFree];  // numbers of the allocations of symmetric memory (world.h) that this rank has given back
  char device[16];           // UUID of the rank's GPU
  NvshmemUniqueId id;        // set by rank 0 if NVSHMEM is not initialised yet
  char failure[512];         // why this rank does not join
};

// Every wait ends when a rank fails, when a rank's process is gone, or at the deadline. There is one deadline for
// joining as a whole.
class Notices {
 public:
  // Meets the other ranks (host::join_process_group).
  Notices(const std::string& name, uint32_t rank, const Limits& limits, uint64_t timeout_ns);

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  const std::string& group() const { return name_; }
  Notice& of(uint32_t p) const { return *reinterpret_cast<Notice*>(control_->heaps()[p]); }
  Notice& own() const { return of(rank_); }
  std::string obituary(uint32_t p) const { return control_->obituary(p); }

  void set_stage(Notice::Stage s) const;
  // Tells the others that this rank goes no further.
  void fail(const char* why) const;
  void await(uint32_t p, Notice::Stage stage) const;
  void await_all(Notice::Stage stage) const;
  // Looks at the other ranks once, while this rank waits for something that all ranks do together (`what`). Throws
  // Error if a rank is gone or at the deadline. Also throws what the interrupt hook throws.
  void watch_others(const char* what) const;
  // Whether every rank says that it has given back the symmetric memory (world.h) with this number.
  bool given_back_by_all(uint64_t block) const;

 private:
  using Clock = std::chrono::steady_clock;

  bool late() const { return timeout_ns_ != 0 && Clock::now() > deadline_; }

  const std::string name_;
  const uint32_t rank_, ranks_;
  const uint64_t timeout_ns_;
  const Clock::time_point deadline_;
  const std::unique_ptr<host::Group> control_;  // its heaps are the notices
};

}  // namespace flashmoe::cuda

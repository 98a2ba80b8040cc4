// Groups of GPUs: where each rank's symmetric heap is, as this rank's kernels address it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cuda/device/device.h"
#include "host/group.h"

namespace flashmoe::cuda {

// Which rank joins which group.
struct Membership {
  uint32_t rank = 0;
  std::string name;     // name of the group, with several ranks
  std::string nvshmem;  // path of NVSHMEM's library
};

// A group of one rank, whose heap is memory of its own.
std::unique_ptr<host::Group> make_single_gpu_group(const Device& device, uint64_t heap_bytes);

// Every rank of a group throws this if one of them cannot map another's memory and limits.rdma is 0.
struct NotMapped {};

// Ranks are processes of one machine, each with a GPU of its own. The heap of a rank is memory of NVSHMEM. A rank has
// mapped the other ranks' heaps. With limits.rdma it has not: it reaches them by puts alone, and heaps() has null for
// them.
//
// Ranks meet in shared memory (host::join_process_group), so that a rank that is missing, dies or disagrees is named
// within timeout_ns. `prepare` is called once they have met; in it a rank allocates its own memory. If `prepare` or
// anything else that a rank does here throws, the other ranks are told at once.
//
// The first group of a process initialises NVSHMEM, and all later groups of the process must have the same ranks. All
// heaps are zeroed before any rank has joined.
std::unique_ptr<host::Group> join_gpu_group(const Device& device, const Membership& who, const Limits& limits,
                                            uint64_t heap_bytes, uint64_t timeout_ns,
                                            const std::function<void()>& prepare);

}  // namespace flashmoe::cuda

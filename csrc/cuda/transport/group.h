// Groups of GPUs: where each rank's symmetric heap is, as this rank's kernels address it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cuda/device/device.h"
#include "host/group.h"

namespace flashmoe::cuda {

// Who joins what.
struct Membership {
  uint32_t rank = 0;
  std::string name;     // of the group, with several ranks
  std::string nvshmem;  // path of its library
};

// A rank alone: memory of its own.
std::unique_ptr<host::Group> make_single_gpu_group(const Device& device, uint64_t heap_bytes);

// Every rank of a group throws it if one of them cannot map the memory of another, and limits.rdma is 0.
struct NotMapped {};

// Ranks are processes of one machine, each with a GPU of its own, whose heap is NVSHMEM's memory. A rank has the
// others' heaps mapped, or with limits.rdma reaches them by puts alone, and heaps() has null for them. Ranks meet in
// shared memory (host::join_process_group), so that a rank that is missing, dies or disagrees is named within
// timeout_ns. `prepare` is called once they have met: there a rank takes memory of its own. If it throws, or anything
// else does that a rank does here, the others are told at once. NVSHMEM is initialised by the first group of a process,
// whose ranks all its later groups have. All heaps are zeroed before any rank has joined.
std::unique_ptr<host::Group> join_gpu_group(const Device& device, const Membership& who, const Limits& limits,
                                            uint64_t heap_bytes, uint64_t timeout_ns,
                                            const std::function<void()>& prepare);

}  // namespace flashmoe::cuda

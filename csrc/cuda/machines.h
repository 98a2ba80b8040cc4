// How the ranks of a group are spread over machines, in the memory of a GPU, where its kernel looks it up. (Of ranks that are
// told so: csrc/bindings/cuda.cpp.)
#pragma once

#include "cuda/device/device.h"
#include "host/machines.h"

namespace flashmoe::cuda {

// Rows that went to other ranks in a call: results; and where ranks are on several machines, those that this one has passed
// on.
struct RowsSent {
  uint64_t returned, passed_on;
};

class DeviceMachines {
 public:
  // `of`: the machine of each rank, of which `limits` were made.
  DeviceMachines(const Device& device, const std::vector<uint32_t>& of, const Limits& limits, uint32_t rank);

  const Machines* on_device() const { return memory_.as<Machines>(); }
  // As the host reads it.
  const Machines& here() const { return here_; }
  // What the relay of the last call of that parity has counted, once it is over.
  Machines::Counts counts(uint32_t parity) const;

 private:
  host::MachineTables tables_;
  Machines here_;
  DeviceMemory memory_;
};

}  // namespace flashmoe::cuda

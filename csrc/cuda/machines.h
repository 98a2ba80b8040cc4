// How the ranks of a group are spread over machines: the tables in the memory of a GPU, where the kernel looks them up.
// (Used only if ranks are told that they are on several machines: csrc/bindings/cuda.cpp.)
#pragma once

#include "cuda/device/device.h"
#include "host/machines.h"

namespace flashmoe::cuda {

// How many rows this rank has sent to other ranks in a call: `returned` are rows of results; `passed_on` are rows that
// it has passed on as a relay, if ranks are on several machines.
struct RowsSent {
  uint64_t returned, passed_on;
};

class DeviceMachines {
 public:
  // `of`: the machine of each rank, the same numbers from which `limits` was made.
  DeviceMachines(const Device& device, const std::vector<uint32_t>& of, const Limits& limits, uint32_t rank);

  const Machines* on_device() const { return memory_.as<Machines>(); }
  // The same table for the host to read.
  const Machines& here() const { return here_; }
  // What this rank, as a relay, has counted in the last call of that parity, once the call is over.
  Machines::Counts counts(uint32_t parity) const;

 private:
  host::MachineTables tables_;
  Machines here_;
  DeviceMemory memory_;
};

}  // namespace flashmoe::cuda

// Registers memory of a device with NVSHMEM: while the object lives, a network may read the memory.
#pragma once

#include "cuda/device/device.h"
#include "cuda/transport/nvshmem.h"

namespace flashmoe::cuda {

class Registration {
 public:
  Registration(const Nvshmem& api, const Device& device, const DeviceMemory& memory);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const Nvshmem& api_;
  const Device& device_;
  void* const address_;
};

}  // namespace flashmoe::cuda

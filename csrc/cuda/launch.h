// A kernel as it is loaded and launched.
#pragma once

#include <string>

#include "cuda/device.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::cuda {

// Of one cubin: the kernel for any number of tokens, and that for a few.
class Kernels {
 public:
  // api: null but for kernels that put, whose module NVSHMEM tells where everything is.
  Kernels(const Device& device, const std::string& cubin, const Nvshmem* api);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Launches that of the two which takes the call, on so many thread blocks; does nothing else to the stream, and does not
  // wait. The device's context is current.
  void launch(sm90::KernelArgs& args, uint32_t blocks, DriverStream stream) const;

 private:
  const Device& device_;
  const Nvshmem* const api_;
  const Module module_;
  const DriverFunction general_, few_;
};

}  // namespace flashmoe::cuda

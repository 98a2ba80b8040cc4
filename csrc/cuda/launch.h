// A kernel as it is loaded and launched.
#pragma once

#include <string>

#include "cuda/device.h"
#include "cuda/layer.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/protocol/machines.h"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::cuda {

// Which kernels a cubin has: that for any number of tokens, and that for a few. Passes that train have no second, and
// experts in mxfp4 the second alone, as in groups whose calls are all of few tokens. Forward passes that keep among several
// ranks have two that count and move what they have kept; what traces, one that tells the time.
struct KernelSet {
  bool general, few, moves, traces;
  uint32_t few_threads;  // of a block of the second
};

class Kernels {
 public:
  // api: null, but where kernels put: NVSHMEM then tells their module where everything is.
  Kernels(const Device& device, const std::string& cubin, KernelSet which, const Nvshmem* api);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Launches one of the two, that for a few tokens or the general one, on so many thread blocks; does nothing else to the
  // stream, and does not wait. The device's context is current.
  // machines: on the device; null, but for kernels of several machines.
  void launch(sm90::KernelArgs& args, const Machines* machines, bool few, uint32_t blocks, DriverStream stream) const;
  // The same of those behind a forward pass that keeps, among several ranks.
  void launch_count(sm90::KernelArgs& args, gpu::CountedRows to, DriverStream stream) const;
  void launch_move(sm90::KernelArgs& args, gpu::MovedRows to, uint32_t tile_blocks, DriverStream stream) const;
  // Of a cubin that traces, see gpu/clock.cuh.
  void launch_clock(gpu::ClockPage* page, uint32_t times, uint64_t patience_ns, DriverStream stream) const;

 private:
  const Device& device_;
  const Nvshmem* const api_;
  const Module module_;
  const DriverFunction general_, few_, count_, move_, clock_;
  const uint32_t few_threads_;
};

}  // namespace flashmoe::cuda

// Kernels as they are loaded and launched.
#pragma once

#include <string>

#include "cuda/arch.h"
#include "cuda/device/device.h"
#include "cuda/layer.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/gpu/kernel_args.h"

namespace flashmoe::cuda {

// Which kernels a cubin has: that of a call, for any number of tokens or for a few, and how it is launched. Forward passes
// that keep among several ranks have two besides that count and move what they have kept; what traces, one that tells the
// time.
struct KernelSet {
  const char* name;  // of the call's
  BlockSize block;
  bool moves = false, traces = false;
};
KernelSet general_kernels(const Arch& arch, const Layer& layer, const Limits& limits);
KernelSet few_kernels(const Arch& arch, const Layer& layer);

// What one cubin has.
class Kernels {
 public:
  // api: null, but where kernels put: NVSHMEM then tells their module where everything is.
  Kernels(const Device& device, const std::string& cubin, KernelSet which, const Nvshmem* api);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Launches a call's on so many thread blocks; does nothing else to the stream, and does not wait. The device's context is
  // current.
  void launch(gpu::KernelArgs& args, uint32_t blocks, DriverStream stream) const;
  // The same of those behind a forward pass that keeps, among several ranks.
  void launch_count(gpu::KernelArgs& args, gpu::CountedRows to, DriverStream stream) const;
  void launch_move(gpu::KernelArgs& args, gpu::MovedRows to, uint32_t tile_blocks, DriverStream stream) const;
  // Of a cubin that traces, see gpu/tracer.cuh.
  void launch_clock(gpu::ClockPage* page, uint32_t times, uint64_t patience_ns, DriverStream stream) const;

 private:
  const Device& device_;
  const Nvshmem* const api_;
  const Module module_;
  const KernelSet which_;
  const DriverFunction call_, count_, move_, clock_;
};

// Those of a layer; null: it has none, as KernelsOfLayer says.
struct LoadedKernels {
  const Kernels *general, *few;

  // One of them, for what all cubins of a layer have.
  const Kernels& any() const { return general != nullptr ? *general : *few; }
};

}  // namespace flashmoe::cuda

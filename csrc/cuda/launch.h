// Loads and launches kernels.
#pragma once

#include <string>

#include "cuda/arch.h"
#include "cuda/device/device.h"
#include "cuda/layer.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/gpu/kernel_args.h"

namespace flashmoe::cuda {

// Which kernels a cubin has, and how they are launched. Each cubin has the kernel of a call, for any number of tokens
// or for a few. The cubin of a forward pass that keeps among several ranks has two more kernels, which count and move
// what was kept. A cubin that traces has one more kernel, which tells the time.
struct KernelSet {
  const char* name;  // name of the call's kernel
  BlockSize block;
  bool moves = false, traces = false;
};
KernelSet general_kernels(const Arch& arch, const Layer& layer, const Limits& limits);
KernelSet few_kernels(const Arch& arch, const Layer& layer);

// The kernels of one cubin.
class Kernels {
 public:
  // api: null unless kernels put. If they put, NVSHMEM initialises their module, which tells it where NVSHMEM's memory
  // is.
  Kernels(const Device& device, const std::string& cubin, KernelSet which, const Nvshmem* api);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Launches a call's kernel on so many thread blocks; does nothing else to the stream, and does not wait. The device's
  // context must be current.
  void launch(gpu::KernelArgs& args, uint32_t blocks, DriverStream stream) const;
  // The same for the two kernels that follow a forward pass that keeps among several ranks. tile_blocks: thread blocks
  // that move tiles.
  void launch_count(gpu::KernelArgs& args, gpu::CountedRows to, DriverStream stream) const;
  void launch_move(gpu::KernelArgs& args, gpu::MovedRows to, uint32_t tile_blocks, DriverStream stream) const;
  // For a cubin that traces, see gpu/tracer.cuh.
  void launch_clock(gpu::ClockPage* page, uint32_t times, uint64_t patience_ns, DriverStream stream) const;

 private:
  const Device& device_;
  const Nvshmem* const api_;
  const Module module_;
  const KernelSet which_;
  const DriverFunction call_, count_, move_, clock_;
};

// The kernels of a layer. A null pointer says that the layer does not need this kernel (KernelsOfLayer).
struct LoadedKernels {
  const Kernels *general, *few;

  // Either of the two, for a kernel that both of their cubins have (launch_clock).
  const Kernels& any() const { return general != nullptr ? *general : *few; }
};

}  // namespace flashmoe::cuda

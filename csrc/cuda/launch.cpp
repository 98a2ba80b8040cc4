#include "cuda/launch.h"

namespace flashmoe::cuda {

Kernels::Kernels(const Device& device, const std::string& cubin, KernelSet which, const Nvshmem* api)
    : device_(device),
      api_(api),
      module_(device, cubin),
      general_(which.general ? module_.kernel("flashmoe_moe", sm90::kSharedBytes) : nullptr),
      few_(which.few ? module_.kernel("flashmoe_few", sm90::kFewSharedBytes) : nullptr),
      count_(which.moves ? module_.kernel("flashmoe_count", 0) : nullptr),
      move_(which.moves ? module_.kernel("flashmoe_move", 0) : nullptr),
      clock_(which.traces ? module_.kernel("flashmoe_clock", 0) : nullptr),
      few_threads_(which.few_threads) {
  if (api_ == nullptr) return;
  NvshmemVersion compiled_with{};
  module_.read("nvshmemi_device_lib_version_d", &compiled_with, sizeof(compiled_with));
  check_headers(*api_, compiled_with);
  const Device::Use use(device_);
  check_nvshmem(api_->nvshmemx_cumodule_init(module_.handle()), "nvshmemx_cumodule_init");
}

Kernels::~Kernels() {
  if (api_ == nullptr) return;
  const Device::Use use(device_);
  api_->nvshmemx_cumodule_finalize(module_.handle());
}

void Kernels::launch(sm90::KernelArgs& args, const Machines* machines, bool few, uint32_t blocks,
                     DriverStream stream) const {
  LaunchAttribute cooperative{.id = kLaunchCooperative, .pad = {}, .value = {}};
  cooperative.value.cooperative = 1;
  LaunchConfig config{blocks, 1, 1, sm90::kThreads, 1, 1, sm90::kSharedBytes, stream, &cooperative, 1};
  if (few) {
    config.block_x = few_threads_;
    config.shared_bytes = sm90::kFewSharedBytes;
  }
  void* parameters[] = {&args, &machines};  // the driver takes as many as the kernel has
  check(driver().cuLaunchKernelEx(&config, few ? few_ : general_, parameters, nullptr), "cannot launch the kernel");
}

void Kernels::launch_count(sm90::KernelArgs& args, gpu::CountedRows to, DriverStream stream) const {
  LaunchConfig config{args.call.shape.ranks, 1, 1, gpu::kMoveThreads, 1, 1, 0, stream, nullptr, 0};
  void* parameters[] = {&args, &to};
  check(driver().cuLaunchKernelEx(&config, count_, parameters, nullptr), "cannot launch the kernel that counts rows");
}

void Kernels::launch_move(sm90::KernelArgs& args, gpu::MovedRows to, uint32_t tile_blocks, DriverStream stream) const {
  LaunchConfig config{to.blocks + tile_blocks, 1, 1, gpu::kMoveThreads, 1, 1, 0, stream, nullptr, 0};
  void* parameters[] = {&args, &to};
  check(driver().cuLaunchKernelEx(&config, move_, parameters, nullptr), "cannot launch the kernel that moves rows");
}

void Kernels::launch_clock(gpu::ClockPage* page, uint32_t times, uint64_t patience_ns, DriverStream stream) const {
  const LaunchConfig config{1, 1, 1, 1, 1, 1, 0, stream, nullptr, 0};
  void* parameters[] = {&page, &times, &patience_ns};
  check(driver().cuLaunchKernelEx(&config, clock_, parameters, nullptr),
        "cannot launch the kernel that tells the time");
}

}  // namespace flashmoe::cuda

#include "cuda/launch.h"

namespace flashmoe::cuda {

KernelSet general_kernels(const Arch& arch, const Layer& layer, const Limits& limits) {
  return {.name = "flashmoe_moe",
          .block = arch.fused,
          .moves = layer.pass == Pass::kForward && limits.ranks != 1,
          .traces = layer.traced};
}

KernelSet few_kernels(const Arch& arch, const Layer& layer) {
  return {.name = "flashmoe_few",
          .block = has_scales(layer.spec.weight_type) ? arch.few_scaled : arch.few,
          .traces = layer.traced};
}

Kernels::Kernels(const Device& device, const std::string& cubin, KernelSet which, const Nvshmem* api)
    : device_(device),
      api_(api),
      module_(device, cubin),
      which_(which),
      call_(module_.kernel(which.name, which.block.shared_bytes)),
      count_(which.moves ? module_.kernel("flashmoe_count", 0) : nullptr),
      move_(which.moves ? module_.kernel("flashmoe_move", 0) : nullptr),
      clock_(which.traces ? module_.kernel("flashmoe_clock", 0) : nullptr) {
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

void Kernels::launch(gpu::KernelArgs& args, uint32_t blocks, DriverStream stream) const {
  LaunchAttribute cooperative{.id = kLaunchCooperative, .pad = {}, .value = {}};
  cooperative.value.cooperative = 1;
  LaunchConfig config{blocks, 1, 1, which_.block.threads, 1, 1, which_.block.shared_bytes, stream, &cooperative, 1};
  void* parameters[] = {&args};
  check(driver().cuLaunchKernelEx(&config, call_, parameters, nullptr), "cannot launch the kernel");
}

void Kernels::launch_count(gpu::KernelArgs& args, gpu::CountedRows to, DriverStream stream) const {
  LaunchConfig config{args.call.shape.ranks, 1, 1, gpu::kMoveThreads, 1, 1, 0, stream, nullptr, 0};
  void* parameters[] = {&args, &to};
  check(driver().cuLaunchKernelEx(&config, count_, parameters, nullptr), "cannot launch the kernel that counts rows");
}

void Kernels::launch_move(gpu::KernelArgs& args, gpu::MovedRows to, uint32_t tile_blocks, DriverStream stream) const {
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

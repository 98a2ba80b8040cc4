// The fused kernel of the forward pass that keeps, among several ranks; and two kernels that run after it: one counts
// the rows to keep, and one moves them to the kept memory.
#include "moe_keeping.cu"

#include "flashmoe/gpu/kept_rows.cuh"

static_assert(flashmoe::kBuild.group);

extern "C" __global__ void __launch_bounds__(flashmoe::gpu::kMoveThreads)
    flashmoe_count(const __grid_constant__ flashmoe::sm90::KernelArgs args,
                   const __grid_constant__ flashmoe::gpu::CountedRows to) {
  flashmoe::gpu::count_rows(args, to);
}

extern "C" __global__ void __launch_bounds__(flashmoe::gpu::kMoveThreads)
    flashmoe_move(const __grid_constant__ flashmoe::sm90::KernelArgs args,
                  const __grid_constant__ flashmoe::gpu::MovedRows to) {
  flashmoe::gpu::move_rows<flashmoe::sm90::Dtype>(args, to);
}

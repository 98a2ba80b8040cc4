// The fused kernel of a pass. The file that includes this one has defined Pass (roles/pass.cuh).
#pragma once

#include "flashmoe/sm90/instance.cuh"
#include "flashmoe/sm90/roles/kernel.cuh"

#include "clock.cuh"

static_assert(!flashmoe::kBuild.few);

extern "C" __global__ void __cluster_dims__(flashmoe::sm90::kClusterBlocks)
    __launch_bounds__(flashmoe::sm90::kThreads, 1)
        flashmoe_moe(const __grid_constant__ flashmoe::sm90::KernelArgs args) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  auto& shared = *reinterpret_cast<sm90::Shared*>(memory + sm90::kSharedOffset);
  sm90::begin_trace<kBuild.trace>(args);
  if (!sm90::prepare<sm90::Dtype>(args, shared)) return;
  sm90::run_roles<sm90::Dtype, Pass, sm90::kActivation, sm90::kTransposed, kBuild.trace>(args, shared, memory);
}

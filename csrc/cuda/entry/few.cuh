// The kernel for a few tokens. The file that includes this one has defined Kernel, which is that of a rank alone
// (decode/alone.cuh) or of a rank of a group (decode/group.cuh).
#pragma once

#include "flashmoe/sm90/instance.cuh"

#include "clock.cuh"

static_assert(flashmoe::kBuild.few);

extern "C" __global__ void __launch_bounds__(flashmoe::sm90::kFewThreads, 1)
    flashmoe_few(const __grid_constant__ flashmoe::sm90::KernelArgs args) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  auto& shared = *reinterpret_cast<sm90::FewShared*>(memory);
  sm90::begin_trace<kBuild.trace>(args);
  Kernel::run<sm90::Dtype, sm90::kActivation, kBuild.trace>(args, shared);
}

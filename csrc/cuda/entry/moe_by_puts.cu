// The fused kernel of groups whose peers are not mapped. In this kernel, Platform reaches peers by NVSHMEM's functions
// (gpu/network.cuh).
#include "flashmoe/gpu/network.cuh"

#include "moe.cu"

static_assert(flashmoe::kBuild.rdma);

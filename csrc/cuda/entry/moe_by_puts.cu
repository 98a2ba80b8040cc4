// The fused kernel of groups whose peers are not mapped: with NVSHMEM's functions, which Platform is made of.
#include "flashmoe/gpu/network.cuh"

#include "moe.cu"

static_assert(flashmoe::kBuild.rdma);

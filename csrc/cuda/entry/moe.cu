// One instance of the fused kernel, and of that for a few tokens, compiled on first use by python/flashmoe/jit.py:
//   FLASHMOE_DTYPE       0 float32 (TF32 tensor cores), 1 bfloat16, 2 float16
//   FLASHMOE_ACTIVATION  as flashmoe::Activation
//   FLASHMOE_TRACE       1: record what every role does
//   FLASHMOE_EXACT       1: float32 products in float32
//   FLASHMOE_RDMA        1: peers are not mapped, rows leave by NVSHMEM's puts (gpu/network.cuh)
#include "flashmoe/gpu/few.cuh"
#include "flashmoe/sm90/kernel.cuh"

#ifndef FLASHMOE_DTYPE
#define FLASHMOE_DTYPE 1
#endif
#ifndef FLASHMOE_ACTIVATION
#define FLASHMOE_ACTIVATION 3
#endif
#ifndef FLASHMOE_TRACE
#define FLASHMOE_TRACE 0
#endif
#ifndef FLASHMOE_EXACT
#define FLASHMOE_EXACT 0
#endif

namespace flashmoe::sm90 {

template <int>
struct DtypeOf;
template <>
struct DtypeOf<0> {
  using Type = std::conditional_t<FLASHMOE_EXACT != 0, ExactFp32, Tf32>;
};
template <>
struct DtypeOf<1> {
  using Type = Bf16;
};
template <>
struct DtypeOf<2> {
  using Type = Fp16;
};

}  // namespace flashmoe::sm90

extern "C" __global__ void __cluster_dims__(flashmoe::sm90::kPair) __launch_bounds__(flashmoe::sm90::kThreads, 1)
    flashmoe_moe(const __grid_constant__ flashmoe::sm90::KernelArgs args) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  auto& shared = *reinterpret_cast<sm90::Shared*>(memory + sm90::kSharedOffset);
  using Dtype = sm90::DtypeOf<FLASHMOE_DTYPE>::Type;
  if (!sm90::prepare<Dtype>(args, shared)) return;
  sm90::run_roles<Dtype, static_cast<sm90::Activation>(FLASHMOE_ACTIVATION), FLASHMOE_TRACE != 0>(args, shared, memory);
}

extern "C" __global__ void __launch_bounds__(flashmoe::gpu::kFewThreads, 1)
    flashmoe_few(const __grid_constant__ flashmoe::sm90::KernelArgs args) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  gpu::run_few<sm90::DtypeOf<FLASHMOE_DTYPE>::Type, static_cast<sm90::Activation>(FLASHMOE_ACTIVATION),
               FLASHMOE_TRACE != 0>(args, *reinterpret_cast<gpu::FewShared*>(memory));
}

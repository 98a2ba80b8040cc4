// One instance of the fused kernel, and of that for a few tokens, compiled on first use by python/flashmoe/jit.py:
//   FLASHMOE_DTYPE       of x, weights, intermediate rows and returns, as flashmoe::DType; float32: by TF32 tensor cores
//   FLASHMOE_QUANTISED   1: the experts' matrices and the rows that they multiply are in e4m3 (of a 16-bit type the rest)
//   FLASHMOE_MXFP4       1: the experts' matrices are in mxfp4 (of a 16-bit type the rest), of a few tokens alone
//   FLASHMOE_ACTIVATION  as flashmoe::Activation
//   FLASHMOE_TRANSPOSED  1: the experts' matrices are [El, H, 2I or I] and [El, I, H], of 16-bit types
//   FLASHMOE_KEEP        1: keep what the layer's gradients need
//   FLASHMOE_BACKWARD    1: the backward pass of what is kept, of the same layer
//   FLASHMOE_GROUP       1: either of the two among several ranks; else of a rank that is alone
//   FLASHMOE_SLICED      1: either of the two of a layer with a shared expert, or with experts in slices; else of any other
//   FLASHMOE_ON_INPUT    1: either of the two of a layer whose weights scale products with gate_up; else of any other
//   FLASHMOE_TRACE       1: record what every role does
//   FLASHMOE_EXACT       1: float32 products in float32, without the tensor cores
//   FLASHMOE_RDMA        1: peers are not mapped, rows leave by NVSHMEM's puts (gpu/network.cuh)
//   FLASHMOE_FEW_GROUP   1: the kernel for a few tokens alone, of a rank of a group (sm90/few_group.cuh)
//   FLASHMOE_MACHINES    1: ranks are on several machines, to which rows cross once (protocol/machines.h); neither of
//                        passes that train nor with FLASHMOE_RDMA
#include "flashmoe/gpu/clock.cuh"
#include "flashmoe/gpu/kept_rows.cuh"
#include "flashmoe/sm90/few_group.cuh"
#include "flashmoe/sm90/kernel.cuh"

#ifndef FLASHMOE_DTYPE
#define FLASHMOE_DTYPE 1
#endif
#ifndef FLASHMOE_ACTIVATION
#define FLASHMOE_ACTIVATION 3
#endif
#ifndef FLASHMOE_TRANSPOSED
#define FLASHMOE_TRANSPOSED 0
#endif
#ifndef FLASHMOE_TRACE
#define FLASHMOE_TRACE 0
#endif
#ifndef FLASHMOE_EXACT
#define FLASHMOE_EXACT 0
#endif

namespace flashmoe::sm90 {

template <DType>
struct DtypeOf;
template <>
struct DtypeOf<DType::kFloat32> {
  using Type = std::conditional_t<FLASHMOE_EXACT != 0, ExactFp32, Tf32>;
};
template <>
struct DtypeOf<DType::kBFloat16> {
  using Type = Bf16;
};
template <>
struct DtypeOf<DType::kFloat16> {
  using Type = Fp16;
};

using Plain = DtypeOf<DType{FLASHMOE_DTYPE}>::Type;
using Dtype =
    std::conditional_t<kQuantisedBuild, Quantised<Plain>, std::conditional_t<kMxFp4Build, MxFp4<Plain>, Plain>>;
inline constexpr Activation kActivation{FLASHMOE_ACTIVATION};
// Of matrices as they are multiplied: a backward pass contracts over the other axis.
inline constexpr bool kTransposed = (FLASHMOE_TRANSPOSED != 0) != kIsBackward;
static_assert(!(kQuantisedBuild || kMxFp4Build) || (Dtype::kBytes == 2 && !kTransposed));
static_assert(!(kQuantisedBuild && kMxFp4Build));
// wgmma takes no MN-major operands of other types. (A backward pass of these does without: mainloop_fragments.cuh.)
static_assert(FLASHMOE_TRANSPOSED == 0 || Dtype::kBytes == 2);
static_assert(!(kKeepBuild || kIsBackward) || (!kQuantisedBuild && !kMxFp4Build));
static_assert(!kTrainsInGroup || ((kKeepBuild || kIsBackward) && !kRdma));
static_assert(!kFewGroup || (Dtype::kBytes == 2 && !kMxFp4Build && !kTransposed && !kRdma));
static_assert(!kFewGroup || !(kKeepBuild || kIsBackward || SpansMachines<Platform>));
static_assert(!SpansMachines<Platform> || !(kKeepBuild || kIsBackward || kRdma));

}  // namespace flashmoe::sm90

#if !FLASHMOE_MXFP4 && !FLASHMOE_FEW_GROUP
extern "C" __global__ void __cluster_dims__(flashmoe::sm90::kClusterBlocks)
    __launch_bounds__(flashmoe::sm90::kThreads, 1) flashmoe_moe(const __grid_constant__ flashmoe::sm90::KernelArgs args
#if FLASHMOE_MACHINES
                                                                ,
                                                                const flashmoe::Machines* machines
#endif
    ) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  auto& shared = *reinterpret_cast<sm90::Shared*>(memory + sm90::kSharedOffset);
  sm90::begin_trace<FLASHMOE_TRACE != 0>(args);
#if FLASHMOE_MACHINES
  if (threadIdx.x == 0) shared.kernel.machines = machines;  // read behind the barriers of prepare()
#endif
  if (!sm90::prepare<sm90::Dtype>(args, shared)) return;
  sm90::run_roles<sm90::Dtype, sm90::kActivation, sm90::kTransposed, FLASHMOE_TRACE != 0>(args, shared, memory);
}
#endif

#if FLASHMOE_KEEP && FLASHMOE_GROUP
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
#endif

#if FLASHMOE_TRACE
extern "C" __global__ void flashmoe_clock(flashmoe::gpu::ClockPage* page, uint32_t times, uint64_t patience_ns) {
  flashmoe::gpu::answer_the_time(page, times, patience_ns);
}
#endif

#if !FLASHMOE_KEEP && !FLASHMOE_BACKWARD
extern "C" __global__ void __launch_bounds__(flashmoe::sm90::kFewThreads, 1)
    flashmoe_few(const __grid_constant__ flashmoe::sm90::KernelArgs args) {
  using namespace flashmoe;
  extern __shared__ __align__(sm90::kStageAlign) uint8_t memory[];
  auto& shared = *reinterpret_cast<sm90::FewShared*>(memory);
  sm90::begin_trace<FLASHMOE_TRACE != 0>(args);
#if FLASHMOE_FEW_GROUP
  sm90::run_few_in_group<sm90::Dtype, sm90::kActivation, FLASHMOE_TRACE != 0>(args, shared);
#else
  sm90::run_few<sm90::Dtype, sm90::kActivation, FLASHMOE_TRACE != 0>(args, shared);
#endif
}
#endif

// The options with which a kernel is compiled (by -D), and which of them go together. Only this file reads the macros
// of these options.
//
// A kernel is compiled for a layer's element type and activation, and for some of these options. python/flashmoe/jit.py
// has the same names (except racecheck, which only tests use), and defines FLASHMOE_<NAME>=1 for each option that it
// wants. Host code is compiled with no option. Code that computes reads kBuild, whose values the compiler knows.
#pragma once

#include "flashmoe/spec/enums.h"

namespace flashmoe {

//   trace        every role records what it does and when
//   exact        float32 products in float32, without the tensor cores
//   rdma         peers are not mapped; rows and signals go to them by NVSHMEM's puts (gpu/network.cuh)
//   transposed   the experts' matrices are [El, H, 2I or I] and [El, I, H]
//   quantised    the experts' matrices and the rows that they multiply are in e4m3; all else is in a 16-bit type
//   mxfp4        the experts' matrices are in mxfp4; all else is in a 16-bit type
//   keeps        a forward pass that keeps what the layer's gradients need
//   backward     a backward pass, which reads what a forward pass has kept
//   group        only in kernels that train or are for a few tokens: the rank has peers; without it, the rank is alone
//   on_input     only in kernels that train: the layer has weights_on_input; without it, the layer does not have it
//   sliced       only in kernels that train: the layer has a shared expert, or experts in slices; without it, neither
//   machines     ranks are on several machines; a token's row crosses to each other machine once (protocol/machines.h)
//   few          the kernel for a few tokens
//   racecheck    for compute-sanitizer's racecheck: each thread says for itself that it has read a buffer. Without this
//                option, the threads of a warp or warpgroup meet in a barrier, and one of them says it for all.
//                racecheck does not see that this arrival, or a relaxed operation, orders the other threads' reads
#define FLASHMOE_BUILD_OPTIONS(ROW)    \
  ROW(trace, FLASHMOE_TRACE)           \
  ROW(exact, FLASHMOE_EXACT)           \
  ROW(rdma, FLASHMOE_RDMA)             \
  ROW(transposed, FLASHMOE_TRANSPOSED) \
  ROW(quantised, FLASHMOE_QUANTISED)   \
  ROW(mxfp4, FLASHMOE_MXFP4)           \
  ROW(keeps, FLASHMOE_KEEPS)           \
  ROW(backward, FLASHMOE_BACKWARD)     \
  ROW(group, FLASHMOE_GROUP)           \
  ROW(on_input, FLASHMOE_ON_INPUT)     \
  ROW(sliced, FLASHMOE_SLICED)         \
  ROW(machines, FLASHMOE_MACHINES)     \
  ROW(few, FLASHMOE_FEW)               \
  ROW(racecheck, FLASHMOE_RACECHECK)

#ifndef FLASHMOE_DTYPE
#define FLASHMOE_DTYPE 1
#endif
#ifndef FLASHMOE_ACTIVATION
#define FLASHMOE_ACTIVATION 3
#endif

#define FLASHMOE_FIELD(name, macro) bool name = false;
struct Build {
  DType dtype{};  // of x, weights, intermediate rows and returns, except what `quantised` and `mxfp4` change
  Activation activation{};
  FLASHMOE_BUILD_OPTIONS(FLASHMOE_FIELD)

  FLASHMOE_HD constexpr bool trains() const { return keeps || backward; }
};
#undef FLASHMOE_FIELD

// FLASHMOE_IS_ONE(macro) is true if the macro is defined as 1, and false if it is not defined. It pastes the macro's
// value behind FLASHMOE_ONE_, and takes the second of the arguments that result. A 1 gives FLASHMOE_ONE_1, which is a
// comma, so `true` is the second argument. Otherwise the pasted name and `true` are one argument, so `false` is the
// second.
#define FLASHMOE_ONE_1                    ,
#define FLASHMOE_SECOND(a, b, ...)        b
#define FLASHMOE_SECOND_OF(...)           FLASHMOE_SECOND(__VA_ARGS__)
#define FLASHMOE_IS_ONE_PASTED(value)     FLASHMOE_SECOND_OF(FLASHMOE_ONE_##value true, false, )
#define FLASHMOE_IS_ONE(value)            FLASHMOE_IS_ONE_PASTED(value)
#define FLASHMOE_INITIALISER(name, macro) .name = FLASHMOE_IS_ONE(macro),

inline constexpr Build kBuild{.dtype = DType{FLASHMOE_DTYPE},
                              .activation = Activation{FLASHMOE_ACTIVATION},
                              FLASHMOE_BUILD_OPTIONS(FLASHMOE_INITIALISER)};

#undef FLASHMOE_ONE_1
#undef FLASHMOE_SECOND
#undef FLASHMOE_SECOND_OF
#undef FLASHMOE_IS_ONE_PASTED
#undef FLASHMOE_IS_ONE
#undef FLASHMOE_INITIALISER

// ---- What goes with what --------------------------------------------------------------------------------------------

static_assert(kBuild.dtype <= DType::kFloat16);
static_assert(static_cast<size_t>(kBuild.activation) < kValues<Activation>);
static_assert(!kBuild.exact || kBuild.dtype == DType::kFloat32);
static_assert(!(kBuild.keeps && kBuild.backward));
// These options are for 16-bit types only. As for `transposed`: the tensor cores take no transposed operands of 32
// bits. (A backward pass in float32 needs none, because its threads load fragments: machine/mainloop_fragments.cuh.)
static_assert(!(kBuild.quantised || kBuild.mxfp4 || kBuild.transposed) || element_bytes(kBuild.dtype) == 2);
static_assert(!(kBuild.quantised && kBuild.mxfp4) && !(kBuild.transposed && (kBuild.quantised || kBuild.mxfp4)));
static_assert(!kBuild.mxfp4 || kBuild.few);
static_assert(!kBuild.trains() || !(kBuild.quantised || kBuild.mxfp4 || kBuild.rdma || kBuild.machines || kBuild.few));
static_assert(!(kBuild.on_input || kBuild.sliced) || kBuild.trains());
static_assert(!kBuild.group || kBuild.trains() || kBuild.few);
static_assert(!kBuild.few || !(kBuild.transposed || kBuild.rdma || kBuild.machines));
static_assert(!(kBuild.few && kBuild.group) || (element_bytes(kBuild.dtype) == 2 && !kBuild.mxfp4));
static_assert(!(kBuild.machines && kBuild.rdma));

}  // namespace flashmoe

// The options with which a kernel is compiled (by -D), and which of them go together. Only this file reads such a
// macro.
//
// A kernel is compiled for a layer's element type and activation, and for some of these options. python/flashmoe/jit.py
// has the same names, and defines FLASHMOE_<NAME>=1 for each option that it wants. Host code is compiled with no
// option. Code that computes asks kBuild, whose values the compiler knows.
#pragma once

#include "flashmoe/spec/enums.h"

namespace flashmoe {

//   trace        record what every role does
//   exact        float32 products in float32, without the tensor cores
//   rdma         peers are not mapped, rows leave by NVSHMEM's puts (gpu/network.cuh)
//   transposed   the experts' matrices are [El, H, 2I or I] and [El, I, H]
//   quantised    the experts' matrices and the rows that they multiply are in e4m3; all else is in a 16-bit type
//   mxfp4        the experts' matrices are in mxfp4; all else is in a 16-bit type
//   keeps        a forward pass that keeps what the layer's gradients need
//   backward     the backward pass of what is kept
//   group        of passes that train, and of few tokens: a rank of a group, else one that is alone
//   on_input     of passes that train: the layer has weights_on_input; else none of them has
//   sliced       of passes that train: the layer has a shared expert, or experts in slices; else none of them has
//   machines     ranks are on several machines, to which rows cross once (protocol/machines.h)
//   few          the kernel for a few tokens
//   racecheck    each thread releases what it has read itself, also where a barrier of the warp or of the warpgroup is behind
//                all of their loads and one thread says so, relaxed. The tool takes no arrival for other threads' reads, and
//                nothing relaxed for an order
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
  DType dtype{};  // of x, weights, intermediate rows and returns; but for matrices in e4m3 and mxfp4
  Activation activation{};
  FLASHMOE_BUILD_OPTIONS(FLASHMOE_FIELD)

  FLASHMOE_HD constexpr bool trains() const { return keeps || backward; }
};
#undef FLASHMOE_FIELD

// 1 for a macro that is defined as 1, 0 for one that is not defined: pasted behind FLASHMOE_ONE_, the first becomes a comma,
// so that the second argument behind it is true.
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
// Of 16-bit types alone. The tensor cores take no transposed operands of others. (A backward pass of these does without.)
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

// Which instance of its kernels a build is: the types and options that kBuild names.
#pragma once

#include <type_traits>

#include "flashmoe/gpu/types.cuh"
#include "flashmoe/spec/program.h"

namespace flashmoe::sm90 {

using namespace gpu;

template <DType>
struct DtypeOf;
template <>
struct DtypeOf<DType::kFloat32> {
  using Type = std::conditional_t<kBuild.exact, ExactFp32, Tf32>;
};
template <>
struct DtypeOf<DType::kBFloat16> {
  using Type = Bf16;
};
template <>
struct DtypeOf<DType::kFloat16> {
  using Type = Fp16;
};

using Plain = DtypeOf<kBuild.dtype>::Type;
using Dtype =
    std::conditional_t<kBuild.quantised, Quantised<Plain>, std::conditional_t<kBuild.mxfp4, MxFp4<Plain>, Plain>>;
inline constexpr Activation kActivation = kBuild.activation;
// Whether the products read the matrices as transposed ones. A backward pass contracts over the other axis, so it
// reads plain matrices as transposed, and transposed matrices as plain.
inline constexpr bool kTransposed = kBuild.transposed != kIsBackward;

}  // namespace flashmoe::sm90

// The options that make a layer, and their names: for the host, both engines and the kernels. Python has the same names
// (python/flashmoe/spec/values.py), and tests/test_spec.py compares them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmoe/spec/markers.h"

namespace flashmoe {

// One row for each value: its name here, its name in Python and in messages. The numbers count from 0.
#define FLASHMOE_DTYPES(ROW)        \
  ROW(kFloat32, "float32")          \
  ROW(kBFloat16, "bfloat16")        \
  ROW(kFloat16, "float16")          \
  ROW(kFloat8E4M3, "float8_e4m3fn") \
  ROW(kMxFp4, "mxfp4")

// Besides, whether there is a gate: GEMM0 has two results for each intermediate column then, a gate, and what the activated
// gate scales ("up").
#define FLASHMOE_ACTIVATIONS(ROW)             \
  ROW(kRelu, "relu", false)                   \
  ROW(kGelu, "gelu", false)                   \
  ROW(kSilu, "silu", false)                   \
  ROW(kSwiGlu, "swiglu", true)                \
  ROW(kGeGlu, "geglu", true)                  \
  ROW(kRelu2, "relu2", false)                 \
  ROW(kClampedSwiGlu, "clamped_swiglu", true) \
  ROW(kGeluTanh, "gelu_tanh", false)          \
  ROW(kGeGluTanh, "geglu_tanh", true)

// Who chooses a token's experts: the caller, or the router, by its scores: the softmax of the logits over all E, or the
// sigmoid of each.
#define FLASHMOE_ROUTINGS(ROW) \
  ROW(kGiven, "given")         \
  ROW(kSoftmax, "softmax")     \
  ROW(kSigmoid, "sigmoid")

// How results come home: each of a token's K rows by itself, or for each rank the sum of those computed there.
#define FLASHMOE_RETURN_MODES(ROW) \
  ROW(kDirect, "direct")           \
  ROW(kReduced, "reduced")

// What numbers of a quantised matrix share a scale: all (or none has one), a row's, or those of a block (spec/encoding.h).
#define FLASHMOE_WEIGHT_SCALES(ROW) \
  ROW(kNone, "none")                \
  ROW(kTensor, "tensor")            \
  ROW(kRow, "row")                  \
  ROW(kBlock, "block")

// What an actor's time goes into, as reports and traces call it. Those from kEpilogue on are in traces alone.
//   kEpilogue   part of its product, from accumulators to memory
//   kForm       a former, until all packets have become tiles
//   kSend       a block's sending of rows to other ranks, shares of which are kDispatch
//   kRehearse   a task without rows (sm90/roles/look_up.cuh)
//   kGradients  gradients of the experts' matrices and, on GPUs, of the router's: products that are sums over rows
//   kReturn     what follows a warp's role: sums, and waits for what they need
#define FLASHMOE_PHASES(ROW)   \
  ROW(kGate, "gate")           \
  ROW(kDispatch, "dispatch")   \
  ROW(kGemm0, "gemm0")         \
  ROW(kGemm1, "gemm1")         \
  ROW(kReduce, "reduce")       \
  ROW(kCombine, "combine")     \
  ROW(kWait, "wait")           \
  ROW(kSchedule, "schedule")   \
  ROW(kEpilogue, "epilogue")   \
  ROW(kForm, "form")           \
  ROW(kSend, "send")           \
  ROW(kRehearse, "rehearse")   \
  ROW(kGradients, "gradients") \
  ROW(kReturn, "return")

#define FLASHMOE_VALUE(value, ...)      value,
#define FLASHMOE_NAME(value, name, ...) name,

// Stored in bytes, so that CallConfig fits into a cache line of 64. ReturnMode, which kernels read, is a word.
enum class DType : uint8_t { FLASHMOE_DTYPES(FLASHMOE_VALUE) };
enum class Activation : uint8_t { FLASHMOE_ACTIVATIONS(FLASHMOE_VALUE) };
enum class Routing : uint8_t { FLASHMOE_ROUTINGS(FLASHMOE_VALUE) };
enum class WeightScales : uint8_t { FLASHMOE_WEIGHT_SCALES(FLASHMOE_VALUE) };
enum class ReturnMode : uint32_t { FLASHMOE_RETURN_MODES(FLASHMOE_VALUE) };
enum class Phase : uint32_t { FLASHMOE_PHASES(FLASHMOE_VALUE) };

// Names<E>::kAll[i] is the name of value i.
template <class E>
struct Names;
template <>
struct Names<DType> {
  static constexpr const char* kAll[] = {FLASHMOE_DTYPES(FLASHMOE_NAME)};
};
template <>
struct Names<Activation> {
  static constexpr const char* kAll[] = {FLASHMOE_ACTIVATIONS(FLASHMOE_NAME)};
};
template <>
struct Names<Routing> {
  static constexpr const char* kAll[] = {FLASHMOE_ROUTINGS(FLASHMOE_NAME)};
};
template <>
struct Names<WeightScales> {
  static constexpr const char* kAll[] = {FLASHMOE_WEIGHT_SCALES(FLASHMOE_NAME)};
};
template <>
struct Names<ReturnMode> {
  static constexpr const char* kAll[] = {FLASHMOE_RETURN_MODES(FLASHMOE_NAME)};
};
template <>
struct Names<Phase> {
  static constexpr const char* kAll[] = {FLASHMOE_PHASES(FLASHMOE_NAME)};
};

#define FLASHMOE_OR_GATED(value, name, gated) || (gated && a == Activation::value)
FLASHMOE_HD constexpr bool is_gated(Activation a) {
  return false FLASHMOE_ACTIVATIONS(FLASHMOE_OR_GATED);
}

#undef FLASHMOE_VALUE
#undef FLASHMOE_NAME
#undef FLASHMOE_OR_GATED

template <class E>
inline constexpr size_t kValues = sizeof(Names<E>::kAll) / sizeof(Names<E>::kAll[0]);

template <class E>
constexpr const char* name_of(E value) {
  const auto i = static_cast<size_t>(value);
  return i < kValues<E> ? Names<E>::kAll[i] : "?";
}

// Of what rows are in; spec/encoding.h has the bits of all.
FLASHMOE_HD constexpr uint32_t element_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : t == DType::kFloat8E4M3 ? 1 : 2;
}

}  // namespace flashmoe

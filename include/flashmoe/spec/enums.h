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

// After the names, each row says whether the activation has a gate. If so, GEMM0 has two results for each intermediate
// column: the gate, and a value ("up") that is multiplied by the activated gate.
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

// Who chooses a token's experts: the caller (kGiven), or the router, which takes the largest scores. The scores are the
// softmax of the logits over all E experts (kSoftmax), or the sigmoid of each logit (kSigmoid).
#define FLASHMOE_ROUTINGS(ROW) \
  ROW(kGiven, "given")         \
  ROW(kSoftmax, "softmax")     \
  ROW(kSigmoid, "sigmoid")

// How results come home: each of a token's K rows by itself (kDirect), or, from each rank, the sum of the token's rows
// that this rank has computed (kReduced).
#define FLASHMOE_RETURN_MODES(ROW) \
  ROW(kDirect, "direct")           \
  ROW(kReduced, "reduced")

// Which elements of a quantised matrix share a scale: all (kTensor), those of a row, or those of a block
// (spec/encoding.h). kNone: weights are not quantised, and have no scales.
#define FLASHMOE_WEIGHT_SCALES(ROW) \
  ROW(kNone, "none")                \
  ROW(kTensor, "tensor")            \
  ROW(kRow, "row")                  \
  ROW(kBlock, "block")

// What actors spend their time on, as reports and traces name it. The phases from kEpilogue on are in traces only.
//   kEpilogue   the last part of a product's time: results go from the accumulators to memory
//   kForm       the time of a former, until all packets have become tiles
//   kSend       the time in which a thread block sends rows to other ranks; it contains spans of kDispatch
//   kRehearse   a task without rows, which a thread block runs so that its code is loaded (sm90/roles/look_up.cuh)
//   kGradients  gradients of the experts' matrices and, on GPUs, of the router's: products that are sums over rows
//   kReturn     what a warp does after its role has ended: sums of returned rows, and waits for these rows
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

// Enums are bytes, so that CallConfig, which has some of them, fits into 64 bytes. ReturnMode is a word of 32 bits,
// because kernels read it; Phase is in no CallConfig.
enum class DType : uint8_t { FLASHMOE_DTYPES(FLASHMOE_VALUE) };
enum class Activation : uint8_t { FLASHMOE_ACTIVATIONS(FLASHMOE_VALUE) };
enum class Routing : uint8_t { FLASHMOE_ROUTINGS(FLASHMOE_VALUE) };
enum class WeightScales : uint8_t { FLASHMOE_WEIGHT_SCALES(FLASHMOE_VALUE) };
enum class ReturnMode : uint8_t { FLASHMOE_RETURN_MODES(FLASHMOE_VALUE) };
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

// Bytes of an element, for the types that rows have. (For the bits of every type see spec/encoding.h.)
FLASHMOE_HD constexpr uint32_t element_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : t == DType::kFloat8E4M3 ? 1 : 2;
}

}  // namespace flashmoe

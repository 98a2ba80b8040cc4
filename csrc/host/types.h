// Tensor element types and activations, as the host numbers them for both engines.
#pragma once

#include <cstdint>

namespace flashmoe::host {

enum class DType : uint32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class Activation : uint32_t { kRelu = 0, kGelu = 1, kSilu = 2, kSwiGlu = 3 };

inline uint32_t element_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : 2;
}

}  // namespace flashmoe::host

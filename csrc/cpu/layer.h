// One layer's tensors and options as a call receives them: contiguous, shapes already checked.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace flashmoe::cpu {

struct Layer {
  DType dtype = DType::kFloat32;
  Activation activation = Activation::kSwiGlu;
  bool renormalize = true;
  const void* x = nullptr;              // [T, H]
  const void* gate_up = nullptr;        // [El, 2I, H] (SwiGLU: gate rows, then up rows) or [El, I, H]
  const void* gate_up_bias = nullptr;   // [El, 2I] or [El, I]; may be null
  const void* down = nullptr;           // [El, H, I]
  const void* down_bias = nullptr;      // [El, H]; may be null
  const void* router = nullptr;         // [E, H]; null: routing is given
  const void* router_bias = nullptr;    // [E]; may be null
  const int32_t* topk_ids = nullptr;    // [T, K]; null: the router decides
  const float* topk_weights = nullptr;  // [T, K]
  void* out = nullptr;                  // [T, H]
  float* kept = nullptr;  // [El, I, H], of programs with a product that keeps its results (Epilogue::kKeep)
};

}  // namespace flashmoe::cpu

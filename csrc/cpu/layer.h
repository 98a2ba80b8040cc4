// A layer as a call receives it: what the layer is, and its tensors. Tensors are contiguous and have the layer's
// shapes. `Is`: the width of the shared expert.
#pragma once

#include <cstdint>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

class Kept;

struct Layer {
  LayerSpec spec;
  const void* x = nullptr;         // [T, H]
  const float* x_scale = nullptr;  // [T, ceil(H / 128)], scales of x in FP8; else null
  const void* gate_up = nullptr;   // [El, 2I, H] (gate rows, then up rows; or interleaved) or [El, I, H]; or transposed
  const void* gate_up_bias = nullptr;    // [El, 2I] or [El, I]; may be null
  const void* down = nullptr;            // [El, H, I], or transposed
  const void* down_bias = nullptr;       // [El, H]; may be null
  const void* router = nullptr;          // [E, H]; null if routing is given
  const void* router_bias = nullptr;     // [E]; may be null
  const float* choice_bias = nullptr;    // [E]; may be null
  const void* shared_gate_up = nullptr;  // [2 Is, H] or [Is, H], like gate_up of one expert; null: no shared expert
  const void* shared_down = nullptr;     // [H, Is], or transposed
  const void* shared_gate = nullptr;     // [H]; may be null
  const void* shared_up = nullptr;       // [Is, H] ups; then shared_gate_up has only gates; null: it has both
  // Scales of quantised weights: [El], [El, rows], or for blocks (spec/encoding.h) [El, blocks of rows, blocks of
  // columns]. The gate's rows and the up's rows have blocks of their own, unless they are interleaved. The shared
  // expert's scales have the same shapes without El.
  const void *gate_up_scale = nullptr, *down_scale = nullptr;
  const void *shared_gate_up_scale = nullptr, *shared_down_scale = nullptr;
  const int32_t* topk_ids = nullptr;   // [T, K]; null if the router decides
  const void* topk_weights = nullptr;  // [T, K]
  DType topk_weight_type = DType::kFloat32;
  void* out = nullptr;             // [T, H]
  uint64_t* load = nullptr;        // [E], to which the number of each expert's choices is added; may be null
  float* router_logits = nullptr;  // [T, E], written: the logits that are scored; may be null
  Kept* kept = nullptr;            // takes what gradients need of the call; null: nothing is kept
};

}  // namespace flashmoe::cpu

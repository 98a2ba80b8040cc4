// A layer as a call receives it: what it is, and its tensors, contiguous and of the shapes that it has.
#pragma once

#include <cstdint>

#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

class Kept;

struct Layer {
  LayerSpec spec;
  const void* x = nullptr;         // [T, H]
  const float* x_scale = nullptr;  // [T, ceil(H / 128)], of x in FP8; else null
  const void* gate_up = nullptr;   // [El, 2I, H] (gate rows, then up rows; or interleaved) or [El, I, H]; or transposed
  const void* gate_up_bias = nullptr;    // [El, 2I] or [El, I]; may be null
  const void* down = nullptr;            // [El, H, I], or transposed
  const void* down_bias = nullptr;       // [El, H]; may be null
  const void* router = nullptr;          // [E, H]; null where routing is given
  const void* router_bias = nullptr;     // [E]; may be null
  const float* choice_bias = nullptr;    // [E]; may be null
  const void* shared_gate_up = nullptr;  // [2 Is, H] or [Is, H], as gate_up of one expert; null where there is none
  const void* shared_down = nullptr;     // [H, Is]; or transposed, as all
  const void* shared_gate = nullptr;     // [H]; may be null
  const void* shared_up = nullptr;       // [Is, H]: shared_gate_up is [Is, H] then, the gate alone; null: it has both
  // Of quantised weights: [El], [El, rows], or of blocks (spec/encoding.h) [El, blocks of rows, blocks of columns], where
  // the gate's rows and the up's have blocks of their own unless they are interleaved. Of the shared expert: the same
  // without El.
  const void *gate_up_scale = nullptr, *down_scale = nullptr;
  const void *shared_gate_up_scale = nullptr, *shared_down_scale = nullptr;
  const int32_t* topk_ids = nullptr;   // [T, K]; null where the router decides
  const void* topk_weights = nullptr;  // [T, K]
  DType topk_weight_type = DType::kFloat32;
  void* out = nullptr;             // [T, H]
  uint64_t* load = nullptr;        // [E], to which each expert's choices are added, of all tokens; may be null
  float* router_logits = nullptr;  // [T, E], written: the logits as they are scored; may be null
  Kept* kept = nullptr;            // takes what gradients need of the call; null: nothing is kept
};

}  // namespace flashmoe::cpu

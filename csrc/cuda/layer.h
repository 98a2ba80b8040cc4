// What a caller says of a layer, once, and of its tokens, at each call. Addresses are the device's.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/tensor_map.h"
#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/layer.h"
#include "host/placement.h"

namespace flashmoe::cuda {

// A layer as calls share it: what it is, and where everything but its tokens lies.
struct Layer {
  LayerSpec spec;
  host::Holders placement;                                                     // of each of E experts
  Matrix gate_up, down, router;                                                // router.data 0: routing is given
  Matrix shared_gate_up, shared_down;                                          // one matrix each; data 0: none
  uint64_t gate_up_bias = 0, down_bias = 0, router_bias = 0, choice_bias = 0;  // 0: none
  uint64_t shared_gate = 0;                                                    // [H]; 0: none
  // Scales of matrices in e4m3, contiguous, as spec.weight_scales says; 0: none.
  uint64_t gate_up_scale = 0, down_scale = 0, shared_gate_up_scale = 0, shared_down_scale = 0;
  bool topk_ids_64 = false;        // given ids are int64
  bool topk_weights_as_x = false;  // given weights are of x's type, not float32
  bool traced = false;
  bool keeps = false;  // what gradients need (a rank alone, 16-bit types)
  uint64_t kept = 0;   // [El, I, H] fp32, see KernelArgs
  std::string cubin;   // file of the kernel compiled for the spec's types and activation, and traced
};

// Where what a call keeps lies in its memory: pre-activations first (KeptOutputs).
struct KeptLayout {
  uint64_t ids, weights, bytes;

  KeptLayout(const LayerSpec& spec, uint64_t tokens) {
    const uint64_t columns = uint64_t{spec.intermediate} * (spec.gated() ? 2 : 1);
    const uint64_t routed = spec.top_k * spec.slices, choices = routed + shared_experts(spec.shared);
    ids = tokens * (routed + spec.shared) * columns * element_bytes(spec.intermediate_type);
    weights = ids + tokens * choices * sizeof(int32_t);
    bytes = weights + tokens * choices * sizeof(float);
  }
};

// What changes from call to call.
struct TokenSpec {
  uint32_t tokens = 0;
  uint64_t x = 0, x_row_bytes = 0;
  uint64_t x_scale = 0;  // of x in e4m3; 0: none
  uint64_t out = 0;
  uint64_t topk_ids = 0, topk_weights = 0;  // 0 with a router
  uint64_t load = 0, router_logits = 0;     // see KernelArgs; 0: not asked for
  uint64_t keep = 0;                        // of a layer that keeps: memory of KeptLayout, aligned to 16 bytes
};

}  // namespace flashmoe::cuda

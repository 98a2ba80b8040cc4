// A backward pass of the CPU engine: what it is given, and what its processors share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kept.h"
#include "cpu/layer.h"

namespace flashmoe::cpu {

// What a backward pass reads and writes, besides what the forward pass has kept. If a result is null, it is not wanted
// and not computed; only the gradient of x must not be null. Each result has the shape and type of its tensor. If
// `accumulates`, the results for weights and biases are float32, and are added to what is there.
struct Gradients {
  Layer layer;                    // the forward pass's tensors, without `out`
  const void* y = nullptr;        // [T, H], gradients of y, from which all other gradients follow
  const float* logits = nullptr;  // [T, E], gradients that the router's logits have from elsewhere; may be null
  void* x = nullptr;              // [T, H]
  void* gate_up = nullptr;        // as Layer::gate_up, and so on
  void* gate_up_bias = nullptr;
  void* down = nullptr;
  void* down_bias = nullptr;
  void* router = nullptr;
  void* router_bias = nullptr;
  void* shared_gate_up = nullptr;
  void* shared_down = nullptr;
  void* shared_gate = nullptr;
  void* shared_up = nullptr;
  void* topk_weights = nullptr;  // [T, K], of the combine weights' type
  bool accumulates = false;
};

// The memory that a backward pass takes until it ends. It holds the gradients of pre-activations and of combine
// weights; other ranks' rows of dY, and of x if x is dispatched again; and the gradients of logits.
BytesOfEach pass_bytes(const LayerSpec& layer, bool redispatch);

// A backward pass that runs. pass_bytes() gives the size of its memory.
struct Backward {
  Backward(const Kept& kept, const Gradients& gradients);

  // For a local expert: its intermediate width; and the elements of a row of its pre-activations' gradients.
  uint32_t width(uint32_t expert) const { return kept.spec.intermediate * (is_shared(expert) ? kept.spec.shared : 1); }
  uint32_t gate_up_rows(uint32_t expert) const { return width(expert) * (kept.spec.gated() ? 2 : 1); }
  bool is_shared(uint32_t expert) const { return kept.spec.shared != 0 && expert + 1 == kept.local_experts(); }
  // The gradient of the pre-activations of an expert's row, in the order of the rows of the expert's gate_up. `row` is
  // the row's number among all kept rows.
  float* pre_activations(uint32_t expert, uint64_t row) {
    return hidden.get() + offset[expert] + (row - kept.first_row(expert)) * gate_up_rows(expert);
  }
  // x of the n-th token of other ranks. Valid when the rows of all these tokens have arrived.
  const uint8_t* x_row(uint32_t n) const {
    return kept.redispatch ? redispatched.data() + uint64_t{n} * kept.row_bytes() : kept.received_row(n);
  }
  // A slice's part of the gradient of a row's combine weight.
  float& weight(uint64_t row, uint32_t slice) { return weights[row * slices + slice]; }

  const Kept& kept;
  const Gradients& gradients;
  uint32_t slices;                     // of the shared expert; 1 without one
  std::vector<uint64_t> offset;        // [El + 1] where the expert's rows begin in `hidden`
  std::unique_ptr<float[]> hidden;     // gradients of pre-activations
  std::vector<float> weights;          // [rows][slices]
  std::vector<uint8_t> received;       // dY of other ranks' tokens, in the order of Kept::received_row
  std::vector<uint8_t> redispatched;   // with redispatch: x of the same tokens in the same order; else empty
  std::vector<float> logits;           // [T, E] gradients of the router's logits; empty without a router
  std::vector<float> shared_logits;    // [T] gradients of the logits of the shared expert's gate; empty without one
  std::atomic<uint32_t> next_part{0};  // next part of the weights' gradients to compute (weight_gradients.h)
};

}  // namespace flashmoe::cpu

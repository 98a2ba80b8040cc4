// What a layer is, for both engines: all that stays the same from call to call, except its tensors' addresses and the
// placement of its experts.
// Python's is flashmoe.spec.LayerSpec, field by field of the same name; csrc/bindings/codec.h reads one into the other.
#pragma once

#include "flashmoe/spec/enums.h"

namespace flashmoe {

struct LayerSpec {
  uint32_t hidden = 0;           // H, elements of a token's row
  uint32_t intermediate = 0;     // I, elements of an expert's intermediate row
  uint32_t experts = 0;          // E, of all ranks
  uint32_t top_k = 0;            // K, experts of a token
  double capacity_factor = 0.0;  // an expert keeps ceil(factor * (T * K) / E) choices of a rank; 0: all
  ReturnMode return_mode = ReturnMode::kDirect;
  // Element types. x_type: x, dispatched rows and y. weight_type: weights and biases. intermediate_type: intermediate
  // rows. return_type: staged rows and return rows.
  DType x_type = DType::kBFloat16, weight_type = DType::kBFloat16;
  DType intermediate_type = DType::kBFloat16, return_type = DType::kBFloat16;
  Activation activation = Activation::kSwiGlu;
  Routing routing = Routing::kSoftmax;
  bool renormalize = true;  // with a router: a token's K weights are divided by their sum
  bool router_bias = false, gate_up_bias = false, down_bias = false;
  bool exact = false;  // GPU, float32: products in float32, without the tensor cores

  FLASHMOE_HD constexpr bool gated() const { return is_gated(activation); }
  // Rows of an expert's first matrix.
  FLASHMOE_HD constexpr uint32_t gate_up_rows() const { return gated() ? 2 * intermediate : intermediate; }
  FLASHMOE_HD constexpr uint32_t token_row_bytes() const { return hidden * element_bytes(x_type); }
  FLASHMOE_HD constexpr uint32_t intermediate_row_bytes() const {
    return intermediate * element_bytes(intermediate_type);
  }
  FLASHMOE_HD constexpr uint32_t return_row_bytes() const { return hidden * element_bytes(return_type); }
};

// Calls f(name, field) for every field, by the names that Python has.
template <class Layer, class F>
constexpr void for_each_field(Layer& l, F&& f) {
  f("hidden", l.hidden);
  f("intermediate", l.intermediate);
  f("experts", l.experts);
  f("top_k", l.top_k);
  f("activation", l.activation);
  f("routing", l.routing);
  f("renormalize", l.renormalize);
  f("router_bias", l.router_bias);
  f("gate_up_bias", l.gate_up_bias);
  f("down_bias", l.down_bias);
  f("x_type", l.x_type);
  f("weight_type", l.weight_type);
  f("intermediate_type", l.intermediate_type);
  f("return_type", l.return_type);
  f("exact", l.exact);
  f("return_mode", l.return_mode);
  f("capacity_factor", l.capacity_factor);
}

// The layer as far as all ranks of a call must agree on it. Fields in which ranks may differ have their default values.
constexpr LayerSpec agreed_part(LayerSpec l) {
  const LayerSpec by_default;
  l.routing = by_default.routing;
  l.renormalize = by_default.renormalize;
  l.router_bias = by_default.router_bias;
  l.gate_up_bias = by_default.gate_up_bias;
  l.down_bias = by_default.down_bias;
  l.exact = by_default.exact;
  return l;
}

// The name of an element type's field that differs from x_type; null if none does. Neither engine has products of mixed
// types so far: this is where they would be let in.
constexpr const char* differing_type(const LayerSpec& l) {
  if (l.weight_type != l.x_type) return "weight_type";
  if (l.intermediate_type != l.x_type) return "intermediate_type";
  if (l.return_type != l.x_type) return "return_type";
  return nullptr;
}

}  // namespace flashmoe

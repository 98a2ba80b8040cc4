// What a layer is, for both engines: all that stays the same from call to call, except its tensors' addresses and the
// placement of its experts. Python has the same fields, with the same names, in flashmoe.spec.LayerSpec;
// csrc/bindings/codec.h reads them into this struct.
#pragma once

#include <limits>

#include "flashmoe/spec/encoding.h"
#include "flashmoe/spec/enums.h"
#include "flashmoe/spec/rows.h"

namespace flashmoe {

// The fields of a layer in which all ranks of a call must agree. (Together with hashes they fit into a cache line:
// CallConfig.)
struct AgreedLayer {
  uint32_t hidden = 0;           // H, elements of a token's row
  uint32_t intermediate = 0;     // I, elements of an expert's intermediate row
  uint32_t experts = 0;          // E, of all ranks
  uint32_t top_k = 0;            // K, experts of a token
  double capacity_factor = 0.0;  // an expert keeps at most ceil(factor * (T * K) / E) choices of a rank; 0: all
  ReturnMode return_mode = ReturnMode::kDirect;
  // Element types. x_type: x as the caller gives it. token_type: x's rows as they are sent and multiplied.
  // weight_type: the experts' matrices. intermediate_type: intermediate rows. return_type: staged rows and return rows.
  // y_type: y, the router and all biases. (Rows of e4m3: spec/rows.h.)
  DType x_type = DType::kBFloat16, token_type = DType::kBFloat16, weight_type = DType::kBFloat16;
  DType intermediate_type = DType::kBFloat16, return_type = DType::kBFloat16, y_type = DType::kBFloat16;
  Activation activation = Activation::kSwiGlu;
  bool weights_on_input = false;  // a token's weights scale its row before the experts, not their results
  uint16_t most_tokens = 0;       // as all ranks promise, no rank has more tokens in the call; 0: nothing is promised
  // Parameters of kClampedSwiGlu, which makes of a gate g and an up u: min(g, limit) sigmoid(alpha min(g, limit))
  // (clamp(u, -limit, limit) + up_offset)
  float limit = std::numeric_limits<float>::infinity(), alpha = 1.0f, up_offset = 0.0f;
};

struct LayerSpec : AgreedLayer {
  Routing routing = Routing::kSoftmax;
  WeightScales weight_scales = WeightScales::kNone;
  bool renormalize = true;    // with a router: a token's K weights are divided by their sum
  bool round_logits = false;  // with a router: its logits are rounded to y_type
  bool choice_bias = false;   // with a router: E numbers are added to the scores for the choice, not for the weights
  bool router_bias = false, gate_up_bias = false, down_bias = false;
  bool interleaved = false;   // with a gate: row 2i of gate_up_proj is column i's gate, row 2i + 1 its up
  bool transposed = false;    // the experts' matrices are [El, H, 2I or I] and [El, I, H]
  bool exact = false;         // GPU, float32: products in float32, without the tensor cores
  bool shared_gate = false;   // the shared expert's result is multiplied by the sigmoid of a row's product with x
  uint32_t slices = 1;        // the number of slices of an expert; each has I columns, and holders of its own
  uint32_t shared = 0;        // the number of slices, of I columns each, of the shared expert; 0: there is none
  uint32_t groups = 1;        // with a router: the number of groups of experts; E / groups neighbours form a group
  uint32_t top_groups = 1;    // with a router: experts are chosen only from this number of groups, the best ones
  float routed_scale = 1.0f;  // with a router: all weights are multiplied by it

  FLASHMOE_HD constexpr bool gated() const { return is_gated(activation); }
  // Rows of an expert's first matrix.
  FLASHMOE_HD constexpr uint32_t gate_up_rows() const { return gated() ? 2 * intermediate : intermediate; }
  // Sets all six element types to t.
  constexpr void set_types(DType t) {
    x_type = token_type = weight_type = intermediate_type = return_type = y_type = t;
  }
  // Whether rows are quantised.
  FLASHMOE_HD constexpr bool quantised() const { return token_type == DType::kFloat8E4M3; }
  FLASHMOE_HD constexpr uint32_t token_row_bytes() const { return row_bytes(hidden, element_bytes(token_type)); }
  FLASHMOE_HD constexpr uint32_t intermediate_row_bytes() const {
    return row_bytes(intermediate, element_bytes(intermediate_type));
  }
  FLASHMOE_HD constexpr uint32_t return_row_bytes() const { return row_bytes(hidden, element_bytes(return_type)); }
};

// The number of shared experts, 1 or 0, of a layer whose shared expert has `width` slices.
FLASHMOE_HD constexpr uint32_t shared_experts(uint32_t width) {
  return width != 0 ? 1 : 0;
}

// Added to the sum of a token's K sigmoid scores before weights are divided by it, because all K scores may be 0.
inline constexpr float kLeastSum = 1e-20f;

// Calls f(name, field) for every field. The name is the field's name in Python.
template <class Layer, class F>
constexpr void for_each_agreed_field(Layer& l, F&& f) {
  f("hidden", l.hidden);
  f("intermediate", l.intermediate);
  f("experts", l.experts);
  f("top_k", l.top_k);
  f("activation", l.activation);
  f("limit", l.limit);
  f("alpha", l.alpha);
  f("up_offset", l.up_offset);
  f("weights_on_input", l.weights_on_input);
  f("x_type", l.x_type);
  f("token_type", l.token_type);
  f("weight_type", l.weight_type);
  f("intermediate_type", l.intermediate_type);
  f("return_type", l.return_type);
  f("y_type", l.y_type);
  f("return_mode", l.return_mode);
  f("capacity_factor", l.capacity_factor);
  f("most_tokens", l.most_tokens);
}
template <class F>
constexpr void for_each_field(LayerSpec& l, F&& f) {
  for_each_agreed_field(l, f);
  f("routing", l.routing);
  f("weight_scales", l.weight_scales);
  f("renormalize", l.renormalize);
  f("round_logits", l.round_logits);
  f("routed_scale", l.routed_scale);
  f("groups", l.groups);
  f("top_groups", l.top_groups);
  f("choice_bias", l.choice_bias);
  f("router_bias", l.router_bias);
  f("gate_up_bias", l.gate_up_bias);
  f("down_bias", l.down_bias);
  f("interleaved", l.interleaved);
  f("transposed", l.transposed);
  f("exact", l.exact);
  f("slices", l.slices);
  f("shared", l.shared);
  f("shared_gate", l.shared_gate);
}

// Checks whether the six element types are a combination that is supported. If not, returns the name of a field that
// does not fit the others, and sets `expected` to the type that would fit. If they are, returns null. Three
// combinations are supported. All six are the same. Or weights, tokens' rows and intermediate rows are in e4m3, x is
// in e4m3 or in y's type, and returns are in y's type. Or only the weights are in mxfp4. No other function decides
// this.
constexpr const char* differing_type(const LayerSpec& l, DType& expected) {
  const bool quantised = l.weight_type == DType::kFloat8E4M3;
  expected = l.y_type;
  if (has_scales(l.y_type)) return expected = DType::kBFloat16, "y_type";
  if (l.return_type != l.y_type) return "return_type";
  if (l.x_type != l.y_type && !(quantised && l.x_type == DType::kFloat8E4M3)) return "x_type";
  if (!has_scales(l.weight_type) && l.weight_type != l.y_type) return "weight_type";
  if (quantised) expected = DType::kFloat8E4M3;
  if (l.token_type != expected) return "token_type";
  if (l.intermediate_type != expected) return "intermediate_type";
  return nullptr;
}

}  // namespace flashmoe

// What a backward pass adds to the protocol, which it else runs as it is: it is a call of the layer's program whose token
// rows are dY and whose routing is the forward pass's, known before it begins.
//
//   tokens     rows of dY; each crosses to a rank once, and with it the token's x, where the forward pass has kept none
//   GEMM0      dA = dY down^T; from it and what the forward pass kept, each row's gradient of its pre-activations
//   GEMM1      dX = that times gate_up, to the row's home: by itself or summed with the token's others (Reduce)
//   Combine    dX of a token, and what comes back through the router
//   afterwards the gradients of weights: sums over an expert's rows, in canonical order, which no peer waits for
//
// Besides rows, the gradients of combine weights go home: one number for each choice, in a region of the heap of its own.
// They are written before the rows that a return signal announces.
//
// x that is dispatched again (`redispatch`) has a region of its own, too, laid out as dispatched rows are. Who writes a
// row of dY writes the token's x before the same signal; who reads it has read both before the same return. So the pair
// is to every actor what a row is in other calls, of twice the bytes.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// A row of a local expert as the forward pass has left it, whose home is `source`.
struct CanonicalRow {
  uint32_t source, token;

  // The order of an expert's rows in every sum over them, in whatever order they came: by source, then by token. (An
  // expert has a token once.)
  FLASHMOE_HD constexpr uint64_t key() const { return uint64_t{source} << 32 | token; }
  FLASHMOE_HD friend constexpr bool operator<(const CanonicalRow& a, const CanonicalRow& b) {
    return a.key() < b.key();
  }
};

// Elements that are kept of a row of an expert whose intermediate rows are `width` wide: the pre-activations, gates
// before ups, whatever the order of the matrix's rows; each of y's type.
FLASHMOE_HD constexpr uint64_t kept_elements(const LayerSpec& layer, uint32_t width) {
  return uint64_t{layer.gated() ? 2u : 1u} * width;
}

// ---- Behind the symmetric heap. In a table of its own, since the heap's layout is a part of every kernel -------------

enum class GradientField : uint32_t { kWeights, kRows, kCount };

inline constexpr FieldSpec<GradientField> kGradientTable[] = {
    {GradientField::kWeights, "weight_gradients", Writer::kReturn,
     [](const Limits& l) { return FieldShape{{l.max_tokens, l.choices_per_token(), 1, 1}, 4}; },
     "[token][k] gradients of combine weights, from the owner of the choice's expert (backward passes only)"},
    {GradientField::kRows, "x_rows", Writer::kPeer0,
     [](const Limits& l) {
       return FieldShape{{l.redispatch * (l.ranks - 1), l.max_tokens, row_pitch(l.hidden, l.x_bytes), 1}, 1};
     },
     "[peer][token][H] rows of x, dispatched again beside those of dY (backward passes with redispatch only)"},
};
static_assert(sizeof(kGradientTable) / sizeof(kGradientTable[0]) == static_cast<size_t>(GradientField::kCount));

using GradientLayout = Layout<GradientField>;

inline GradientLayout make_gradient_layout(const Limits& limits) {
  return make_layout(kGradientTable, limits);
}

// Heap and what lies behind it.
inline uint64_t training_heap_bytes(const Limits& limits) {
  return make_heap_layout(limits).bytes + make_gradient_layout(limits).bytes;
}

// The gradient of the weight of choice (token, k), at the token's home.
FLASHMOE_HD float* weight_gradient(const Call& c, const GradientLayout& layout, uint32_t home, uint32_t token,
                                   uint32_t k) {
  return layout.at<float>(c.memory.heaps[home] + c.memory.heap_layout.bytes, GradientField::kWeights, token, k);
}

// How many bytes behind a dispatched row of dY (Call::dispatched_row) the token's x lies, where it is dispatched again:
// the two fields have one shape.
inline uint64_t redispatched_behind(const Call& c, const GradientLayout& layout) {
  return c.memory.heap_layout.bytes + layout.offset[static_cast<uint32_t>(GradientField::kRows)] -
         c.memory.heap_layout.offset[static_cast<uint32_t>(HeapField::kRows)];
}

}  // namespace flashmoe

// What a backward pass adds to the protocol. A backward pass is a call like others, with these differences: its token
// rows are rows of dY, and its routing is that of the forward pass, so it is known from the beginning.
//
//   tokens     rows of dY. Each crosses to a rank once, with the token's x, if the forward pass has kept no x there
//   GEMM0      dA = dY down. From dA and what the forward pass kept: each row's gradient of its pre-activations
//   GEMM1      dX = that gradient times gate_up. It goes to the row's home, by itself or summed by Reduce
//   Combine    dX of a token, and what comes back through the router
//   afterwards the gradients of weights: sums over an expert's rows, in canonical order. No peer waits for them
//
// The gradients of combine weights go home, too: one number for each choice, in a field behind the heap. A rank
// writes the number before the return signal that announces the choice's row.
//
// With `redispatch`, x is sent again. Its rows have a field of their own, laid out like dispatched rows. Whoever
// writes a row of dY also writes the token's x before the same signal. Whoever reads the row has read both before the
// same return signal. So every actor can treat the pair as one row of twice the bytes.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// Names a row of a local expert by its token: the home rank of the token, and its number there.
struct CanonicalRow {
  uint32_t source, token;

  // The canonical order of an expert's rows: by source, then by token. Every sum over the rows takes this order,
  // whatever the order in which they arrived. (An expert has a token at most once.)
  FLASHMOE_HD constexpr uint64_t key() const { return uint64_t{source} << 32 | token; }
  FLASHMOE_HD friend constexpr bool operator<(const CanonicalRow& a, const CanonicalRow& b) {
    return a.key() < b.key();
  }
};

// The number of elements that are kept for a row of an expert with `width` columns of I: the row's pre-activations,
// in y's type. Gates come before ups, whatever order the rows of the expert's first matrix have.
FLASHMOE_HD constexpr uint64_t kept_elements(const LayerSpec& layer, uint32_t width) {
  return uint64_t{layer.gated() ? 2u : 1u} * width;
}

// ---- Fields behind the symmetric heap, in a table of their own, because every kernel has the heap's layout ----------

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

// Bytes of the heap and of the fields for gradients behind it.
inline uint64_t training_heap_bytes(const Limits& limits) {
  return make_heap_layout(limits).bytes + make_gradient_layout(limits).bytes;
}

// The gradient of the weight of choice (token, k), at the token's home.
FLASHMOE_HD float* weight_gradient(const Call& c, const GradientLayout& layout, uint32_t home, uint32_t token,
                                   uint32_t k) {
  return layout.at<float>(c.memory.heaps[home] + c.memory.heap_layout.bytes, GradientField::kWeights, token, k);
}

// How many bytes behind a dispatched row of dY (Call::dispatched_row) the token's x lies, if x is dispatched again.
// It is one number for all rows, because the two fields have the same shape.
inline uint64_t redispatched_behind(const Call& c, const GradientLayout& layout) {
  return c.memory.heap_layout.bytes + layout.offset[static_cast<uint32_t>(GradientField::kRows)] -
         c.memory.heap_layout.offset[static_cast<uint32_t>(HeapField::kRows)];
}

}  // namespace flashmoe

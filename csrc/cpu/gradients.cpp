#include "cpu/gradients.h"

namespace flashmoe::cpu {

Backward::Backward(const Kept& of, const Gradients& to)
    : kept(of),
      gradients(to),
      slices(std::max(of.spec.shared, 1u)),
      offset(of.local_experts() + 1),
      weights(of.rows().size() * slices),
      received(uint64_t{of.received_rows()} * of.row_bytes()) {
  for (uint32_t l = 0; l < of.local_experts(); ++l) {
    offset[l + 1] = offset[l] + (of.first_row(l + 1) - of.first_row(l)) * gate_up_rows(l);
  }
  hidden = std::make_unique_for_overwrite<float[]>(offset.back());
  if (of.spec.routing != Routing::kGiven) logits.resize(uint64_t{of.tokens} * of.spec.experts);
  if (of.spec.shared_gate) shared_logits.resize(of.tokens);
}

}  // namespace flashmoe::cpu

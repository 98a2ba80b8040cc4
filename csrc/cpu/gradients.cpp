#include "cpu/gradients.h"

namespace flashmoe::cpu {

Backward::Backward(const Kept& of, const Gradients& to)
    : kept(of),
      gradients(to),
      slices(std::max(of.spec.shared, 1u)),
      offset(of.local_experts() + 1),
      weights(of.rows().size() * slices),
      received(uint64_t{of.received_rows()} * of.row_bytes()),
      redispatched(of.redispatch ? received.size() : 0) {
  for (uint32_t l = 0; l < of.local_experts(); ++l) {
    offset[l + 1] = offset[l] + (of.first_row(l + 1) - of.first_row(l)) * gate_up_rows(l);
  }
  hidden = std::make_unique_for_overwrite<float[]>(offset.back());
  if (of.spec.routing != Routing::kGiven) logits.resize(uint64_t{of.tokens} * of.spec.experts);
  if (of.spec.shared_gate) shared_logits.resize(of.tokens);
}

BytesOfEach pass_bytes(const LayerSpec& l, bool redispatch) {
  const uint64_t slices = std::max(l.shared, 1u);
  const auto row = [&](uint64_t width) { return (width * (l.gated() ? 2 : 1) + slices) * sizeof(float); };
  const uint64_t logits = (l.routing == Routing::kGiven ? 0 : l.experts) + (l.shared_gate ? 1 : 0);
  return {.row = row(l.intermediate),
          .shared_row = l.shared == 0 ? 0 : row(uint64_t{l.intermediate} * l.shared),
          .received = l.token_row_bytes() * (redispatch ? 2u : 1u),
          .token = logits * sizeof(float)};
}

}  // namespace flashmoe::cpu

#include "network/pickup.h"

#include <iterator>
#include <utility>

namespace flashmoe::network {
namespace {

bool is_backward(const Call& c) {
  return (c.config.groups & CallConfig::kBackward) != 0;
}

// Calls f(token, k) for each of rank q's choices of an expert that computes here.
template <class F>
void for_each_choice_of(const Call& c, uint32_t q, F&& f) {
  for (uint32_t b = 0; b < c.blocks_of(q); ++b) {
    const Entry* entries = c.packet_entries(c.rank, q, c.packet_first_token(q, b));
    for (uint32_t i = 0; i < c.packet_size(q, b); ++i) f(entries[i].token, entries[i].k);
  }
}

}  // namespace

Messages pick_up_call(const Call& c, uint32_t q, uint64_t word) {
  Packing packing(c.memory.heaps[q]);
  packing.add(c.call_config(q, c.rank), sizeof(CallConfig));
  return packing.take(Header::kData, c.call_signal(q, c.rank), word);
}

Messages pick_up_packet(const Call& c, uint32_t q, uint32_t b, uint64_t word) {
  Packing packing(c.memory.heaps[q]);
  const uint32_t first = b << c.policy.log2_block, tokens = c.tokens_in_block(b);
  const uint16_t* const counts = c.out_counts(q, first);
  for (uint32_t t = 0; t < tokens; ++t) {
    if (counts[t] != 0) packing.add(c.dispatched_row(q, c.rank, first + t), c.memory.token_row_bytes);
  }
  packing.add(c.packet_offsets(q, c.rank, b), (c.owned(q) + 1) * sizeof(uint16_t));
  packing.add(c.packet_entries(q, c.rank, first), Signal::payload(word) * sizeof(Entry));
  if (c.reduced()) packing.add(c.packet_counts(q, c.rank, first), tokens * sizeof(uint16_t));
  return packing.take(Header::kData, c.packet_signal(q, c.rank, b), word);
}

Messages pick_up_returns(const Call& c, const GradientLayout& gradients, uint32_t q, uint64_t word) {
  Packing packing(c.memory.heaps[q]);
  const uint64_t bytes = c.memory.return_row_bytes;
  if (c.reduced()) {
    for (uint32_t t = 0; t < c.tokens_of(q); ++t) {
      if (*c.packet_counts(c.rank, q, t) != 0) packing.add(c.return_row(q, t, c.rank), bytes);
    }
  } else {
    for_each_choice_of(c, q, [&](uint32_t t, uint32_t k) { packing.add(c.return_row(q, t, k), bytes); });
  }
  if (is_backward(c)) {
    for_each_choice_of(c, q, [&](uint32_t t, uint32_t k) { packing.add(weight_gradient(c, gradients, q, t, k), 4); });
  }
  return packing.take(Header::kData, c.return_signal(q, c.rank, 0), word);
}

Messages pick_up_fault(const Call& c, uint32_t q) {
  Messages all;
  const FaultRecord* const record = c.fault(q, c.rank);
  if (record->fault.kind == FaultKind::kDisagree) {
    Packing own(c.memory.heaps[c.rank]);
    own.add(c.call_config(c.rank, c.rank), sizeof(CallConfig));
    own.add(c.call_config(c.rank, record->fault.awaited), sizeof(CallConfig));
    all = own.take(Header::kConfigs, nullptr, 0);
  }
  Packing packing(c.memory.heaps[q]);
  packing.add(&record->fault, sizeof(Fault));
  Messages last = packing.take(Header::kData, &record->posted, 1);
  std::move(last.begin(), last.end(), std::back_inserter(all));
  return all;
}

}  // namespace flashmoe::network

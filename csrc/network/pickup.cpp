#include "network/pickup.h"

#include <iterator>
#include <utility>

namespace flashmoe::network {
namespace {

bool is_backward(const Call& c) {
  return (c.config.groups & CallConfig::kBackward) != 0;
}

// Calls f(token, k) for each choice of rank q's tokens whose expert is computed on this rank.
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

Messages pick_up_batch(const SpreadCall& c, uint32_t relay, uint32_t n, uint32_t each, uint64_t word) {
  const Machines& m = c.spread;
  const RelayPlace to(c, m, relay, c.rank);
  const uint32_t machine = m.of[relay], begin = n * each, end = min_of(begin + each, c.blocks());
  const uint32_t first = begin << c.policy.log2_block, last = min_of(end << c.policy.log2_block, c.shape.tokens);
  Packing packing(c.memory.heaps[relay]);
  for (const uint64_t behind : {uint64_t{0}, m.second_row}) {
    for (uint32_t t = first; t < last; ++t) {
      if (to.is_needed(t)) packing.add(c.dispatched_row(relay, c.rank, t) + behind, c.memory.token_row_bytes);
    }
    if (m.second_row == 0) break;
  }
  for (uint32_t i = 0; i < m.size(machine); ++i) packing.add(to.counts(i, first), (last - first) * sizeof(uint16_t));
  for (uint32_t b = begin; b < end; ++b) {
    uint32_t entries = 0;
    for (uint32_t i = 0; i < m.size(machine); ++i) {
      const uint32_t owned = c.owned(m.rank_at(machine, i));
      packing.add(to.offsets(b, i), (owned + 1) * sizeof(uint16_t));
      entries += to.offsets(b, i)[owned];
    }
    packing.add(to.entries(b << c.policy.log2_block), entries * sizeof(Entry));
  }
  return packing.take(Header::kData, to.signal(n), word);
}

Messages pick_up_returns(const SpreadCall& c, const GradientLayout& gradients, uint32_t q, uint64_t word) {
  Packing packing(c.memory.heaps[q]);
  const uint64_t bytes = c.memory.return_row_bytes;
  if (c.spread.sums) {
    const RelayPlace from(c, c.spread, c.rank, q);
    for (uint32_t t = 0; t < c.tokens_of(q); ++t) {
      if (from.is_needed(t)) packing.add(c.return_row(q, t, c.rank), bytes);
    }
  } else if (c.reduced()) {
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
  Messages last = packing.take(Header::kData, &record->posted, FaultRecord::kFailed);
  std::move(last.begin(), last.end(), std::back_inserter(all));
  return all;
}

}  // namespace flashmoe::network

#include "cpu/kept.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/types.h"
#include "host/error.h"
#include "host/text.h"

namespace flashmoe::cpu {

Kept::Tile& Kept::tile(uint32_t t) {
  const std::lock_guard lock(mutex_);
  if (tiles_.size() <= t) tiles_.resize(t + 1);
  if (tiles_[t] == nullptr) tiles_[t] = std::make_unique<Tile>();
  return *tiles_[t];
}

uint8_t* Kept::pre_activations(const Call& call, uint32_t t, uint64_t elements) {
  Tile& kept = tile(t);
  const uint64_t bytes = call.tile(t)->shape.rows * elements * element_bytes(spec.y_type);
  const std::lock_guard lock(mutex_);
  if (kept.z == nullptr) kept.z = std::make_unique_for_overwrite<uint8_t[]>(bytes);
  return kept.z.get();
}

void Kept::store(uint8_t* row, uint64_t first, const float* values, uint32_t n) const {
  uint8_t* const to = row + first * element_bytes(spec.y_type);
  narrow(to, values, spec.y_type, n);
  if (spec.y_type != DType::kFloat16) return;
  // A value beyond float16's range becomes the largest value of float16. An infinity would be multiplied by 0 in the
  // slope of an activation, and the product would be NaN.
  uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
  for (uint32_t i = 0; i < n; ++i) {
    if ((halves[i] & 0x7fffu) == 0x7c00u) halves[i] = static_cast<uint16_t>(halves[i] - 1);
  }
}

void Kept::load(float* to, const Row& row, uint64_t first, uint32_t n) const {
  widen(to, row.z + first * element_bytes(spec.y_type), spec.y_type, n);
}

void Kept::copy_received(const Call& call, uint32_t t) {
  if (redispatch) return;
  Tile& kept = tile(t);
  const uint32_t bytes = call.memory.token_row_bytes;
  for (uint32_t r = 0; r < call.tile(t)->shape.rows; ++r) {
    const flashmoe::Row& row = *call.tile_row(t, r);
    if (row.source == call.rank) continue;
    const uint8_t* from = call.dispatched_row(call.rank, row.source, row.token);
    kept.received.insert(kept.received.end(), from, from + bytes);
  }
}

void Kept::finish(const Call& call) {
  rank = call.rank, ranks = call.shape.ranks, tokens = call.shape.tokens, top_k = call.shape.top_k;
  epoch = call.epoch;
  row_bytes_ = call.memory.token_row_bytes;
  for (uint32_t t = 0; t < tokens; ++t) {
    ids.insert(ids.end(), call.routing(t), call.routing(t) + top_k);
    weights.insert(weights.end(), call.weights(t), call.weights(t) + top_k);
  }
  const uint32_t* slices = call.placement.by_owner + call.placement.owner_base[rank];
  for (uint32_t l = 0; spec.slices != 1 && l < call.shape.local_experts; ++l) {
    later_slices_.push_back(slices[l] % spec.slices != 0);
  }
  collect(call);
  for (auto& each : tiles_) {
    if (each != nullptr) each->received = {};
  }
}

// Collects the rows of all tiles, and sorts them by expert, source and token.
void Kept::collect(const Call& call) {
  const uint32_t experts = call.shape.local_experts;
  struct Found {
    uint32_t expert;
    Row row;
    const uint8_t* x;
  };
  std::vector<Found> found;
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    if (tiles_[t] == nullptr) continue;
    const auto shape = call.tile(t)->shape;
    const uint32_t width = call.shape.intermediate * (call.shape.is_shared(shape.expert) ? call.shape.shared : 1);
    const uint64_t each = kept_elements(spec, width) * element_bytes(spec.y_type);
    const uint8_t* x = tiles_[t]->received.data();
    for (uint32_t r = 0; r < shape.rows; ++r) {
      const flashmoe::Row& row = *call.tile_row(t, r);
      const bool own = row.source == rank;
      found.push_back({shape.expert,
                       {{row.source, row.token}, row.weight, tiles_[t]->z.get() + r * each, kOwn, false},
                       own ? nullptr : x});
      if (!own && !redispatch) x += row_bytes_;
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.expert != b.expert ? a.expert < b.expert : a.row < b.row; });
  first_.assign(experts + 1, 0);
  std::vector<const uint8_t*> from;
  for (const Found& f : found) {
    ++first_[f.expert + 1];
    rows_.push_back(f.row);
    from.push_back(f.x);
  }
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  gather_received(call, from);
}

// Collects the received rows: the rows of other ranks' tokens, each once however many experts have the token, sorted by
// source and token. (If they are dispatched again, they are only numbered.)
void Kept::gather_received(const Call& call, const std::vector<const uint8_t*>& from) {
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].source == call.rank) continue;
    order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) { return rows_[a] < rows_[b]; });
  uint64_t last = ~uint64_t{0};
  for (const uint64_t i : order) {
    if (rows_[i].key() != last) {
      if (!redispatch) received_.insert(received_.end(), from[i], from[i] + row_bytes_);
      ++received_count_;
      rows_[i].first_of_token = true;
    }
    last = rows_[i].key();
    rows_[i].received = received_count_ - 1;
  }
  received_.shrink_to_fit();
}

BytesOfEach kept_bytes(const LayerSpec& l, bool redispatch) {
  const auto row = [&](uint32_t width) {
    return kept_elements(l, width) * element_bytes(l.y_type) + sizeof(Kept::Row);
  };
  const uint64_t choices = l.top_k * l.slices + shared_experts(l.shared);
  const uint64_t logits = l.routing == Routing::kGiven ? 0 : l.experts * sizeof(float);
  return {.row = row(l.intermediate),
          .shared_row = l.shared == 0 ? 0 : row(l.intermediate * l.shared),
          .received = redispatch ? 0 : l.token_row_bytes(),
          .token = choices * (sizeof(int32_t) + sizeof(float)) + logits};
}

uint64_t Kept::bytes() const {
  const BytesOfEach each = kept_bytes(spec, redispatch);
  const uint64_t of_shared = spec.shared == 0 ? 0 : first_.back() - first_[first_.size() - 2];
  return (rows_.size() - of_shared) * each.row + of_shared * each.shared_row + received_count_ * each.received +
         tokens * each.token;
}

uint64_t Kept::find(uint32_t expert, CanonicalRow row) const {
  const auto begin = rows_.begin() + static_cast<int64_t>(first_[expert]);
  const auto end = rows_.begin() + static_cast<int64_t>(first_[expert + 1]);
  const auto at = std::lower_bound(begin, end, row);
  if (at == end || at->key() != row.key()) {
    throw host::Error(host::Error::Kind::kOther,
                      host::concat("backward pass: expected the rows of call ", epoch, ", got token ", row.token,
                                   " of rank ", row.source, ", which expert ", expert, " of this rank's did not have"));
  }
  return static_cast<uint64_t>(at - rows_.begin());
}

}  // namespace flashmoe::cpu

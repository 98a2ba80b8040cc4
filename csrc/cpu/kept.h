// What a call leaves for its gradients: routing, pre-activations, and the rows of other ranks unless they are
// dispatched again (redispatch). It belongs to whoever asked for it, not to the context, so any number of calls may lie
// between the two passes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "flashmoe/protocol/gradients.h"
#include "host/placement.h"

namespace flashmoe::cpu {

// Bytes of memory for each row that one of this rank's routed experts computes (row); for each row that the shared
// expert computes (shared_row); for each token of another rank, however many experts have it (received); and for each
// own token (token).
struct BytesOfEach {
  uint64_t row, shared_row, received, token;
};
// What a call of a layer keeps. For each row: its pre-activations and a Kept::Row. For each received token: x. For each
// own token: its choices, their weights, and its logits.
BytesOfEach kept_bytes(const LayerSpec& layer, bool redispatch);

class Kept {
 public:
  static constexpr uint32_t kOwn = 0xffffffffu;

  struct Row : CanonicalRow {
    float weight;         // combine weight
    const uint8_t* z;     // [kept_elements()] of y's type
    uint32_t received;    // number of its token among other ranks' tokens; kOwn: an own token
    bool first_of_token;  // of other ranks' tokens: no expert with a lower number has the token
  };

  // ---- while the call runs: its processors call these, side by side ----------------------------------------------
  // Memory for the pre-activations of the tile's rows, `elements` elements for each row.
  uint8_t* pre_activations(const Call& call, uint32_t tile, uint64_t elements);
  // Stores n pre-activations of a row, from element `first` on.
  void store(uint8_t* row, uint64_t first, const float* values, uint32_t n) const;
  // Copies the tile's rows of other ranks. Called once for each tile. Does nothing if these rows are dispatched again.
  void copy_received(const Call& call, uint32_t tile);

  // ---- between the passes ----------------------------------------------------------------------------------------
  // Called when the call is over: sorts its rows by expert, and an expert's rows into canonical order.
  void finish(const Call& call);
  uint64_t bytes() const;

  // ---- in the backward pass ---------------------------------------------------------------------------------------
  const std::vector<Row>& rows() const { return rows_; }
  uint64_t first_row(uint32_t expert) const { return first_[expert]; }
  uint32_t local_experts() const { return static_cast<uint32_t>(first_.size()) - 1; }
  // Whether the local expert is a whole expert or the first slice of one. Later slices have no bias of the second
  // product.
  bool has_down_bias(uint32_t expert) const { return later_slices_.empty() || later_slices_[expert] == 0; }
  // Loads n pre-activations of a row, from element `first` on, in fp32.
  void load(float* to, const Row& row, uint64_t first, uint32_t n) const;
  // The number of the row that the local expert has for this token. Throws if it has none.
  uint64_t find(uint32_t expert, CanonicalRow row) const;
  // x of the n-th token of other ranks, unless it is dispatched again.
  const uint8_t* received_row(uint32_t n) const { return received_.data() + uint64_t{n} * row_bytes_; }
  uint32_t received_rows() const { return received_count_; }
  uint32_t row_bytes() const { return row_bytes_; }

  LayerSpec spec;
  host::Holders placement;
  bool redispatch = false;                              // the other ranks' rows are dispatched again in the backward
                                                        // pass
  bool shared_up = false;                               // the shared expert's gate and up are two matrices
  uint32_t rank = 0, ranks = 0, tokens = 0, top_k = 0;  // top_k: choices of a token, including the shared expert
  Epoch epoch = 0;
  std::vector<int32_t> ids;    // [T, top_k], negative where there is no expert (Choice::recorded)
  std::vector<float> weights;  // [T, top_k]
  std::vector<float> logits;   // [T, E], if there is a router

 private:
  struct Tile {
    std::unique_ptr<uint8_t[]> z;
    std::vector<uint8_t> received;  // the tile's rows from other ranks, one behind the other
  };
  Tile& tile(uint32_t t);
  void collect(const Call& call);
  void gather_received(const Call& call, const std::vector<const uint8_t*>& from);

  std::mutex mutex_;  // guards tiles_
  std::vector<std::unique_ptr<Tile>> tiles_;
  std::vector<Row> rows_;  // by expert, in canonical order
  std::vector<uint64_t> first_;
  std::vector<uint8_t> later_slices_;  // [El] 1: a slice behind an expert's first; empty if experts are whole
  std::vector<uint8_t> received_;
  uint32_t row_bytes_ = 0, received_count_ = 0;
};

}  // namespace flashmoe::cpu

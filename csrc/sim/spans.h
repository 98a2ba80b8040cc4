// What the clusters of a simulated rank do, and when.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "flashmoe/spec/enums.h"
#include "sim/world.h"

namespace flashmoe::sim {

// Spans are kept to draw pictures. If warps of one cluster are in the same phase at overlapping times, this is one
// span.
class Spans {
 public:
  struct Span {
    uint32_t cluster;
    Phase phase;
    Time begin, end;
  };
  void keep(uint32_t clusters) { last_.resize(clusters); }
  // Does nothing unless keep() was called. A cluster's spans of one phase must be added in the order of their ends.
  void add(uint32_t cluster, Phase phase, Time begin, Time end) {
    if (last_.empty()) return;
    uint32_t& last = last_[cluster][static_cast<size_t>(phase)];
    if (last != 0 && begin <= spans_[last - 1].end) {
      Span& span = spans_[last - 1];
      span = {cluster, phase, std::min(span.begin, begin), std::max(span.end, end)};
      return;
    }
    spans_.push_back({cluster, phase, begin, end});
    last = static_cast<uint32_t>(spans_.size());
  }
  const std::vector<Span>& all() const { return spans_; }

 private:
  static constexpr size_t kPhases = std::size(Names<Phase>::kAll);
  std::vector<Span> spans_;
  std::vector<std::array<uint32_t, kPhases>> last_;  // [cluster][phase] number of the last span, from 1; 0: none
};

}  // namespace flashmoe::sim

#include "host/machines.h"

#include <algorithm>

#include "host/error.h"
#include "host/hash.h"
#include "host/text.h"

namespace flashmoe::host {

MachineTables::MachineTables(const std::vector<uint32_t>& of, uint32_t ranks, uint32_t rank) {
  if (!of.empty() && of.size() != ranks) {
    throw Error(Error::Kind::kInvalidArgument,
                concat("machines: expected one for each of ", ranks, " ranks, got ", of.size()));
  }
  std::vector<std::vector<uint32_t>> machines;
  std::vector<uint32_t> names;
  for (uint32_t p = 0; p < ranks; ++p) {
    const uint32_t name = of.empty() ? 0 : of[p];
    const auto known = std::find(names.begin(), names.end(), name);
    const auto machine = static_cast<uint32_t>(known - names.begin());
    if (known == names.end()) {
      names.push_back(name);
      machines.emplace_back();
    }
    of_.push_back(machine);
    place_.push_back(static_cast<uint32_t>(machines[machine].size()));
    machines[machine].push_back(p);
  }
  count_ = static_cast<uint32_t>(machines.size());
  first_.push_back(0);
  for (const auto& each : machines) {
    ranks_.insert(ranks_.end(), each.begin(), each.end());
    first_.push_back(static_cast<uint32_t>(ranks_.size()));
    const auto size = static_cast<uint32_t>(each.size());
    most_ = std::max(most_, size);
    fewest_ = fewest_ == 0 ? size : std::min(fewest_, size);
  }
  const auto own = static_cast<uint32_t>(machines[of_[rank]].size());
  for (uint32_t i = 1; i < ranks; ++i) {
    const uint32_t p = (rank + i) % ranks;
    if (of_[p] != of_[rank] && place_[p] % own == place_[rank]) sources_.push_back(p);
  }
  passed_.resize(2 * sources_.size());
}

void MachineTables::set(Limits& limits) const {
  limits.machine_ranks = count_ == 1 ? 0 : most_;
  limits.relayed = count_ == 1 ? 0 : relay_slots(count_, most_, fewest_);
  limits.spread = count_ == 1 ? 0 : static_cast<uint32_t>(hash_bytes(of_.data(), of_.size() * sizeof(of_[0])));
}

void MachineTables::clear() {
  std::fill(passed_.begin(), passed_.end(), 0);
  counts_[0] = counts_[1] = {};
}

Machines MachineTables::machines(const Limits& limits) {
  return {.count = count_,
          .of = of_.data(),
          .place = place_.data(),
          .ranks = ranks_.data(),
          .first = first_.data(),
          .most_ranks = most_,
          .sources = sources_.data(),
          .source_count = static_cast<uint32_t>(sources_.size()),
          .passed = passed_.data(),
          .counts = counts_,
          .batch_bytes = batch_bytes,
          .layout = make_relay_layout(limits),
          .behind = training_heap_bytes(limits)};
}

}  // namespace flashmoe::host

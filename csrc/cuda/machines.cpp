#include "cuda/machines.h"

#include <cstring>

namespace flashmoe::cuda {
namespace {

// The order in memory: Machines, the relay's counts for two calls (one for each parity), `passed` (zeroed), and the
// tables.
constexpr uint64_t kCountsAt = sizeof(Machines), kPassedAt = kCountsAt + 2 * sizeof(Machines::Counts);

}  // namespace

DeviceMachines::DeviceMachines(const Device& device, const std::vector<uint32_t>& of, const Limits& limits,
                               uint32_t rank)
    : tables_(of, limits.ranks, rank), here_(tables_.machines(limits)) {
  here_.sums = limits.staging != 0;  // all calls of a context have one return mode
  const uint32_t ranks = limits.ranks, sources = here_.source_count;
  const uint64_t tables_at = kPassedAt + 2 * sources * sizeof(uint64_t), words = 3 * ranks + here_.count + 1 + sources;
  std::vector<uint8_t> image(tables_at + words * sizeof(uint32_t));
  memory_ = DeviceMemory(device, image.size(), "machines");
  Machines there = here_;
  there.counts = reinterpret_cast<Machines::Counts*>(memory_.as<uint8_t>() + kCountsAt);
  there.passed = reinterpret_cast<uint64_t*>(memory_.as<uint8_t>() + kPassedAt);
  uint64_t end = tables_at;
  const auto place = [&](const uint32_t*& table, uint32_t n) {
    std::memcpy(image.data() + end, table, n * sizeof(uint32_t));
    table = reinterpret_cast<const uint32_t*>(memory_.as<uint8_t>() + end);
    end += n * sizeof(uint32_t);
  };
  place(there.of, ranks);
  place(there.place, ranks);
  place(there.ranks, ranks);
  place(there.first, there.count + 1);
  place(there.sources, sources);
  std::memcpy(image.data(), &there, sizeof(there));
  memory_.upload(image.data(), image.size());
}

Machines::Counts DeviceMachines::counts(uint32_t parity) const {
  Machines::Counts counts;
  memory_.download(&counts, sizeof(counts), kCountsAt + parity * sizeof(counts));
  return counts;
}

}  // namespace flashmoe::cuda

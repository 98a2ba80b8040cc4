#include "host/group.h"

#include <atomic>
#include <numeric>
#include <utility>

#include "host/joining.h"
#include "host/leftovers.h"

namespace flashmoe::host {
namespace {

class ProcessGroup final : public Group {
 public:
  explicit ProcessGroup(std::vector<Mapping> segments) : segments_(std::move(segments)) {
    for (const Mapping& m : segments_) heaps_.push_back(m.base() == nullptr ? nullptr : m.base() + kPageBytes);
  }

  std::string obituary(uint32_t p) const override { return obituary_of(page_of(segments_[p])->process); }

 private:
  const std::vector<Mapping> segments_;
};

class LocalGroup final : public Group {
 public:
  explicit LocalGroup(std::vector<std::shared_ptr<Mapping>> maps) : maps_(std::move(maps)) {
    for (const auto& m : maps_) heaps_.push_back(m->base());
  }

 private:
  std::vector<std::shared_ptr<Mapping>> maps_;
};

}  // namespace

void Group::tell(uint32_t, const void*, uint64_t, uint64_t* at, uint64_t word) {
  std::atomic_ref(*at).store(word, std::memory_order_release);
}

std::unique_ptr<Group> join_process_group(const std::string& name, uint32_t rank, const Limits& limits,
                                          uint64_t heap_bytes, uint64_t timeout_ns, std::vector<uint32_t> members) {
  remove_leftovers();
  if (members.empty()) {
    members.resize(limits.ranks);
    std::iota(members.begin(), members.end(), 0u);
  }
  return std::make_unique<ProcessGroup>(Joining(name, rank, std::move(members), limits, heap_bytes, timeout_ns).join());
}

std::unique_ptr<Group> make_single_rank_group(uint64_t heap_bytes) {
  return std::move(make_thread_groups(1, heap_bytes).front());
}

std::vector<std::unique_ptr<Group>> make_thread_groups(uint32_t ranks, uint64_t heap_bytes) {
  std::vector<std::shared_ptr<Mapping>> maps;
  for (uint32_t p = 0; p < ranks; ++p) maps.push_back(std::make_shared<Mapping>(-1, heap_bytes));
  std::vector<std::unique_ptr<Group>> groups;
  for (uint32_t p = 0; p < ranks; ++p) groups.push_back(std::make_unique<LocalGroup>(maps));
  return groups;
}

}  // namespace flashmoe::host

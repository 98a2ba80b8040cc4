#include "network/group.h"

#include <algorithm>
#include <utility>

namespace flashmoe::network {
namespace {

class NetworkGroup final : public host::Group {
 public:
  NetworkGroup(std::unique_ptr<host::Group> here, uint32_t rank, const Limits& limits, std::shared_ptr<Courier> courier,
               const Spread& spread)
      : here_(std::move(here)), spread_(spread), mirrors_(limits.ranks), courier_(std::move(courier)) {
    const uint64_t bytes = member_heap_bytes(limits);
    Courier::Place place{.heap = nullptr,
                         .mirrors = std::vector<uint8_t*>(limits.ranks),
                         .heap_bytes = bytes,
                         .layout = make_heap_layout(limits),
                         .gradients = make_gradient_layout(limits)};
    for (uint32_t p = 0; p < limits.ranks; ++p) {
      if (is_here(p)) {
        heaps_.push_back(here_->heaps()[p]);
      } else {
        mirrors_[p] = host::Mapping(-1, bytes);  // takes memory only where actors write data to send
        heaps_.push_back(place.mirrors[p] = mirrors_[p].base());
      }
    }
    place.heap = heaps_[rank];
    courier_->start(place, spread.addresses, spread.hosts);
  }
  ~NetworkGroup() override { courier_->stop(); }  // while the memory to which the courier writes still exists

  std::string obituary(uint32_t p) const override { return is_here(p) ? here_->obituary(p) : courier_->obituary(p); }
  host::Bell* bell() override { return &courier_->bell(); }
  void begin_call(const SpreadCall& call) override { courier_->begin_call(call); }
  void end_call() override { courier_->end_call(); }
  void tell(uint32_t q, const void* from, uint64_t bytes, uint64_t* at, uint64_t word) override {
    if (is_here(q)) {
      Group::tell(q, from, bytes, at, word);
    } else {
      courier_->tell(q, from, bytes, at, word);
    }
  }

 private:
  bool is_here(uint32_t p) const { return std::binary_search(spread_.here.begin(), spread_.here.end(), p); }

  const std::unique_ptr<host::Group> here_;
  const Spread spread_;
  std::vector<host::Mapping> mirrors_;
  const std::shared_ptr<Courier> courier_;
};

}  // namespace

std::unique_ptr<host::Group> join_network_group(std::unique_ptr<host::Group> here, uint32_t rank, const Limits& limits,
                                                std::shared_ptr<Courier> courier, const Spread& spread) {
  return std::make_unique<NetworkGroup>(std::move(here), rank, limits, std::move(courier), spread);
}

}  // namespace flashmoe::network

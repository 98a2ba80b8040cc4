#include "host/placement.h"

#include <algorithm>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

void check_holders(const Holders& holders, uint32_t expert, uint32_t ranks) {
  const auto of = holders.of(expert);
  for (auto q = of.begin(); q != of.end(); ++q) {
    if (*q >= ranks) {
      throw Error(Error::Kind::kInvalidArgument,
                  concat("placement: expected ranks in [0, ", ranks, "), got ", *q, " for expert ", expert));
    }
    if (std::find(of.begin(), q, *q) != q) {
      throw Error(Error::Kind::kInvalidArgument, concat("placement: expected an expert on a rank once, got expert ",
                                                        expert, " on rank ", *q, " twice"));
    }
  }
}

}  // namespace

std::span<const uint32_t> Holders::of(uint32_t expert) const {
  const size_t end = expert + 1 < begin_.size() ? begin_[expert + 1] : ranks_.size();
  return std::span(ranks_).subspan(begin_[expert], end - begin_[expert]);
}

uint32_t Holders::for_rank(uint32_t expert, uint32_t rank) const {
  const auto holders = of(expert);
  if (std::find(holders.begin(), holders.end(), rank) != holders.end()) return rank;
  const auto before = std::count_if(holders.begin(), holders.end(), [&](uint32_t q) { return q < rank; });
  return holders[(rank - static_cast<size_t>(before)) % holders.size()];
}

PlacementTables placement_tables(const Holders& holders, const Limits& limits, uint32_t rank, bool shared) {
  PlacementTables t;
  t.owner_base.assign(limits.ranks + 1, 0);
  for (uint32_t e = 0; e < holders.experts(); ++e) {
    check_holders(holders, e, limits.ranks);
    t.owner.push_back(holders.for_rank(e, rank));
    for (const uint32_t q : holders.of(e)) ++t.owner_base[q + 1];
  }
  for (uint32_t q = 0; q < limits.ranks; ++q) {
    if (t.owner_base[q + 1] > limits.max_local_experts) {
      throw Error(Error::Kind::kHeap,
                  concat("placement: expected at most ", limits.max_local_experts,
                         " experts on a rank, the context's limit, got ", t.owner_base[q + 1], " on rank ", q));
    }
    t.owner_base[q + 1] += t.owner_base[q] + (q == rank && shared ? 1 : 0);
  }
  t.by_owner.resize(t.owner_base.back());
  std::vector<uint32_t> next(t.owner_base.begin(), t.owner_base.end() - 1);
  for (uint32_t e = 0; e < holders.experts(); ++e) {
    for (const uint32_t q : holders.of(e)) t.by_owner[next[q]++] = t.owner[e] == q ? e : kElsewhere;
  }
  if (shared) {
    t.by_owner[next[rank]] = static_cast<uint32_t>(t.owner.size());
    t.owner.push_back(rank);
  }
  return t;
}

}  // namespace flashmoe::host

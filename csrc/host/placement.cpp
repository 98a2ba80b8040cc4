#include "host/placement.h"

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {

PlacementTables placement_tables(const std::vector<uint32_t>& owners, const Limits& limits, uint32_t rank,
                                 bool shared) {
  PlacementTables t;
  t.owner = owners;
  if (shared) t.owner.push_back(rank);
  t.owner_base.assign(limits.ranks + 1, 0);
  for (uint32_t e = 0; e < owners.size(); ++e) {
    if (owners[e] >= limits.ranks) {
      throw Error(Error::Kind::kInvalidArgument,
                  concat("placement: expected ranks in [0, ", limits.ranks, "), got ", owners[e], " for expert ", e));
    }
    ++t.owner_base[owners[e] + 1];
  }
  for (uint32_t q = 0; q < limits.ranks; ++q) {
    if (t.owner_base[q + 1] > limits.max_local_experts) {
      throw Error(Error::Kind::kHeap,
                  concat("placement: expected at most ", limits.max_local_experts,
                         " experts on a rank, the context's limit, got ", t.owner_base[q + 1], " on rank ", q));
    }
    t.owner_base[q + 1] += t.owner_base[q] + (q == rank && shared ? 1 : 0);
  }
  t.by_owner.resize(t.owner.size());
  std::vector<uint32_t> next(t.owner_base.begin(), t.owner_base.end() - 1);
  for (uint32_t e = 0; e < t.owner.size(); ++e) t.by_owner[next[t.owner[e]]++] = e;
  return t;
}

}  // namespace flashmoe::host

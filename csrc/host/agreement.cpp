#include "host/agreement.h"

#include <algorithm>

#include "host/hash.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

uint64_t hash_of(const CallConfig& config, const AgreedLayer& layer) {
  uint64_t h = hash_bytes(&config.placement, sizeof(config.placement));
  h = hash_bytes(&config.groups, sizeof(config.groups), h);
  for_each_agreed_field(layer, [&](const char*, const auto& field) { h = hash_bytes(&field, sizeof(field), h); });
  return h;
}

uint64_t hash_of(const Holders& placement, uint32_t slices) {
  uint64_t h = hash_bytes(&slices, sizeof(slices));
  for (uint32_t e = 0; e < placement.experts(); ++e) {
    const auto ranks = placement.of(e);
    const size_t copies = ranks.size();
    h = hash_bytes(&copies, sizeof(copies), h);
    h = hash_bytes(ranks.data(), ranks.size_bytes(), h);
  }
  return h;
}

}  // namespace

std::string difference(const Limits& mine, uint32_t rank, const Limits& theirs, uint32_t peer) {
  const struct {
    const char* name;
    uint32_t mine, theirs;
  } fields[] = {{"ranks", mine.ranks, theirs.ranks},
                {"max_tokens", mine.max_tokens, theirs.max_tokens},
                {"hidden", mine.hidden, theirs.hidden},
                {"experts", mine.experts, theirs.experts},
                {"most experts of a rank (placement)", mine.max_local_experts, theirs.max_local_experts},
                {"top_k", mine.top_k, theirs.top_k},
                {"slices of the shared expert (shared_intermediate)", mine.shared, theirs.shared},
                {"bytes per element (dtype)", mine.x_bytes, theirs.x_bytes},
                {"bytes per element of returns", mine.return_bytes, theirs.return_bytes},
                {"return slots (return_mode)", mine.return_slots, theirs.return_slots},
                {"capacity (capacity_factor)", mine.capacity, theirs.capacity},
                {"redispatch", mine.redispatch, theirs.redispatch},
                {"most ranks of a machine", mine.machine_ranks, theirs.machine_ranks},
                {"sources of a relay", mine.relayed, theirs.relayed},
                {"which ranks share a machine (a hash of it)", mine.spread, theirs.spread},
                {"rdma (transport)", mine.rdma, theirs.rdma}};
  for (const auto& f : fields) {
    if (f.mine != f.theirs) {
      return concat(f.name, ": rank ", rank, " has ", f.mine, ", rank ", peer, " has ", f.theirs);
    }
  }
  return {};
}

CallConfig make_config(const Call& call, const LayerSpec& layer, const Holders& placement, uint32_t columns_per_task,
                       Epoch forward, bool redispatch) {
  CallConfig config{};
  config.set_layer(layer);
  config.placement = static_cast<uint32_t>(hash_of(placement, layer.slices));
  uint32_t ends[kMaxGroups] = {};  // in elements
  for (uint32_t g = 0; g < call.policy.groups; ++g) {
    ends[g] = std::min(call.policy.group_first[g + 1] * columns_per_task, layer.hidden);
  }
  uint64_t groups = hash_bytes(ends, sizeof(ends));
  if (forward != 0) groups = hash_bytes(&forward, sizeof(forward), groups);
  constexpr uint32_t kFlags = CallConfig::kBackward | CallConfig::kRedispatch;
  const uint32_t flags = (forward != 0 ? CallConfig::kBackward : 0) | (redispatch ? CallConfig::kRedispatch : 0);
  config.groups = (static_cast<uint32_t>(groups) & ~kFlags) | flags;
  config.hash = hash_of(config, layer);
  return config;
}

}  // namespace flashmoe::host

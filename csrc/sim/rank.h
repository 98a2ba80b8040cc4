// A simulated rank: the actors of a call on one GPU, with the roles that the fused kernel gives its warps (roles/kernel.cuh).
#pragma once

#include <deque>

#include "flashmoe/actors/former.h"
#include "flashmoe/actors/os.h"
#include "flashmoe/actors/relay.h"
#include "flashmoe/actors/sender.h"
#include "host/machines.h"
#include "sim/cluster.h"
#include "sim/machine.h"

namespace flashmoe::sim {

// What a rank computes: the experts that its tokens choose, and who owns them to it.
struct RankProblem {
  std::vector<int32_t> ids;                           // [T, K]
  std::vector<uint32_t> owner, by_owner, owner_base;  // CallPlacement's
  uint32_t local_experts = 0;
};

// Platform: MappedPlatform, or SpreadLanes where ranks are on several machines.
template <template <uint32_t> class Platform>
class Rank {
 public:
  // call: of every rank, without what differs between them.
  Rank(Group& group, const Call& call, const Limits& limits, RankProblem problem, uint32_t rank);
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Starts all actors.
  void start();
  const RankState& state() const { return state_; }
  const Call& call() const { return call_; }

 private:
  using Lanes = Platform<Warp::kMostLanes>;
  using Thread = Platform<1>;

  void run_os_actor();
  void run_former_actor(uint32_t former);
  void run_block(uint32_t block);
  uint32_t dispatch(uint32_t token_block);
  void start_senders(uint32_t block);
  void send_rows(uint32_t block, uint32_t warp);
  void free_block(uint32_t block);
  void run_relay(uint32_t block);
  uint32_t blocks() const { return group_.machine().blocks; }
  uint32_t formers() const { return kArch.formers_of(call_.shape.ranks, call_.shape.local_experts, blocks()); }
  bool sends(uint32_t block) const;

  Group& group_;
  const RankProblem problem_;
  const std::vector<uint8_t*> heaps_;
  host::MachineTables tables_;
  SpreadCall call_, sending_call_;  // what its senders have is another view of heaps (Group::behind_others)
  RankState state_;
  std::deque<Cluster<Thread>> clusters_;
  std::vector<uint32_t> sending_;  // [block] warps that still send
};

}  // namespace flashmoe::sim

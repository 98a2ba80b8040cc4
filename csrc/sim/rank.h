// A simulated rank: the actors of a call on one GPU. They have the roles that the fused kernel gives its warps
// (roles/kernel.cuh).
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

// What a call of one rank is about: which experts the rank's tokens choose, and to which rank it sends its tokens for
// each expert.
struct RankProblem {
  std::vector<int32_t> ids;                           // [T, K]
  std::vector<uint32_t> owner, by_owner, owner_base;  // tables of CallPlacement
  uint32_t local_experts = 0;
};

// Platform: MappedPlatform, or SpreadLanes if ranks are on several machines.
template <template <uint32_t> class Platform>
class Rank {
 public:
  // call: what is the same for all ranks. The constructor adds what differs.
  Rank(Group& group, const Call& call, const Limits& limits, RankProblem problem, uint32_t rank);
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Starts all actors.
  void start();
  // Called before start(), if state().spans is wanted.
  void keep_spans() { state_.spans.keep(call_.policy.clusters); }
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
  uint32_t formers() const {
    return kArch.formers_of(call_.shape.ranks, call_.shape.local_experts, blocks(), flashmoe::SpansMachines<Lanes>);
  }
  bool sends(uint32_t block) const;

  Group& group_;
  const RankProblem problem_;
  const std::vector<uint8_t*> heaps_;
  host::MachineTables tables_;
  SpreadCall call_, sending_call_;  // the senders' call has another Machines::behind (Group::behind_others)
  RankState state_;
  std::deque<Cluster<Thread>> clusters_;
  std::vector<uint32_t> sending_;  // [block] how many of its warps still send
};

}  // namespace flashmoe::sim

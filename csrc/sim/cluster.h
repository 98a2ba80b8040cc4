// Two thread blocks of a GPU that compute each task together: their clerks, loaders and consumers.
//
// On a GPU, clerks, loaders and consumers are CUDA code (roles/clerk.cuh, loaders.cuh, consumers.cuh), written with
// CUDA's barriers and copy engines. This file replaces what they do between two actions of the protocol: when a clerk
// takes its next task, and how long the task's products take. The actions themselves are the protocol's: tickets,
// waits, retirement, returns and late rows.
//
// P: the Platform of a warp of one lane. One lane is enough, because the lanes of these warps would only share work.
#pragma once

#include "flashmoe/actors/processor.h"
#include "sim/machine.h"
#include "sim/sums.h"

namespace flashmoe::sim {

template <class P>
class Cluster {
 public:
  Cluster(const Machine& machine, RankState& rank, uint32_t id);

  // Called by each block when it has dispatched and sent. The cluster's actors begin when both blocks have called
  // this.
  void block_is_free();
  // begin_relay(): the block's last warp is a relay. end_relay(): this warp's work as a relay is done, maybe while
  // tasks still run. From then on it sums rows, as other warps do when their roles have ended.
  void begin_relay(uint32_t block) { block_[block].relays = true; }
  void end_relay(uint32_t block);

 private:
  // The Platform of warps that join rows. It has enough lanes for as many rows as a warp of a GPU joins at a time.
  using Joining = MappedPlatform<8>;
  static constexpr uint32_t kSlots = 5;   // roles/ring.cuh
  static constexpr uint32_t kAhead = 10;  // roles/clerk.cuh: stages left to begin when the next task is taken
  static constexpr uint32_t kStages = 4;  // machine/pipeline.cuh: by how many stages loaders are ahead of consumers

  struct Slot {
    Task task;
    uint32_t stages;
    Time stage, epilogue;
    Time handed, begun, written;
  };
  // A cursor for each warp of a block.
  template <class S>
  class CursorOfWarp {
   public:
    S load() const { return states_[World::warp().worker]; }
    void save(const S& s) { states_[World::warp().worker] = s; }

   private:
    S states_[kWarps] = {};
  };
  // What a block's warps share.
  struct Block {
    ReturnCursors<CursorOfWarp> returns{};
    LateRows late{};
    uint64_t loaded = 0;  // tasks whose slots the block's second loader does not read any more
    bool relays = false;
  };

  void lead();
  void compute();
  void retire_tasks();
  void load(uint32_t block);
  void help(uint32_t block, uint32_t worker);
  void start_helper(uint32_t block, uint32_t worker);
  void load_and_join(uint32_t block);
  void find_late_rows(uint32_t block, uint64_t n);
  bool joins() const { return joins_late_rows(c_); }
  Slot look_up(const Task& task) const;
  Time send_results(Slot& slot);
  static void await(const uint64_t& word, uint64_t at_least);
  static void count(uint64_t& word);
  void ended() { rank_.end = std::max(rank_.end, World::of_lane().now()); }
  Slot& slot(uint64_t n) { return slots_[n % kSlots]; }

  const Machine& machine_;
  RankState& rank_;
  const Call& c_;
  const uint32_t id_;
  Time relays_piece_;  // least time of a piece that a warp sums after its work as a relay; longer while tasks run
  uint32_t free_blocks_ = 0;
  Block block_[kArch.cluster_blocks];
  Slot slots_[kSlots] = {};
  uint64_t handed_ = 0, started_ = 0, done_ = 0, retired_ = 0;  // counts of tasks
};

}  // namespace flashmoe::sim

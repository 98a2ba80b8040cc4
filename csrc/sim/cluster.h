// Two thread blocks of a GPU that compute each task together: their clerks, loaders and consumers.
//
// Clerks, loaders and consumers are CUDA (roles/clerk.cuh, loaders.cuh, consumers.cuh), written with its barriers and copy
// engines, and what they do between two actions of the protocol is this file's: when a clerk takes its next task, how long
// its products take. The actions are the protocol's: tickets, waits, retirement, returns and late rows.
//
// P: the platform of a warp that is one lane, since what lanes share out here takes no decisions.
#pragma once

#include "flashmoe/actors/processor.h"
#include "sim/machine.h"
#include "sim/sums.h"

namespace flashmoe::sim {

template <class P>
class Cluster {
 public:
  Cluster(const Machine& machine, RankState& rank, uint32_t id);

  // A block has dispatched and sent; with the second one all actors begin.
  void block_is_free();
  // A block's last warp is a relay, and when it is through with that, maybe while tasks run, helps like others.
  void begin_relay(uint32_t block) { block_[block].relays = true; }
  void end_relay(uint32_t block);

 private:
  // Of warps that join rows, as many at a time as on a GPU.
  using Joining = MappedPlatform<8>;
  static constexpr uint32_t kSlots = 5;   // roles/ring.cuh
  static constexpr uint32_t kAhead = 10;  // roles/clerk.cuh: stages that are left to begin when a task is taken
  static constexpr uint32_t kStages = 4;  // machine/pipeline.cuh: stages that loaders are ahead of consumers

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
    uint64_t loaded = 0;  // tasks whose loads are begun
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
  Time relays_piece_;  // that a relay sums takes so much at least: as long as tasks run beside it, more
  uint32_t free_blocks_ = 0;
  Block block_[kArch.cluster_blocks];
  Slot slots_[kSlots] = {};
  uint64_t handed_ = 0, started_ = 0, done_ = 0, retired_ = 0;  // tasks
};

}  // namespace flashmoe::sim

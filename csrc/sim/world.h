// The virtual clock, and which actors run when. Actors are warps of fibres. They sleep until a time, or until a word
// changes that they have looked at. One thread runs all of them in the order of (time, number of the event), so the
// same inputs give the same run.
//
// Running itself takes no time. Whoever does something that costs time says so (spend(), the Platform's operations). A
// lane runs ahead of the clock by what it has spent since its warp last met, less than a microsecond. What it reads
// meanwhile is as old as the clock says. Words for which others wait are written by events of their own, at the time at
// which the words become visible.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "sim/event_queue.h"
#include "sim/fibre.h"

namespace flashmoe::sim {

using Time = uint64_t;  // picoseconds
inline constexpr Time kNanosecond = 1000, kMicrosecond = 1000 * kNanosecond;

class Warp;

struct Lane {
  uint64_t value[2] = {};  // what the lane says at a meeting, and at the one before or after
  Fibre fibre;
  uint8_t* stack = nullptr;
  Warp* warp = nullptr;
  uint32_t index = 0, meeting = 0;
  Time at = 0;  // the clock, plus what the lane has spent
  // When the loads that are under way are there. The lane's next meeting does not end sooner.
  Time pending = 0;
};

// Where in a heap the words lie that peers write; it is the same for all ranks. So a look at such a word can be
// recognised.
struct SignalMap {
  static constexpr uint32_t kCalls = 0, kPackets = 1, kReturns = 2, kFaults = 3, kKinds = 4, kNone = kKinds;
  const uint8_t* base = nullptr;       // the first rank's heap; the others follow, heap_bytes apart
  uint64_t heap_bytes = 0, ranks = 0;  // heap_bytes: a power of two
  // Where in a heap the words of source 0 begin, how far apart two sources' words are, and where the last source's
  // words end.
  uint64_t first_source = 0, source_bytes = 0, end_sources = 0;
  uint64_t end[kKinds] = {};  // where each kind of a source's words ends; the kinds lie in order

  struct Place {
    uint32_t rank, kind;  // kNone: another word
  };
  Place place(const void* word) const;
};

// What a warp waits for: each word that it has looked at; or, of the signals that peers write, any signal of a kind. (A
// former looks at thousands of signals.)
enum class Watch : uint8_t { kWords, kSignals };

// Fibres that run side by side and meet in collectives. Every actor is a warp. It has 32 lanes, or one lane if lanes
// only share work that takes no decisions. The data that each step of a warp touches lies together.
class alignas(64) Warp {
 public:
  static constexpr uint32_t kMostLanes = 32;

  uint32_t rank = 0, worker = 0;      // worker: its number among its block's warps
  Time first_use = 0, used_from = 0;  // what its code costs when it first runs; until when that lasts
  bool used_by_fence = false;         // its code first runs when the warp publishes, not when it first finds something
  // When the rows that it has sent are at their destinations. Its releases wait for that.
  Time written = 0;

 private:
  friend class World;

  static constexpr uint32_t kLooks = 128;
  struct Look {
    const uint64_t* word;
    uint64_t seen;
  };

  // Prefetches what its next step touches; for a warp of one lane, all of it.
  void fetch() const {
    const auto* const lines = reinterpret_cast<const uint8_t*>(this);
    for (uint32_t line = 0; line < 5; ++line) __builtin_prefetch(lines + line * 64);
  }
  void fetch_stack() const {
    const auto* const stack = static_cast<const uint8_t*>(resumed_->fibre.stack);
    for (uint32_t line = 0; line < 5; ++line) __builtin_prefetch(stack + line * 64);
  }

  Watch watch_ = Watch::kWords;
  bool waiting_ = false;
  uint32_t lanes_ = 0, ended_ = 0, arrived_ = 0;
  uint32_t generation_ = 0;  // of its looks: looks before its last wait do not wake it
  uint32_t next_look_ = 0;
  Time latest_ = 0, met_ = 0;
  Lane* resumed_ = nullptr;
  // The words that it has looked at since it last waited, with the values that it saw: the last kLooks of them.
  std::vector<Look> looks_;
  // For each kind of signal: how many had arrived when it first looked at that kind since it last waited; kUnseen: it
  // has not looked.
  static constexpr uint64_t kUnseen = ~uint64_t{0};
  std::array<uint64_t, SignalMap::kKinds> signals_seen_{};
  uint32_t bits_[2] = {};
  std::array<Lane, kMostLanes> lane_;
  std::function<void()> body_;
};

// There is one World at a time (simulate() ensures this).
class World {
 public:
  World();
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void set_signals(const SignalMap& signals);

  // Starts a new warp now. `body` runs on all its lanes.
  Warp& start(uint32_t rank, uint32_t lanes, Watch watch, std::function<void()> body);
  // Runs until nothing is left to do. Throws host::Error if a warp is still waiting then.
  void run();

  Time now() const { return now_; }
  uint64_t events() const { return events_; }

  // Writes the word at that time, and wakes the warps that wait for it.
  void write_at(Time at, uint64_t* word, uint64_t value);
  // The word has been written: wakes the warps that wait for it, at that time.
  void changed(const uint64_t* word, Time at);

  // ---- called by the running lane -------------------------------------------------------------------------------
  static Lane& lane() { return *current_; }
  static Warp& warp() { return *current_->warp; }
  static World& of_lane() { return *world_; }

  // Notes a look at a word, for the warp's next wait.
  void look(const uint64_t* word);
  // All lanes call this: they meet, and go on at the time of the last lane, plus `cost`. `value` is what a lane says;
  // the others can read it.
  void meet(uint64_t value, Time cost) { meet(value, cost, false); }
  uint32_t ballot() const { return warp().bits_[met()]; }
  uint64_t value(uint32_t of) const { return warp().lane_[of].value[met()]; }
  // All lanes call this: they wait until a word changes that a lane has looked at since the warp last waited.
  void wait() { meet(0, 0, true); }
  // For a warp of one lane: goes on at that time.
  void sleep_until(Time at);

 private:
  struct Event {
    Time at;
    uint64_t number;
    Warp* warp;  // the warp that wakes, if its generation is `value`; null: a word is written
    uint64_t* word;
    uint64_t value;
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
  };
  struct Watcher {
    const uint64_t* word;
    Warp* warp;
    uint32_t generation;
    uint32_t next;
  };
  static constexpr uint32_t kNobody = 0xffffffffu;
  static constexpr uint32_t kBuckets = 1u << 18;

  static uint32_t met() { return (current_->meeting + 1) & 1; }
  static uint32_t bucket(const uint64_t* word) {
    return static_cast<uint32_t>((reinterpret_cast<uint64_t>(word) >> 3) * 0x9e3779b97f4a7c15u >> 46);
  }
  static void enter();
  void meet(uint64_t value, Time cost, bool waits);
  void push(Time at, Warp* warp, uint64_t* word, uint64_t value);
  void run_on(Fibre& from);
  void fetch_next() const;
  void suspend(Lane& lane);
  void next_lane(Lane& lane);
  bool has_news(const Warp& warp) const;
  void watch(Warp& warp);
  void add_watcher(uint32_t& head, const uint64_t* word, Warp& warp);
  void notify(uint32_t& head, const uint64_t* word, Time at);
  void finish(Warp& warp);

  static Lane* current_;
  static World* world_;

  Stacks stacks_;
  Fibre main_;
  Time now_ = 0;
  uint64_t numbers_ = 0, events_ = 0, unfinished_ = 0;
  EventQueue<Event> queue_;
  std::deque<Warp> warps_;
  std::vector<Warp*> idle_;
  SignalMap signals_;
  std::vector<uint64_t> arrived_;      // [rank, kind] signals
  std::vector<uint32_t> for_signals_;  // [rank, kind] first watcher
  std::vector<uint32_t> for_words_;    // [bucket] first watcher
  std::vector<Watcher> watchers_;
  uint32_t free_watcher_ = kNobody;
};

}  // namespace flashmoe::sim

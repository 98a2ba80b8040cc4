// The virtual clock, and which actor runs when. Actors are warps, and the lanes of a warp are fibres. An actor sleeps
// until a time, or until a word changes that it has looked at. One thread runs all actors in the order of (time,
// number of the event), so the same inputs give the same run.
//
// Code that runs takes no virtual time by itself. Code that stands for something that costs time says so
// (sleep_until(), meet(), the Platform's operations). A lane may be ahead of the clock by what it has spent since its
// warp last met, which is less than a microsecond. What the lane reads meanwhile is the memory of the clock's time,
// not of the lane's. Words for which others wait are written by events of their own, at the time at which the words
// become visible.
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
  uint64_t value[2] = {};  // what the lane says at its n-th meeting (in n % 2), and what it said at the one before
  Fibre fibre;
  uint8_t* stack = nullptr;
  Warp* warp = nullptr;
  uint32_t index = 0, meeting = 0;
  Time at = 0;  // the lane's own time: the clock, plus what the lane has spent
  // When the answers of all loads that are under way will be there. The lane's next meeting does not end before.
  Time pending = 0;
};

// Where in a heap the signals lie, the words that peers write. These places are the same in the heaps of all ranks.
// With this map, World recognises a look at a signal.
struct SignalMap {
  static constexpr uint32_t kCalls = 0, kPackets = 1, kReturns = 2, kFaults = 3, kKinds = 4, kNone = kKinds;
  const uint8_t* base = nullptr;       // the first rank's heap; the others follow, heap_bytes apart
  uint64_t heap_bytes = 0, ranks = 0;  // heap_bytes: a power of two
  // Where in a heap the signals of source 0 begin, how far apart the signals of two sources are, and where the fields
  // of the last source end.
  uint64_t first_source = 0, source_bytes = 0, end_sources = 0;
  uint64_t end[kKinds] = {};  // where each kind of a source's signals ends; the kinds lie in order

  struct Place {
    uint32_t rank, kind;  // kNone: the word is no signal
  };
  Place place(const void* word) const;
};

// What wakes a warp that waits. kWords: a change of a word that it has looked at. kSignals: the same, but if it has
// looked at a signal, any new signal of this kind wakes it. (A former looks at thousands of signals.)
enum class Watch : uint8_t { kWords, kSignals };

// Fibres that run side by side and meet in collectives. Every actor is a warp. It has up to 32 lanes, or only one if
// its lanes would only share work and decide nothing. The members that each step of a warp touches lie together.
class alignas(64) Warp {
 public:
  static constexpr uint32_t kMostLanes = 32;

  uint32_t rank = 0, worker = 0;      // worker: the warp's number in its block
  Time first_use = 0, used_from = 0;  // extra cost of its code's first run; when that run ends
  bool used_by_fence = false;         // its code first runs at the warp's first release fence, not at its first acquire
  // When the rows that the warp has sent will be at their destinations. The warp's releases wait until then.
  Time written = 0;

 private:
  friend class World;

  static constexpr uint32_t kLooks = 128;
  struct Look {
    const uint64_t* word;
    uint64_t seen;
  };

  // Prefetch what the warp's next step touches: of this object (for a warp of one lane, all of it), and of the stack.
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
  uint32_t generation_ = 0;  // grows at each wait, so that watchers of an earlier wait do not wake the warp
  uint32_t next_look_ = 0;
  Time latest_ = 0, met_ = 0;
  Lane* resumed_ = nullptr;
  // The words that the warp has looked at since it last waited, and the values that it saw: the last kLooks of them.
  std::vector<Look> looks_;
  // For each kind of signal: how many signals of the kind had arrived when the warp first looked at one after its
  // last wait. kUnseen: it has not looked at one since.
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

  // Starts a new warp now. All its lanes run `body`.
  Warp& start(uint32_t rank, uint32_t lanes, Watch watch, std::function<void()> body);
  // Runs all actors until no event is left. Throws host::Error if a warp is still waiting then.
  void run();

  Time now() const { return now_; }
  uint64_t events() const { return events_; }

  // Writes the word at the time `at`, and then wakes the warps that wait for it.
  void write_at(Time at, uint64_t* word, uint64_t value);
  // Called when the word has been written. Wakes, at the time `at`, the warps that wait for it.
  void changed(const uint64_t* word, Time at);

  // ---- called by the running lane -------------------------------------------------------------------------------
  static Lane& lane() { return *current_; }
  static Warp& warp() { return *current_->warp; }
  static World& of_lane() { return *world_; }

  // Notes that the warp has looked at a word. The warp's next wait is also for this word.
  void look(const uint64_t* word);
  // All lanes of a warp call this. They go on together, `cost` later than the last of them has come. `value` is what
  // this lane says; after the meeting, the others can read it.
  void meet(uint64_t value, Time cost) { meet(value, cost, false); }
  uint32_t ballot() const { return warp().bits_[met()]; }
  uint64_t value(uint32_t of) const { return warp().lane_[of].value[met()]; }
  // All lanes of a warp call this. They go on when a word has changed that one of them has looked at since the warp
  // last waited.
  void wait() { meet(0, 0, true); }
  // For a warp of one lane: goes on at the time `at`.
  void sleep_until(Time at);

 private:
  struct Event {
    Time at;
    uint64_t number;
    Warp* warp;  // the warp that goes on, if its generation is `value`; null: `value` is written to `word`
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
  std::vector<uint64_t> arrived_;      // [rank, kind] signals that have arrived
  std::vector<uint32_t> for_signals_;  // [rank, kind] first watcher
  std::vector<uint32_t> for_words_;    // [bucket] first watcher
  std::vector<Watcher> watchers_;
  uint32_t free_watcher_ = kNobody;
};

}  // namespace flashmoe::sim

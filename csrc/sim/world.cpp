#include "sim/world.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::sim {

Lane* World::current_ = nullptr;
World* World::world_ = nullptr;

SignalMap::Place SignalMap::place(const void* word) const {
  const auto at = static_cast<uint64_t>(static_cast<const uint8_t*>(word) - base);
  if (at >= heap_bytes * ranks) return {0, kNone};  // `at` is unsigned, so this is also true of a word before base
  const uint64_t in_heap = at & (heap_bytes - 1);
  if (in_heap < first_source || in_heap >= end_sources) return {0, kNone};
  const uint64_t in_source = (in_heap - first_source) % source_bytes;
  uint32_t kind = 0;
  while (kind < kKinds && in_source >= end[kind]) ++kind;
  return {static_cast<uint32_t>(at >> std::countr_zero(heap_bytes)), kind};
}

World::World() : for_words_(kBuckets, kNobody) {
  world_ = this;
}

World::~World() {
  world_ = nullptr;
  current_ = nullptr;
}

void World::set_signals(const SignalMap& signals) {
  signals_ = signals;
  arrived_.assign(signals.ranks * SignalMap::kKinds, 0);
  for_signals_.assign(signals.ranks * SignalMap::kKinds, kNobody);
}

Warp& World::start(uint32_t rank, uint32_t lanes, Watch watch, std::function<void()> body) {
  Warp* warp;
  if (idle_.empty()) {
    warp = &warps_.emplace_back();
  } else {
    warp = idle_.back();
    idle_.pop_back();
  }
  warp->rank = rank;
  warp->written = warp->first_use = warp->used_from = 0;
  warp->used_by_fence = false;
  warp->lanes_ = lanes;
  warp->watch_ = watch;
  warp->ended_ = warp->arrived_ = 0;
  warp->latest_ = 0;
  warp->waiting_ = false;
  ++warp->generation_;
  warp->looks_.clear();
  warp->next_look_ = 0;
  warp->signals_seen_.fill(Warp::kUnseen);
  warp->body_ = std::move(body);
  for (uint32_t i = 0; i < lanes; ++i) {
    Lane& lane = warp->lane_[i];
    lane = {};
    lane.stack = stacks_.take();
    lane.fibre = Stacks::begin(lane.stack, &World::enter);
    lane.warp = warp;
    lane.index = i;
    lane.at = now_;
  }
  warp->resumed_ = &warp->lane_[0];
  ++unfinished_;
  push(now_, warp, nullptr, warp->generation_);
  return *warp;
}

void World::push(Time at, Warp* warp, uint64_t* word, uint64_t value) {
  queue_.push({at, numbers_++, warp, word, value});
}

void World::run() {
  run_on(main_);
  if (unfinished_ != 0) {
    throw host::Error(host::Error::Kind::kOther,
                      host::concat("simulation: ", unfinished_, " actors wait at ", now_ / kMicrosecond,
                                   " us for events that no actor will cause"));
  }
}

// Takes the next events, until one of them lets a warp go on. If no event is left, the caller of run() goes on.
// `from` is the fibre that calls this; it stops here.
void World::run_on(Fibre& from) {
  while (!queue_.empty()) {
    const Event e = queue_.pop();
    fetch_next();
    now_ = e.at;
    ++events_;
    if (e.warp == nullptr) {
      *e.word = e.value;
      changed(e.word, now_);
    } else if (e.warp->generation_ == e.value) {
      current_ = e.warp->resumed_;
      if (&current_->fibre != &from) switch_fibres(from, current_->fibre);
      return;
    }
  }
  if (&main_ != &from) switch_fibres(from, main_);
}

// Prefetches the memory of warps that go on soon, because the cache cannot hold all warps.
void World::fetch_next() const {
  const Event* next = queue_.next(10);
  if (next != nullptr && next->warp != nullptr) next->warp->fetch();
  next = queue_.next(4);
  if (next != nullptr && next->warp != nullptr) next->warp->fetch_stack();
}

void World::finish(Warp& warp) {
  for (uint32_t i = 0; i < warp.lanes_; ++i) stacks_.give_back(warp.lane_[i].stack);
  ++warp.generation_;
  warp.body_ = nullptr;
  --unfinished_;
  idle_.push_back(&warp);
}

void World::suspend(Lane& lane) {
  lane.warp->resumed_ = &lane;
  run_on(lane.fibre);
}

void World::next_lane(Lane& lane) {
  Warp& warp = *lane.warp;
  current_ = &warp.lane_[(lane.index + 1) % warp.lanes_];
  switch_fibres(lane.fibre, current_->fibre);
}

// The function in which a lane begins and ends. All lanes of a warp go through the same meetings, so they end one
// after the other.
void World::enter() {
  Lane& lane = *current_;
  Warp& warp = *lane.warp;
  warp.body_();
  if (++warp.ended_ != warp.lanes_) {
    world_->next_lane(lane);
  } else {
    world_->finish(warp);  // this stack is free now, but nobody takes it before the switch
    world_->run_on(lane.fibre);
  }
  std::terminate();  // nobody switches to a lane that has ended
}

void World::meet(uint64_t value, Time cost, bool waits) {
  Lane& lane = *current_;
  Warp& warp = *lane.warp;
  const uint32_t n = lane.meeting++ & 1;
  if (warp.arrived_ == 0) warp.bits_[n] = 0;
  lane.value[n] = value;
  warp.bits_[n] |= (value != 0 ? 1u : 0u) << lane.index;
  warp.latest_ = std::max({warp.latest_, lane.at, lane.pending});
  if (++warp.arrived_ != warp.lanes_) {
    next_lane(lane);
  } else {
    warp.arrived_ = 0;
    warp.met_ = warp.latest_ + cost;
    warp.latest_ = 0;
    if (queue_.empty() || queue_.front().at > warp.met_) {
      now_ = std::max(now_, warp.met_);  // there is no event before that time
    } else if (warp.met_ > now_) {
      push(warp.met_, &warp, nullptr, warp.generation_);
      suspend(lane);
    }
    if (waits) {
      if (!has_news(warp)) {
        watch(warp);
        suspend(lane);
        warp.met_ = now_;
      }
      warp.looks_.clear();
      warp.next_look_ = 0;
      warp.signals_seen_.fill(Warp::kUnseen);
    }
  }
  lane.at = warp.met_;
  lane.pending = 0;
}

void World::sleep_until(Time at) {
  Lane& lane = *current_;
  lane.at = std::max(lane.at, at);
  meet(0, 0);
}

void World::look(const uint64_t* word) {
  Warp& warp = *current_->warp;
  const SignalMap::Place place = signals_.place(word);
  if (place.kind != SignalMap::kNone && warp.watch_ == Watch::kSignals) {
    uint64_t& seen = warp.signals_seen_[place.kind];
    if (seen == Warp::kUnseen) seen = arrived_[place.rank * SignalMap::kKinds + place.kind];
    return;
  }
  if (warp.looks_.size() < Warp::kLooks) {
    warp.looks_.push_back({word, *word});
  } else {
    warp.looks_[warp.next_look_++ % Warp::kLooks] = {word, *word};
  }
}

bool World::has_news(const Warp& warp) const {
  for (uint32_t kind = 0; kind < SignalMap::kKinds; ++kind) {
    const uint64_t seen = warp.signals_seen_[kind];
    if (seen != Warp::kUnseen && seen != arrived_[warp.rank * SignalMap::kKinds + kind]) return true;
  }
  return std::any_of(warp.looks_.begin(), warp.looks_.end(),
                     [](const Warp::Look& look) { return *look.word != look.seen; });
}

// Puts the warp to sleep. Called while all words that the warp waits for still have the values that it has seen.
void World::watch(Warp& warp) {
  ++warp.generation_;
  warp.waiting_ = true;
  for (uint32_t kind = 0; kind < SignalMap::kKinds; ++kind) {
    if (warp.signals_seen_[kind] == Warp::kUnseen) continue;
    add_watcher(for_signals_[warp.rank * SignalMap::kKinds + kind], nullptr, warp);
  }
  const uint64_t* before = nullptr;
  for (const Warp::Look& look : warp.looks_) {
    if (look.word != before) add_watcher(for_words_[bucket(look.word)], look.word, warp);
    before = look.word;
  }
}

void World::add_watcher(uint32_t& head, const uint64_t* word, Warp& warp) {
  if (free_watcher_ == kNobody) {
    free_watcher_ = static_cast<uint32_t>(watchers_.size());
    watchers_.push_back({nullptr, nullptr, 0, kNobody});
  }
  const uint32_t i = free_watcher_;
  free_watcher_ = watchers_[i].next;
  watchers_[i] = {word, &warp, warp.generation_, head};
  head = i;
}

// Wakes the watchers of the word in a list of watchers. Removes them from the list, and also all watchers that do not
// wait any more.
void World::notify(uint32_t& head, const uint64_t* word, Time at) {
  uint32_t* link = &head;
  while (*link != kNobody) {
    Watcher& watcher = watchers_[*link];
    const bool waits = watcher.warp->waiting_ && watcher.warp->generation_ == watcher.generation;
    if (waits && watcher.word != word) {
      link = &watcher.next;
      continue;
    }
    if (waits) {
      watcher.warp->waiting_ = false;
      push(at, watcher.warp, nullptr, watcher.warp->generation_);
    }
    const uint32_t i = *link;
    *link = watcher.next;
    watcher.next = free_watcher_;
    free_watcher_ = i;
  }
}

void World::changed(const uint64_t* word, Time at) {
  const SignalMap::Place place = signals_.place(word);
  if (place.kind != SignalMap::kNone) {
    const uint32_t i = place.rank * SignalMap::kKinds + place.kind;
    ++arrived_[i];
    notify(for_signals_[i], nullptr, at);
  }
  notify(for_words_[bucket(word)], word, at);
}

void World::write_at(Time at, uint64_t* word, uint64_t value) {
  push(std::max(at, now_), nullptr, word, value);
}

}  // namespace flashmoe::sim

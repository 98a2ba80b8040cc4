// Scheduler: hands ready tasks to processors in the order of the call's policy, counts them, and ends the call.
//
// Run by the OS warp, after the subscriber's step; every lane keeps the same private members, except `taken_` and
// `word_`, which each lane loads for itself. A step publishes tasks in rounds of up to kLanes, one task for each lane.
// One fence comes before all tasks of the step.
#pragma once

#include "flashmoe/actors/subscriber.h"
#include "flashmoe/protocol/ready_list.h"
#include "flashmoe/protocol/ready_queue.h"
#include "flashmoe/protocol/tile_band.h"

namespace flashmoe {

template <class P>
class Scheduler {
 public:
  static constexpr uint32_t kBandTasks = 64;
  // Tiles that are ready for the returning product wait in two lists: see OrderPolicy::gemm1_lists.
  static constexpr uint32_t kLists = ready_lists(kReturning);
  // A band: a task for each of `columns` blocks of columns and each of `tiles` tiles, ordered by block, then by tile.
  // next: how many of its tasks are published.
  struct Band {
    uint32_t tiles = 0, first_column = 0, columns = 0, next = 0;
    FLASHMOE_FN bool empty() const { return next == tiles * columns; }
  };
  // Shared memory, uninitialised. What is rarely touched lies here rather than in registers, which a GPU's OS warp is
  // short of; lane 0 writes it.
  struct Memory {
    Band band[kProducts];                          // for each product, the band that is being published
    TileIndex tiles[kProducts][kMaxRaster];        // the tiles of these bands
    uint32_t returning_first[kMaxGroups][kLists];  // where in each list the return group's next band begins
  };

  FLASHMOE_FN Scheduler(const Call& call, Subscriber<P>& subscriber, Memory& memory)
      : c_(call), sub_(subscriber), memory_(memory) {
    published_ = P::broadcast(P::load_relaxed(&c_.control()->published.value), 0);
    drained_ = P::broadcast(P::load_relaxed(&c_.control()->list_head.value), 0);
    if (P::lane() == 0) {
      for_each_product([&]<uint32_t n>() { memory_.band[n] = {}; });
    }
    for (uint32_t i = P::lane(); i < kMaxGroups * kLists; i += P::kLanes)
      memory_.returning_first[i / kLists][i % kLists] = 0;
    P::sync();
  }

  // Starts the loads of a step, so that they are under way while the subscriber takes its step. All lanes.
  FLASHMOE_FN void look() {
    taken_ = P::load_relaxed(&c_.control()->queue_head.value);
    word_ = look_ready<P>(c_, drained_);
  }

  // Publishes what the window allows. Returns kDone once all words of the call are published, all its returns are
  // here, and may_end() returns true, which is called last. All lanes, after look().
  template <class MayEnd>
  FLASHMOE_FN Step step(MayEnd&& may_end) {
    bool moved = drain();
    int64_t room = static_cast<int64_t>(P::broadcast(taken_, 0) + c_.policy.order.window - published_);
    bool fenced = false;
    while (room > 0) {
      const TaskKind kind = choose(c_.policy.order, ready());
      if (kind == TaskKind::kNone) break;
      // One fence is enough for the step, because nothing that its later tasks refer to is written in between. A lane
      // may post a task that another lane has polled. So each lane fences what it has polled, and then all lanes
      // meet.
      if (!fenced) {
        P::release_fence(kDevice);
        P::sync();
        fenced = true;
      }
      room -= publish_some(kind, static_cast<uint32_t>(min_of<int64_t>(room, P::kLanes)));
      moved = true;
    }
    if (!ended_ && formed_ == c_.shape.local_experts) {
      if (stopped_ < c_.policy.order.link_clusters && first_group_is_published())
        publish_stops(c_.policy.order.link_clusters);
      if (sub_.complete() && tasks_ == tasks_of_call()) {
        end_tasks();
        moved = true;
      }
    }
    if (ended_ && sub_.returned() == c_.policy.groups && may_end()) {
      if (P::lane() == 0) P::store_release(&c_.status(c_.rank)->left, c_.epoch, kSystem);
      return Step::kDone;
    }
    return moved ? Step::kProgress : Step::kIdle;
  }

 private:
  FLASHMOE_FN uint32_t tasks_of_call() const {
    uint32_t tasks = 0;
    for_each_product([&]<uint32_t n>() { tasks += tiles_ * c_.policy.columns[n]; });
    // GEMM0 takes the shared expert's tiles slice by slice.
    if (c_.shape.shared > 1) {
      tasks += (c_.shape.shared - 1) * ceil_div(c_.shape.tokens, c_.policy.tile_rows) * c_.policy.columns[kFirst];
    }
    return tasks;
  }

  // Moves items of the ready list to the products' lists of ready tiles. The OS warp itself does not read what the
  // items refer to. The release_fence before the tasks are published also acquires it, for the processors that take
  // the tasks.
  FLASHMOE_FN bool drain() {
    bool moved = false;
    while (true) {
      const uint32_t n = take_ready<P>(c_, drained_, word_);
      if (n == 0) break;
      drained_ += n;
      moved = true;
      const Ready ready = Ready::unpack(P::lane() < n ? word_ : 0);
      for_each_product([&]<uint32_t n>() { append_tiles<n>(ready); });
      const bool formed = ready.kind() == TaskKind::kFormed;
      if (P::ballot(formed) != 0) {
        uint32_t experts, tiles;
        P::exclusive_scan(formed ? ready.experts() : 0, experts);
        P::exclusive_scan(formed ? ready.tiles() : 0, tiles);
        formed_ += experts;
        tiles_ += tiles;
      }
      if (n < P::kLanes) break;
      word_ = look_ready<P>(c_, drained_);
    }
    P::sync();
    return moved;
  }

  // Appends those of the lanes' items that are for product n to its lists.
  template <uint32_t n>
  FLASHMOE_FN void append_tiles(const Ready& ready) {
    FLASHMOE_UNROLL
    for (uint32_t list = 0; list < ready_lists(n); ++list) {
      bool has = ready.kind() == Product<n>::kKind;
      if constexpr (n == kReturning) {
        const bool hurries = c_.policy.order.gemm1_lists > 1 && ready.remote();
        has = has && hurries == (list == 0);
      }
      append(ready_[first_list(n) + list], has,
             [&](uint32_t position) { *ready_tile(first_list(n) + list, position) = ready.pack(); });
    }
  }
  FLASHMOE_FN uint64_t* ready_tile(uint32_t list, uint32_t position) const {
    return c_.workspace<uint64_t>(WorkField::kReadyTiles, list, position);
  }

  // Calls store(position) in the lanes with `has`, with consecutive positions from `end` on, and moves `end` behind
  // them.
  template <class Store>
  FLASHMOE_FN static void append(uint32_t& end, bool has, Store&& store) {
    uint32_t total;
    const uint32_t position = end + count_before<P>(has, total);
    if (has) store(position);
    end += total;
  }

  FLASHMOE_FN ReadyState ready() const {
    ReadyState r;
    for_each_product([&]<uint32_t n>() {
      r.product[n] = !memory_.band[n].empty();
      if constexpr (n == kReturning) {
        r.product[n] = r.product[n] || next_returning_list() < kLists * c_.policy.groups;
      } else {
        r.product[n] = r.product[n] || first_[n] < ready_[first_list(n)];
      }
      r.published[n] = product_published_[n];
    });
    return r;
  }

  // Publishes up to `limit` (<= kLanes) tasks of a kind that is ready; returns how many.
  FLASHMOE_FN uint32_t publish_some(TaskKind kind, uint32_t limit) {
    Task task;
    bool has = false;
    with_product(kind, [&]<uint32_t n>() {
      if (memory_.band[n].empty()) open_band<n>();
      product_published_[n] += next_of<n>(limit, has, task);
    });
    const uint32_t n = publish<P>(c_, published_, has, task);
    published_ += n;
    tasks_ += n;
    return n;
  }

  // Opens product n's next band. There must be a ready tile that has not been in one.
  template <uint32_t n>
  FLASHMOE_FN void open_band() {
    constexpr uint32_t kList = first_list(n);
    if constexpr (n != kReturning) {
      const uint32_t tiles =
          take_tiles(memory_.tiles[n], c_.policy.order.raster, ready_[kList] - first_[n], ready_tile(kList, first_[n]));
      set(memory_.band[n], Band{tiles, 0, c_.policy.columns[n], 0});
      first_[n] += tiles;
    } else {
      // Bands go group by group over all ready tiles, so that the first columns can be combined while the last
      // columns are computed.
      const uint32_t i = next_returning_list(), g = i / kLists, list = i % kLists;
      const uint32_t first = memory_.returning_first[g][list], columns = c_.group_columns(g);
      // A group of few columns has more tiles in a band, to keep the processors supplied: each band costs a round trip.
      const uint32_t most = min_of(max_of(c_.policy.order.raster, ceil_div(kBandTasks, columns)), kMaxRaster);
      const uint32_t tiles =
          take_tiles(memory_.tiles[n], most, returning_ready(list) - first, ready_tile(kList + list, first));
      set(memory_.band[n], Band{tiles, c_.policy.group_first[g], columns, 0});
      set(memory_.returning_first[g][list], first + tiles);
    }
  }

  // The first group, and in it the first list, with a tile that has not been in one of its bands, as group * kLists +
  // list; kLists * groups if there is none.
  FLASHMOE_FN uint32_t next_returning_list() const {
    uint32_t i = 0;
    while (i < kLists * c_.policy.groups &&
           memory_.returning_first[i / kLists][i % kLists] == returning_ready(i % kLists))
      ++i;
    return i;
  }
  // Compares, because an index that is known only at run time would move the array out of the registers.
  FLASHMOE_FN uint32_t returning_ready(uint32_t list) const {
    constexpr uint32_t kList = first_list(kReturning);
    return list == 0 ? ready_[kList] : ready_[kList + 1];
  }

  // Takes the tiles of a new band, up to `most` of the n tiles that are ready; returns how many.
  FLASHMOE_FN uint32_t take_tiles(TileIndex* to, uint32_t most, uint32_t n, uint64_t* ready) {
    most = min_of(most, n);
    // In the first case hardly any expert has two tiles, so tiles share no weights. Besides, tasks are short then, so
    // the scheduler must be fast to keep up with the processors.
    if (formed_ == c_.shape.local_experts && tiles_ <= formed_) {
      take_in_order<P>(to, most, ready);
    } else {
      take_by_expert<P>(to, most, n, ready);
    }
    return most;
  }

  // Takes the next tasks of product n's band, at most `limit`, one for each lane; returns how many.
  template <uint32_t n>
  FLASHMOE_FN uint32_t next_of(uint32_t limit, bool& has, Task& task) {
    const Band w = memory_.band[n];
    const uint32_t tasks = min_of(limit, w.tiles * w.columns - w.next);
    const uint32_t i = w.next + P::lane();
    has = P::lane() < tasks;
    if (has) task = {Product<n>::kKind, w.first_column + i / w.tiles, memory_.tiles[n][i % w.tiles].bits};
    set(memory_.band[n].next, w.next + tasks);
    return tasks;
  }

  // Writes to shared memory that all lanes read before, and will read after. All lanes, with the same value.
  template <class T>
  FLASHMOE_FN void set(T& to, T value) {
    P::sync();
    if (P::lane() == 0) to = value;
    P::sync();
  }

  // Whether as many tasks of the returning product are published as the first return group has. (Of ready tasks,
  // those of the first group go first.) Called only when all experts are formed, so that the number of tiles is
  // known.
  FLASHMOE_FN bool first_group_is_published() const {
    return product_published_[kReturning] >= tiles_ * c_.group_columns(0);
  }
  // Publishes stop words until `stops` are published in this call. A cluster that has taken one takes no more tasks.
  FLASHMOE_FN void publish_stops(uint32_t stops) {
    P::release_fence(kDevice);
    P::sync();
    while (stopped_ < stops) {
      const uint32_t n = publish<P>(c_, published_, stopped_ + P::lane() < stops, {TaskKind::kStop});
      published_ += n;
      stopped_ += n;
    }
  }

  // Publishes a stop word for every cluster that has none yet. At least one of them comes after all tasks. When the
  // last stop word is taken, the queue and the ready list are empty.
  FLASHMOE_FN void end_tasks() {
    publish_stops(c_.policy.clusters);
    ended_ = true;
    if (P::lane() != 0) return;
    P::store_relaxed(&c_.control()->published.value, published_);
    P::store_relaxed(&c_.control()->list_head.value, drained_);
    P::store_relaxed(&c_.control()->tiles.value, uint64_t{0});
  }

  const Call& c_;
  Subscriber<P>& sub_;
  Memory& memory_;
  uint64_t taken_ = 0, word_ = 0;  // what look() saw
  uint64_t published_;             // words ever published in this context
  uint64_t drained_;               // items ever drained from the ready list
  uint32_t tasks_ = 0;             // published in this call
  uint32_t stopped_ = 0;           // clusters whose stop words are published
  uint32_t product_published_[kProducts] = {};
  uint32_t tiles_ = 0;                // the number of tiles of the `formed_` experts
  uint32_t formed_ = 0;               // the number of local experts that have all their tiles
  uint32_t ready_[kReadyLists] = {};  // how many tiles have been put into each list in this call
  uint32_t first_[kProducts] = {};    // where in its list a product's next band begins; not for the returning product
  bool ended_ = false;
};

}  // namespace flashmoe

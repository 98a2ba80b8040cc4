#include "sim/cluster.h"

namespace flashmoe::sim {
namespace {

Time of_us(double us) {
  return static_cast<Time>(us * static_cast<double>(kMicrosecond));
}

// The warps of a block, by their roles until the stop word (roles/kernel.cuh).
constexpr uint32_t kConsumers = 8, kFirstLoader = 8, kSecondLoader = 9, kClerk = 10, kService = 11;

}  // namespace

template <class P>
Cluster<P>::Cluster(const Machine& machine, RankState& rank, uint32_t id)
    : machine_(machine), rank_(rank), c_(rank.call), id_(id), relays_piece_(machine.sum_beside_tasks) {
  for (Block& block : block_) block.late.init();
}

template <class P>
void Cluster<P>::block_is_free() {
  if (++free_blocks_ != kArch.cluster_blocks) return;
  World& world = World::of_lane();
  Warp& clerk = world.start(c_.rank, 1, Watch::kSignals, [this] { lead(); });
  clerk.first_use = machine_.costs.first_task;
  world.start(c_.rank, 1, Watch::kSignals, [this] { compute(); });
  world.start(c_.rank, 1, Watch::kSignals, [this] { retire_tasks(); });
  for (uint32_t b = 0; b < kArch.cluster_blocks; ++b) {
    if (joins()) {
      world.start(c_.rank, Joining::kLanes, Watch::kSignals, [this, b] { load_and_join(b); });
    } else {
      world.start(c_.rank, 1, Watch::kSignals, [this, b] { load(b); }).worker = kSecondLoader;
    }
  }
}

template <class P>
void Cluster<P>::await(const uint64_t& word, uint64_t at_least) {
  while (word < at_least) {
    World::of_lane().look(&word);
    World::of_lane().wait();
  }
}

template <class P>
void Cluster<P>::count(uint64_t& word) {
  if (World::lane().index != 0) return;
  ++word;
  World::of_lane().changed(&word, World::lane().at);
}

template <class P>
typename Cluster<P>::Slot Cluster<P>::look_up(const Task& task) const {
  Slot s{.task = task, .stages = 0, .stage = 0, .epilogue = 0, .handed = 0, .begun = 0, .written = 0};
  if (task.kind == TaskKind::kStop) return s;
  with_product(task.kind, [&]<uint32_t n>() {
    const TaskTimes::Point times = machine_.tasks.at(n, c_.tile(task.tile().number())->shape.rows);
    s.stages = ceil_div(c_.shape.extent(kProgram[n].over) * 2, kArch.stage_bytes);
    s.stage = of_us(times.stage_us);
    s.epilogue = of_us(times.epilogue_us);
  });
  return s;
}

// The clerk of the first block (roles/clerk.cuh, lead_tasks).
template <class P>
void Cluster<P>::lead() {
  World& world = World::of_lane();
  for (uint64_t n = 0;; ++n) {
    if (n >= kSlots) await(retired_, n + 1 - kSlots);
    if (n != 0) {
      // Waits until the loaders have only kAhead stages of the previous task left to begin.
      const Slot& before = slot(n - 1);
      await(started_, n);
      const uint32_t begun = before.stages > kAhead + kStages ? before.stages - kAhead - kStages : 0;
      world.sleep_until(before.begun + begun * before.stage);
    }
    const uint64_t ticket = P::broadcast(take_ticket<P>(c_), 0);
    const Task task = wait_task<P>(c_, ticket);
    P::acquire(c_.queue_slot(ticket), kDevice);  // the loads of rows and shape go side by side: one round trip
    P::sync();
    slot(n) = look_up(task);
    slot(n).handed = world.now();
    count(handed_);
    if (task.kind == TaskKind::kStop) return start_helper(0, kClerk);
  }
}

// The consumers of both blocks, and the loads that run ahead of them.
template <class P>
void Cluster<P>::compute() {
  World& world = World::of_lane();
  for (uint64_t n = 0;; ++n) {
    await(handed_, n + 1);
    Slot& s = slot(n);
    if (s.task.kind == TaskKind::kStop) break;
    world.sleep_until(s.handed + machine_.fill);
    s.begun = world.now();
    if (rank_.tasks++ == 0) rank_.first_task = s.begun;
    count(started_);
    world.sleep_until(s.begun + s.stages * s.stage);
    const Time stored = world.now() + s.epilogue;
    s.written = stored;
    const bool sends = is_one_of<kHome>(s.task.kind) && !c_.reduced();
    world.sleep_until(std::max(stored, sends ? send_results(s) : 0));
    rank_.last_task = std::max(rank_.last_task, world.now());
    ended();
    rank_.busy += world.now() - s.begun;
    with_product(s.task.kind, [&]<uint32_t n>() { rank_.spans.add(id_, kProgram[n].phase, s.begun, world.now()); });
    count(done_);
  }
  relays_piece_ = machine_.sum_piece;
  for (uint32_t b = 0; b < kArch.cluster_blocks; ++b) {
    for (uint32_t worker = 0; worker < kConsumers; ++worker) start_helper(b, worker);
    if (!block_[b].relays) start_helper(b, kService);
  }
}

// Sends the result rows whose homes are other ranks. They go out while the epilogue stores them. Returns the time at
// which the last byte has left, because the task does not end before. Slot::written becomes the time at which that
// byte has arrived.
template <class P>
Time Cluster<P>::send_results(Slot& s) {
  Group& group = Group::of_lane();
  const uint32_t tile = s.task.tile().whole();
  const Tile::Shape shape = c_.tile(tile)->shape;
  const uint32_t bytes = min_of(kArch.task_features, c_.shape.hidden - s.task.column * kArch.task_features) * 2;
  Time sent = 0;
  for (uint32_t i = 0; i < shape.segments; ++i) {
    const Segment segment = c_.segments(tile)[i];
    if (segment.source == c_.rank) continue;
    const Links::Transfer t =
        group.send(c_.rank, segment.source, uint64_t{segment.count} * bytes, World::of_lane().now());
    sent = std::max(sent, t.sent);
    s.written = std::max(s.written, t.there);
  }
  return sent;
}

// The clerk of the second block (roles/clerk.cuh, follow_tasks).
template <class P>
void Cluster<P>::retire_tasks() {
  for (uint64_t n = 0;; ++n) {
    await(handed_, n + 1);
    if (slot(n).task.kind == TaskKind::kStop) return start_helper(1, kClerk);
    await(done_, n + 1);
    for (const Block& block : block_) await(block.loaded, n + 1);
    World::warp().written = slot(n).written;
    retire<P>(c_, slot(n).task);
    P::sync();
    count(retired_);
  }
}

// A block's second loader warp. In tasks that read intermediate rows it has nothing to load, so it sums rows
// meanwhile (roles/loaders.cuh, load_tasks). If ranks are on several machines it sums none, because the kernel then
// has no registers left for sums in this warp.
template <class P>
void Cluster<P>::load(uint32_t b) {
  const bool returns = c_.shape.ranks > 1 && !SpansMachines<P>;
  // The warp sums while tasks run beside it, see Machine::sum_beside_tasks.
  SumEngine sums(rank_, id_ * kArch.cluster_blocks + b, machine_.sum_beside_tasks);
  Returner<P, SumEngine, CursorOfWarp> returner(c_, sums, block_[b].returns);
  for (uint64_t n = 0;; ++n) {
    await(handed_, n + 1);
    const Task task = slot(n).task;
    if (task.kind == TaskKind::kStop) break;
    await(started_, n + 1);
    count(block_[b].loaded);
    if (is_one_of<kHome>(task.kind) && returns && handed_ < n + 3) returner.step(summing_between_tasks(c_));
  }
  start_helper(b, kFirstLoader);
  help(b, kSecondLoader);
}

// The second loader warp where late rows are joined: instead of summing, it finds late rows and joins them.
template <class P>
void Cluster<P>::load_and_join(uint32_t b) {
  for (uint64_t n = 0;; ++n) {
    await(handed_, n + 1);
    const TaskKind kind = slot(n).task.kind;
    if (kind == TaskKind::kStop) break;
    if (is_one_of<kHome>(kind)) find_late_rows(b, n);
    Joining::sync();
    count(block_[b].loaded);
  }
  JoinEngine adder(rank_, id_, machine_.sum_piece);
  Joiner<Joining, JoinEngine>(c_, adder, block_[b].late).close();
  if (World::lane().index == 0) start_helper(b, kFirstLoader);
  help(b, kSecondLoader);
}

// Joins late rows of earlier tasks until the n-th task's rows are stored. Then finds the late rows among these.
template <class P>
void Cluster<P>::find_late_rows(uint32_t b, uint64_t n) {
  constexpr uint32_t kMost = kArch.tile_rows / kArch.cluster_blocks;
  const Task task = slot(n).task;
  const uint32_t tile = task.tile().whole();
  const cuda::Share share = kArch.share_of(c_.tile(tile)->shape.rows, b);
  JoinEngine adder(rank_, id_, machine_.sum_piece);
  Joiner<Joining, JoinEngine> joiner(c_, adder, block_[b].late);
  while (done_ <= n) {
    if (joiner.step()) continue;
    World::of_lane().look(&done_);
    World::of_lane().wait();
  }
  const Row* const rows = c_.tile_row(tile, share.first);
  joiner.template find<kMost>([&](uint32_t i) { return i < share.rows ? rows[i].token : 0u; }, share.rows, task.column,
                              share.wide ? 2 : 1);
}

template <class P>
void Cluster<P>::start_helper(uint32_t b, uint32_t worker) {
  if (c_.policy.joined != 0 && !joins()) return;  // joined, with one row per token: nothing is left to do
  const uint32_t lanes = joins() ? Joining::kLanes : 1;
  World::of_lane().start(c_.rank, lanes, Watch::kSignals, [this, b, worker] { help(b, worker); });
}

template <class P>
void Cluster<P>::end_relay(uint32_t b) {
  start_helper(b, kService);
}

// What a warp does when its role has ended. A warp that joins runs this on all its lanes.
template <class P>
void Cluster<P>::help(uint32_t b, uint32_t worker) {
  World::warp().worker = worker;
  World::warp().written = 0;
  if (joins()) {
    JoinEngine adder(rank_, id_, machine_.sum_piece);
    Joiner<Joining, JoinEngine>(c_, adder, block_[b].late).run();
    Joining::sync();
  } else if (c_.policy.joined == 0) {
    const bool was_relay = worker == kService && block_[b].relays;
    SumEngine sums(rank_, id_ * kArch.cluster_blocks + b, was_relay ? relays_piece_ : machine_.sum_piece);
    Returner<P, SumEngine, CursorOfWarp>(c_, sums, block_[b].returns).run(c_);
    P::sync();
  }
  ended();
}

template class Cluster<MappedPlatform<1>>;
template class Cluster<SpreadLanes<1>>;

}  // namespace flashmoe::sim

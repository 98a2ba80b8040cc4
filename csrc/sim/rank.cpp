#include "sim/rank.h"

#include <utility>

namespace flashmoe::sim {
namespace {

// The engine of a Sender. Rows for a rank of this machine leave at once, and the warp's later releases wait until the
// rows have arrived. Rows for another machine are copied into the message of their batch, and go with this message.
class RowEngine {
 public:
  RowEngine(const SpreadCall& call, MemoryPort& memory) : c_(call), memory_(memory) {}
  void send_rows(uint32_t q, uint32_t, uint32_t rows) const {
    if (rows == 0) return;
    Warp& warp = World::warp();
    const uint64_t bytes = uint64_t{rows} * c_.memory.token_row_bytes;
    const Time at = World::lane().at;
    const bool mapped = c_.spread.together(c_.rank, q);
    const Time there = mapped ? Group::of_lane().send(c_.rank, q, bytes, at).there : memory_.pass(2 * bytes, at);
    warp.written = std::max(warp.written, there);
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  const SpreadCall& c_;
  MemoryPort& memory_;
};

static_assert(SendsRows<RowEngine>);

// The engine of a RelayWorker. A warp loads 4 KiB at a time. When all of its rows are loaded, it stores them to the
// other rank over NVLink.
class RelayEngine {
 public:
  explicit RelayEngine(const Call& call) : c_(call) {}
  void pass_rows(uint32_t q, uint32_t, uint32_t, uint32_t rows) const {
    if (rows == 0) return;
    constexpr uint32_t kFlightBytes = 4096;
    Group& group = Group::of_lane();
    Lane& lane = World::lane();
    const uint32_t bytes = c_.memory.token_row_bytes;
    lane.at += rows * ceil_div(bytes, kFlightBytes) * group.machine().costs.load;
    Warp& warp = World::warp();
    warp.written = std::max(warp.written, group.send(c_.rank, q, uint64_t{rows} * bytes, lane.at).there);
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  const Call& c_;
};

static_assert(PassesRows<RelayEngine> && HasSpans<RelayEngine>);

// [ranks]: the machine of each rank.
std::vector<uint32_t> machines_of(const Group& group) {
  std::vector<uint32_t> of(group.ranks());
  for (uint32_t r = 0; r < group.ranks(); ++r) of[r] = r / group.gpus();
  return of;
}

}  // namespace

template <template <uint32_t> class Platform>
Rank<Platform>::Rank(Group& group, const Call& call, const Limits& limits, RankProblem problem, uint32_t rank)
    : group_(group),
      problem_(std::move(problem)),
      heaps_(group.heaps_of(rank)),
      tables_(machines_of(group), group.ranks(), rank),
      call_{call, tables_.machines(limits)},
      state_(group.machine(), call_),
      sending_(group.machine().blocks) {
  call_.rank = rank;
  call_.shape.local_experts = problem_.local_experts;
  call_.placement = {problem_.owner.data(), problem_.by_owner.data(), problem_.owner_base.data()};
  call_.memory.heaps = heaps_.data();
  call_.memory.work = group.work(rank);
  call_.spread.sums = call_.spread.count != 1;
  call_.spread.layout = group.relay_layout();
  call_.spread.behind = group.behind_own();
  sending_call_ = call_;
  sending_call_.spread.behind = group.behind_others();
  group.set_calls(rank, call_, sending_call_);
  for (uint32_t i = 0; i < call_.policy.clusters; ++i) clusters_.emplace_back(group.machine(), state_, i);
}

template <template <uint32_t> class Platform>
bool Rank<Platform>::sends(uint32_t block) const {
  return call_.shape.ranks > 1 && block + call_.policy.order.senders >= blocks();
}

template <template <uint32_t> class Platform>
void Rank<Platform>::start() {
  World& world = group_.world();
  Warp& os = world.start(call_.rank, Lanes::kLanes, Watch::kSignals, [this] { run_os_actor(); });
  os.first_use = group_.machine().costs.first_os;
  os.used_by_fence = true;
  for (uint32_t i = 0; i < formers() && i < call_.shape.local_experts; ++i) {
    Warp& former = world.start(call_.rank, Lanes::kLanes, Watch::kSignals, [this, i] { run_former_actor(i); });
    former.first_use = group_.machine().costs.first_former;
  }
  for (uint32_t b = 0; b < blocks(); ++b) {
    world.start(call_.rank, 1, Watch::kWords, [this, b] { run_block(b); });
  }
}

// All lanes of a warp run run_os_actor(), or run_former_actor(). Lane 0 owns what the lanes of the warp share.
template <template <uint32_t> class Platform>
void Rank<Platform>::run_os_actor() {
  struct Shared {
    std::vector<Source> sources;
    std::vector<Status> seen;
    typename Scheduler<Lanes>::Memory scheduler;
  };
  std::unique_ptr<Shared> mine;
  if (Lanes::lane() == 0) {
    mine = std::make_unique<Shared>();
    mine->sources.resize(call_.shape.ranks);
    mine->seen.resize(call_.shape.ranks);
  }
  auto* shared = reinterpret_cast<Shared*>(Lanes::broadcast(reinterpret_cast<uint64_t>(mine.get()), 0));
  run_os<Lanes>(call_, {.subscriber = {shared->sources.data(), {nullptr, 0, 0}},
                        .scheduler = &shared->scheduler,
                        .seen = shared->seen.data()});
  Lanes::sync();
  state_.end = std::max(state_.end, group_.world().now());
}

template <template <uint32_t> class Platform>
void Rank<Platform>::run_former_actor(uint32_t former) {
  struct Shared {
    std::vector<Source> sources;
    std::vector<FormedExpert> experts;
  };
  std::unique_ptr<Shared> mine;
  if (Lanes::lane() == 0) {
    mine = std::make_unique<Shared>();
    mine->sources.resize(call_.shape.ranks);
    mine->experts.resize(ceil_div(call_.shape.local_experts - former, formers()));
  }
  auto* shared = reinterpret_cast<Shared*>(Lanes::broadcast(reinterpret_cast<uint64_t>(mine.get()), 0));
  run_former<Lanes>(call_, shared->sources.data(), {shared->experts.data(), former, formers()});
  Lanes::sync();
}

// What a block does until its tasks begin: it dispatches its token blocks, then sends rows to other ranks.
template <template <uint32_t> class Platform>
void Rank<Platform>::run_block(uint32_t block) {
  World& world = group_.world();
  const Machine& machine = group_.machine();
  const uint32_t cluster = block / kArch.cluster_blocks;
  for (uint32_t b = block; b < call_.blocks(); b += blocks()) {
    const Time begin = world.now();
    world.sleep_until(begin + machine.gate);
    const Time routed = world.now();
    const uint32_t entries = dispatch(b);
    world.sleep_until(world.now() + machine.packets);
    state_.spans.add(cluster, Phase::kGate, begin, routed);
    state_.spans.add(cluster, Phase::kDispatch, routed, world.now());
    signal_packet<Thread>(call_, call_.rank, b, entries);
  }
  if (sends(block)) return start_senders(block);
  free_block(block);
}

// The block's warps take their roles. If ranks are on several machines, the last warp is a relay, unless it is the OS
// actor or a former.
template <template <uint32_t> class Platform>
void Rank<Platform>::free_block(uint32_t block) {
  auto& cluster = clusters_[block / kArch.cluster_blocks];
  if (SpansMachines<Thread> && block > formers()) {
    cluster.begin_relay(block % kArch.cluster_blocks);
    group_.world().start(call_.rank, 1, Watch::kWords, [this, block] { run_relay(block); });
  }
  cluster.block_is_free();
}

// Builds the token block's packets. Returns how many entries the rank's packet for itself has.
template <template <uint32_t> class Platform>
uint32_t Rank<Platform>::dispatch(uint32_t token_block) {
  const CallShape& s = call_.shape;
  const uint32_t first = token_block << call_.policy.log2_block;
  const auto from = problem_.ids.begin() + uint64_t{first} * s.top_k;
  std::vector<int32_t> ids(from, from + uint64_t{call_.tokens_in_block(token_block)} * s.top_k);
  std::vector<float> weights(ids.size(), 1.0f);
  std::vector<uint16_t> experts(3 * uint64_t{s.experts});
  std::vector<uint32_t> entries(s.ranks + 2);
  PacketScratch scratch{};
  scratch.ids = ids.data();
  scratch.weights = weights.data();
  scratch.place = experts.data();
  scratch.count = experts.data() + s.experts;
  scratch.start = experts.data() + 2 * uint64_t{s.experts};
  scratch.entries = entries.data();
  scratch.aborted = &entries[s.ranks];
  scratch.missing = &entries[s.ranks + 1];
  scratch.owner = call_.placement.owner;
  build_packets<UntimedPlatform>(call_, token_block, scratch);
  return entries[call_.rank];
}

template <template <uint32_t> class Platform>
void Rank<Platform>::start_senders(uint32_t block) {
  sending_[block] = kWarps;
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    group_.world().start(call_.rank, 1, Watch::kWords, [this, block, warp] { send_rows(block, warp); });
  }
}

template <template <uint32_t> class Platform>
void Rank<Platform>::send_rows(uint32_t block, uint32_t warp) {
  RowEngine engine(call_, state_.memory);
  const Time begin = group_.world().now();
  const bool first = warp == 0 && block + call_.policy.order.senders == blocks();
  Sender<Thread, RowEngine>(sending_call_, engine).run(first, block);
  group_.world().sleep_until(World::warp().written);
  state_.spans.add(block / kArch.cluster_blocks, Phase::kDispatch, begin, group_.world().now());
  if (--sending_[block] == 0) free_block(block);
}

template <template <uint32_t> class Platform>
void Rank<Platform>::run_relay(uint32_t block) {
  if constexpr (SpansMachines<Thread>) {
    const uint32_t before = 1 + formers();
    RelayEngine engine(call_);
    RelayWorker<RelayThread, RelayEngine>(call_, engine).run(block - before, blocks() - before);
    group_.world().sleep_until(World::warp().written);
    clusters_[block / kArch.cluster_blocks].end_relay(block % kArch.cluster_blocks);
  }
}

template class Rank<MappedPlatform>;
template class Rank<SpreadLanes>;

}  // namespace flashmoe::sim

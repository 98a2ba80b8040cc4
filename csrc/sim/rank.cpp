#include "sim/rank.h"

#include <utility>

namespace flashmoe::sim {
namespace {

// The engine of a Sender: a row is on its way at once, and what its warp releases waits until it is there.
class RowEngine {
 public:
  explicit RowEngine(const Call& call) : c_(call) {}
  void send_rows(uint32_t q, uint32_t, uint32_t rows) const {
    if (rows == 0) return;
    Group& group = Group::of_lane();
    Warp& warp = World::warp();
    const Group::Peer peer = group.peer(c_.rank, q);
    const uint64_t bytes = uint64_t{rows} * c_.memory.token_row_bytes;
    const Links::Transfer t = group.links().send(c_.rank, peer.rank, peer.remote, bytes, World::lane().at);
    warp.written = std::max(warp.written, t.there);
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  const Call& c_;
};

// The engine of a PutSender: it copies a row to where puts may read.
class StageEngine {
 public:
  StageEngine(const Call& call, MemoryPort& memory) : c_(call), memory_(memory) {}
  void stage_row(uint32_t) const {
    Lane& lane = World::lane();
    if (lane.index == 0) lane.at = memory_.pass(2 * c_.memory.token_row_bytes, lane.at);
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  const Call& c_;
  MemoryPort& memory_;
};

}  // namespace

template <template <uint32_t> class Platform>
Rank<Platform>::Rank(Group& group, const Call& call, RankProblem problem, uint32_t rank)
    : group_(group),
      problem_(std::move(problem)),
      heaps_(group.heaps_of(rank)),
      call_(call),
      state_(group.machine(), call_),
      sending_(group.machine().blocks) {
  call_.rank = rank;
  call_.shape.local_experts = problem_.local_experts;
  call_.placement = {problem_.owner.data(), problem_.by_owner.data(), problem_.owner_base.data()};
  call_.memory.heaps = heaps_.data();
  call_.memory.work = group.work(rank);
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

// All lanes run these: what they share is the first one's.
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

// A block until its tasks begin: its own tokens, then those that go to other ranks.
template <template <uint32_t> class Platform>
void Rank<Platform>::run_block(uint32_t block) {
  World& world = group_.world();
  const Machine& machine = group_.machine();
  for (uint32_t b = block; b < call_.blocks(); b += blocks()) {
    world.sleep_until(world.now() + machine.gate);
    const uint32_t entries = dispatch(b);
    world.sleep_until(world.now() + machine.packets);
    signal_packet<Thread>(call_, call_.rank, b, entries);
  }
  if constexpr (!Lanes::kPeersMapped) {
    if (block > formers()) {
      world.start(call_.rank, Lanes::kLanes, Watch::kWords, [this, block] { put_rows(block); });
    }
  } else if (sends(block)) {
    return start_senders(block);
  }
  clusters_[block / sm90::kClusterBlocks].block_is_free();
}

// Builds the token block's packets; returns how many entries the own one has.
template <template <uint32_t> class Platform>
uint32_t Rank<Platform>::dispatch(uint32_t token_block) {
  const CallShape& s = call_.shape;
  const uint32_t first = token_block << call_.policy.log2_block;
  const auto from = problem_.ids.begin() + uint64_t{first} * s.top_k;
  std::vector<int32_t> ids(from, from + uint64_t{call_.tokens_in_block(token_block)} * s.top_k);
  std::vector<float> weights(ids.size(), 1.0f);
  std::vector<uint16_t> experts(3 * uint64_t{s.experts});
  std::vector<uint32_t> entries(s.ranks + 1);
  PacketScratch scratch{};
  scratch.ids = ids.data();
  scratch.weights = weights.data();
  scratch.place = experts.data();
  scratch.count = experts.data() + s.experts;
  scratch.start = experts.data() + 2 * uint64_t{s.experts};
  scratch.entries = entries.data();
  scratch.bad = &entries[s.ranks];
  scratch.owner = call_.placement.owner;
  build_packets<UntimedPlatform>(call_, token_block, scratch);
  return entries[call_.rank];
}

template <template <uint32_t> class Platform>
void Rank<Platform>::start_senders(uint32_t block) {
  sending_[block] = gpu::kWarps;
  for (uint32_t warp = 0; warp < gpu::kWarps; ++warp) {
    group_.world().start(call_.rank, 1, Watch::kWords, [this, block, warp] { send_rows(block, warp); });
  }
}

template <template <uint32_t> class Platform>
void Rank<Platform>::send_rows(uint32_t block, uint32_t warp) {
  RowEngine engine(call_);
  const uint32_t senders = call_.policy.order.senders, first = warp * senders + block + senders - blocks();
  if constexpr (Thread::kPeersMapped) {
    Sender<Thread, RowEngine>(call_, engine).run(first, gpu::kWarps * senders, block);
  }
  group_.world().sleep_until(World::warp().written);
  if (--sending_[block] == 0) clusters_[block / sm90::kClusterBlocks].block_is_free();
}

template <template <uint32_t> class Platform>
void Rank<Platform>::put_rows(uint32_t block) {
  StageEngine engine(call_, state_.memory);
  const uint32_t first = 1 + formers();  // blocks before have the OS actor and formers
  if constexpr (!Lanes::kPeersMapped) {
    PutSender<Lanes, StageEngine>(call_, engine).run(block - first, blocks() - first, block);
  }
  state_.end = std::max(state_.end, group_.world().now());
}

template class Rank<MappedPlatform>;
template class Rank<PutPlatform>;

}  // namespace flashmoe::sim

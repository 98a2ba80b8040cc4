// Checks that waits end, and that calls that cannot succeed end on all ranks, with a fault that names the rank to
// blame.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "compiled_once.h"
#include "host/text.h"

namespace flashmoe::test {
namespace {

using cpu::CpuPlatform;
constexpr uint64_t kMs = 1'000'000;
// The timeout of waits that are to expire. A rank whose thread gets no core for half of this time is taken for dead,
// rightly. The timeout is so long that this does not happen on a busy machine.
constexpr uint64_t kPatience = 1500 * kMs;
// The timeout of waits that are to end in another way.
constexpr uint64_t kForever = 120'000 * kMs;

// ---- wait_until -------------------------------------------------------------------------------------------

// Its clock moves only when something waits. So the test sees the same times, however busy the machine is.
struct ClockPlatform : CpuPlatform {
  static inline uint64_t clock = kMs;
  static uint64_t now_ns() { return clock; }
  static void backoff(uint32_t) { clock += kMs; }
};

struct Waiter {
  Waiter() {
    call.memory.work = control.base();
    call.policy.timeout_ns = 100 * kMs;
  }
  Region control{align_up<uint64_t>(sizeof(Control), 256)};  // the workspace's first field
  Call call;
};

// Stands for the other ranks. In the first `stretches` calls, moved() says that they have moved, later that they have
// not. It checks that they had half a timeout to do so.
struct Others {
  uint32_t stretches = 0;
  uint32_t samples = 0;
  uint64_t sampled = 0;
  void sample() {
    ++samples;
    sampled = ClockPlatform::clock;
  }
  bool moved() {
    CHECK(ClockPlatform::clock - sampled >= 50 * kMs);
    return stretches != 0 && stretches-- != 0;
  }
};

void check_wait() {
  const Waiter w;
  const auto idle = [] { return Step::kIdle; };
  for (const uint32_t rearmed : {0u, 3u}) {
    Others others{rearmed};
    const uint64_t start = ClockPlatform::clock;
    CHECK(wait_until<ClockPlatform>(w.call, idle, others) == WaitEnd::kExpired);
    const uint64_t took = ClockPlatform::clock - start;
    CHECK(took >= (rearmed + 1) * 100 * kMs && took <= (rearmed + 1) * 105 * kMs);
    CHECK_EQ(others.samples, rearmed + 1);  // one sample for each stretch
  }

  // Progress every 99 ms keeps a wait alive whose timeout is 100 ms.
  Others none;
  uint32_t steps = 0;
  const auto now_and_then = [&] {
    if (++steps % 99 != 0) return Step::kIdle;
    return steps == 9 * 99 ? Step::kDone : Step::kProgress;
  };
  CHECK(wait_until<ClockPlatform>(w.call, now_and_then, none) == WaitEnd::kDone);

  // A waiter that was itself stopped for ten timeouts must still give the others half a timeout before it expires
  // (moved() checks this).
  for (const uint32_t stopped_at : {10u, 49u, 60u}) {
    Others others;
    uint32_t step = 0;
    const auto stopped = [&] {
      if (++step == stopped_at) ClockPlatform::clock += 1000 * kMs;
      return Step::kIdle;
    };
    CHECK(wait_until<ClockPlatform>(w.call, stopped, others) == WaitEnd::kExpired);
  }
}

void check_abort() {
  Waiter w;
  w.call.policy.timeout_ns = 0;  // no timeout: only the abort ends the wait
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CpuPlatform::store_release(&w.call.control()->abort.value, uint64_t{1}, kDevice);
  });
  CHECK(wait_until<CpuPlatform>(w.call, [] { return Step::kIdle; }, Others{}) == WaitEnd::kAborted);
  aborter.join();
}

// ---- Groups -----------------------------------------------------------------------------------------------

Limits three_ranks() {
  Limits l;
  l.ranks = 3;
  l.processors = 1;
  l.max_tokens = 8;
  l.hidden = 4;
  l.intermediate = 4;
  l.experts = l.max_local_experts = 3;
  l.top_k = 1;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.return_slots = 3;
  l.staging = 1;
  l.tile_rows = 128;
  l.columns_per_task = each_product(2);
  return l;
}

// Expert e is on rank e. All tokens of all ranks go to expert 1. So what rank 1 computes is in a partial tile, which
// waits for the packet of rank 2.
Problem all_to_rank_1() {
  Problem x;
  x.epoch = 1;
  x.hidden = x.intermediate = 4;
  x.experts = 3;
  x.top_k = 1;
  x.place({0, 1, 2}, 3);
  for (uint32_t p = 0; p < 3; ++p) {
    Problem::OfRank r;
    r.tokens = 8;
    r.ids.assign(8, 1);
    r.weights.assign(8, 1.0f);
    x.of.push_back(r);
    x.drop(p);
  }
  return x;
}

const FaultRecord& record(const Call& c, uint32_t at, uint32_t by) {
  return *c.fault(at, by);
}

// Checks that each rank has posted the same fault, or none, to every rank.
void check_posted_everywhere(const Call& c) {
  for (uint32_t by = 0; by < c.shape.ranks; ++by) {
    for (uint32_t at = 0; at < c.shape.ranks; ++at) {
      CHECK_EQ(record(c, at, by).posted, record(c, by, by).posted);
      CHECK(std::memcmp(&record(c, at, by).fault, &record(c, by, by).fault, sizeof(Fault)) == 0);
    }
  }
}

// Runs one call of the group on the ranks `present`. The first wait that expires is one of rank `impatient`. Every
// present rank must leave its call without success, and all but `impatient` long before their own timeouts.
template <class P>
void run_faulty(AbstractGroup<P>& group, const std::vector<Problem>& problems, std::vector<uint32_t> present,
                uint32_t impatient) {
  std::vector<std::thread> threads;
  for (const uint32_t p : present) {
    group.rank(p).call.policy.timeout_ns = p == impatient ? kPatience : kForever;
    threads.emplace_back([&, p] { CHECK_EQ(group.rank(p).run(problems), 0u); });
  }
  const uint64_t start = cpu::monotonic_ns();
  for (std::thread& t : threads) t.join();
  const uint64_t took = cpu::monotonic_ns() - start;
  CHECK(took > kPatience && took < kForever / 2);
}

void check_fault(const FaultRecord& r, FaultKind kind, uint32_t rank, uint32_t awaited, uint32_t culprit) {
  const auto show = [](FaultKind kind, uint32_t rank, uint32_t awaited, uint32_t culprit) {
    return host::concat("kind ", static_cast<uint32_t>(kind), ", found by ", rank, ", awaited ", awaited, ", culprit ",
                        culprit);
  };
  CHECK_EQ(r.posted, FaultRecord::kFailed);
  CHECK_EQ(show(r.fault.kind, r.fault.rank, r.fault.awaited, r.fault.culprit), show(kind, rank, awaited, culprit));
  CHECK_EQ(r.fault.epoch, 1u);
}

// Rank 2 never enters the call. Whichever of the other two ranks notices this first names rank 2 in a record; the
// other one leaves because of this record.
void check_absent_rank() {
  const std::vector<Problem> problems{all_to_rank_1()};
  for (const uint32_t finder : {0u, 1u}) {
    AbstractGroup<CpuPlatform> group(three_ranks());
    run_faulty(group, problems, {0, 1}, finder);
    const Call& c = group.rank(finder).call;
    check_fault(record(c, finder, finder), FaultKind::kCallSignal, finder, 2, 2);
    CHECK_EQ(record(c, 1 - finder, 1 - finder).posted, 0u);
    check_posted_everywhere(c);

    // Rank 2 comes late. It sees the record and leaves at once.
    group.rank(2).call.policy.timeout_ns = kForever;
    CHECK_EQ(group.rank(2).run(problems), 0u);
    CHECK_EQ(record(c, 2, 2).posted, 0u);
  }
}

// Stops each thread that is about to store to one of certain words, until release() is called.
class Parking {
 public:
  void watch(const void* word) { words_.push_back(word); }
  void pass(const void* word) {
    if (std::find(words_.begin(), words_.end(), word) == words_.end()) return;
    std::unique_lock lock(mutex_);
    ++parked_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return released_; });
  }
  void await_parked(uint32_t n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return parked_ == n; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  std::vector<const void*> words_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t parked_ = 0;
  bool released_ = false;
};

struct ParkingPlatform : CpuPlatform {
  static inline Parking* parking = nullptr;
  template <class T, class... Scope>
  static void store_relaxed(T* p, T v, Scope... scope) {
    parking->pass(p);
    CpuPlatform::store_relaxed(p, v, scope...);
  }
  template <class T, class Scope>
  static void store_release(T* p, T v, Scope scope) {
    parking->pass(p);
    CpuPlatform::store_release(p, v, scope);
  }
};

// Rank 2 stops in the middle of the call: its processor has sent its packet to rank 0 but not to rank 1, and its OS
// actor stands still. Rank 1 waits for that packet, and rank 0 waits for rank 1, yet both must name rank 2.
void check_stopped_rank() {
  const std::vector<Problem> problems{all_to_rank_1()};
  for (const uint32_t finder : {0u, 1u}) {
    AbstractGroup<ParkingPlatform> group(three_ranks());
    Parking parking;
    ParkingPlatform::parking = &parking;
    group.rank(2).prepare(problems[0]);
    const Call& stopped = group.rank(2).call;
    parking.watch(stopped.packet_signal(1, 2, 0));
    parking.watch(&stopped.status(2)->heartbeat);
    group.rank(2).call.policy.timeout_ns = kForever;
    std::thread rank_2([&] { CHECK_EQ(group.rank(2).run(problems), 0u); });
    parking.await_parked(2);

    run_faulty(group, problems, {0, 1}, finder);
    const Call& c = group.rank(finder).call;
    if (finder == 0) {
      check_fault(record(c, 0, 0), FaultKind::kReturn, 0, 1, 2);
    } else {
      check_fault(record(c, 1, 1), FaultKind::kPacket, 1, 2, 2);
    }
    check_posted_everywhere(c);
    // Rank 2's processor then waits for tasks that will not come. The other ranks' record ends this wait, too.
    parking.release();
    rank_2.join();
  }
}

// A rank that moves is not to blame. Rank 2's OS actor makes progress slowly, and the other ranks wait as long as it
// does.
void check_slow_rank() {
  const std::vector<Problem> problems{all_to_rank_1()};
  AbstractGroup<CpuPlatform> group(three_ranks());
  for (uint32_t p = 0; p < 3; ++p) group.rank(p).call.policy.timeout_ns = kPatience;
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < 2; ++p) {
    threads.emplace_back([&, p] { CHECK_EQ(group.rank(p).run(problems), 1u); });
  }
  // These stores stand for an OS actor that achieves something every 100 ms, for two timeouts.
  Status* status = group.rank(2).call.memory.heap_layout.at<Status>(group.heap(2), HeapField::kStatus);
  for (uint64_t i = 1; i <= 30; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CpuPlatform::store_relaxed(&status->progress, i);
  }
  CHECK_EQ(group.rank(2).run(problems), 1u);
  for (std::thread& t : threads) t.join();
}

// The OS actor never runs, so only the processor can notice it.
void check_dead_os_actor() {
  AbstractGroup<CpuPlatform> group(three_ranks());
  const Problem x = all_to_rank_1();
  group.rank(1).prepare(x);
  Call& c = group.rank(1).call;
  c.policy.timeout_ns = 50 * kMs;
  const Task task = wait_task<CpuPlatform>(c, take_ticket<CpuPlatform>(c));
  CHECK(task.kind == TaskKind::kStop);
  check_fault(record(c, 1, 1), FaultKind::kLocal, 1, 1, 1);
  CHECK(record(c, 1, 1).fault.actor == Actor::kProcessor);
  check_posted_everywhere(c);
}

// Several threads find a fault at the same time. There must be one record, complete, and the same on all ranks.
void check_first_fault_only() {
  for (uint32_t round = 0; round < 50; ++round) {
    AbstractGroup<CpuPlatform> group(three_ranks());
    const Problem x = all_to_rank_1();
    group.rank(0).prepare(x);
    const Call& c = group.rank(0).call;
    std::vector<std::thread> finders;
    for (uint32_t i = 0; i < 4; ++i) {
      finders.emplace_back([&c, i] {
        post_fault<CpuPlatform>(c, {.kind = FaultKind::kPacket, .culprit = 0, .index = i, .seen = 100 + i});
      });
    }
    for (std::thread& t : finders) t.join();
    const Fault first = record(c, 0, 0).fault;
    CHECK_EQ(first.seen, 100u + first.index);
    check_posted_everywhere(c);
    post_fault<CpuPlatform>(c, {.kind = FaultKind::kLocal, .index = 9});
    CHECK(std::memcmp(&record(c, 0, 0).fault, &first, sizeof(Fault)) == 0);
    CHECK_EQ(CpuPlatform::load_relaxed(&c.control()->abort.value), 1u);
  }
}

// ---- peers that are not mapped ----------------------------------------------------------------------------

struct UnmappedPlatform : CpuPlatform {
  static constexpr bool kPeersMapped = false;
};
// UnmappedPlatform has no puts, because this test needs none, so it does not satisfy the concept. A Platform without
// a clock must not satisfy it either.
struct WithoutClock : CpuPlatform {
  static void now_ns();
};
static_assert(!RunsProtocol<UnmappedPlatform> && !RunsProtocol<WithoutClock> && RunsProtocol<CpuPlatform>);

// Rank 1 of three ranks that do not share memory, as on GPUs: it can address no heap but its own.
struct Unmapped {
  Unmapped() : limits(three_ranks()) {
    limits.staging = limits.rdma = 1;
    call.memory = make_call_memory(limits);
    heap = std::make_unique<Region>(call.memory.heap_layout.bytes);
    work = std::make_unique<Region>(work_bytes(limits));
    heaps = {nullptr, heap->base(), nullptr};
    call.epoch = 5;
    call.rank = 1;
    call.shape.ranks = 3;
    call.shape.return_mode = ReturnMode::kReduced;
    call.memory.heaps = heaps.data();
    call.memory.work = work->base();
  }
  Limits limits;
  std::unique_ptr<Region> heap, work;
  std::array<uint8_t*, 3> heaps;
  Call call;
};

void check_unmapped_peers() {
  Unmapped own;
  const Call& c = own.call;
  // What this rank knows of its peers: rank 0 has begun this call, rank 2 only the call before.
  *c.call_signal(1, 0) = Signal::make(5, 0);
  *c.heap<uint64_t>(1, HeapField::kCallSignal, 0, 2) = Signal::make(4, 0);
  c.status(1)->entered = 5;
  CHECK_EQ(entered_by<UnmappedPlatform>(c, 0), 5u);
  CHECK_EQ(entered_by<UnmappedPlatform>(c, 1), 5u);
  CHECK_EQ(entered_by<UnmappedPlatform>(c, 2), 4u);
  std::array<Status, 3> seen{};
  GroupLiveness<UnmappedPlatform> group(c, seen.data());
  group.sample();
  CHECK(!group.moved());
  CHECK_EQ(group.culprit(0), 2u);
  // Now all ranks have begun the call. This rank cannot know whether they move, so the culprit is the rank for which
  // it waits.
  *c.call_signal(1, 2) = Signal::make(5, 0);
  CHECK_EQ(group.culprit(0), 0u);
  CHECK_EQ(group.culprit(2), 2u);
  // A return to the own rank is signalled at once. A return to another rank is handed to the senders.
  signal_return<UnmappedPlatform>(c, 1, 0);
  CHECK_EQ(*c.return_signal(1, 1, 0), Signal::make(5, 0));
  signal_return<UnmappedPlatform>(c, 2, 0);
  CHECK_EQ(*c.returns_ready(2), Signal::make(5, 0));
  CHECK_EQ(*c.returns_ready(0), 0u);
  // An actor that finds a fault after another actor must not overwrite the first fault, and must not end the call
  // before the first fault is posted.
  c.control()->fault_claim.value = 1;
  post_fault<UnmappedPlatform>(c, {.kind = FaultKind::kLocal});
  CHECK_EQ(c.control()->abort.value, 0u);
  c.control()->fault_claim.value = 0;
  post_fault<UnmappedPlatform>(c, {.kind = FaultKind::kPacket, .awaited = 2, .culprit = 2});
  CHECK_EQ(c.control()->abort.value, 1u);
  CHECK_EQ(record(c, 1, 1).posted, FaultRecord::kFailed);
  CHECK_EQ(record(c, 1, 1).fault.epoch, 5u);
  // The memory behind the workspace has room for the rows that are put.
  CHECK(c.out_row(own.limits.max_tokens) <= c.memory.work + work_bytes(own.limits));
}

// Rank 1 computes something else than the others. Whoever finds this posts a fault and sends it to all ranks,
// together with its own configuration, which is needed to describe the disagreement. Every rank leaves the call,
// although no timeout is set.
template <class P>
void check_faults_by_puts(uint32_t senders, uint64_t seed) {
  Limits l = three_ranks();
  l.rdma = 1;
  Problem x = all_to_rank_1();
  x.return_mode = ReturnMode::kReduced;
  Problem of_rank_1 = x;
  of_rank_1.belief = 1;
  AbstractGroup<P> group(l, {.senders = senders});
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < 3; ++p) {
    group.rank(p).perturbation = seed + p;
    threads.emplace_back([&, p] { CHECK_EQ(group.rank(p).run({p == 1 ? of_rank_1 : x}), 0u); });
  }
  for (std::thread& t : threads) t.join();
  Call c = group.rank(0).call;
  std::array<uint8_t*, 3> heaps{group.heap(0), group.heap(1), group.heap(2)};
  c.memory.heaps = heaps.data();
  check_posted_everywhere(c);
  uint32_t posted = 0;
  for (uint32_t by = 0; by < 3; ++by) {
    if (record(c, by, by).posted == 0) continue;
    ++posted;
    CHECK(record(c, by, by).fault.kind == FaultKind::kDisagree);
    for (uint32_t at = 0; at < 3; ++at) CHECK_EQ(c.call_config(at, by)->hash, mix(1, by == 1 ? 1 : 0));
  }
  CHECK(posted != 0);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  check_wait();
  check_abort();
  check_absent_rank();
  check_stopped_rank();
  check_slow_rank();
  check_dead_os_actor();
  check_first_fault_only();
  check_unmapped_peers();
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    check_faults_by_puts<PutPlatform<CpuPlatform>>(static_cast<uint32_t>(1 + seed % 3), seed);
  }
  for (uint64_t seed = 1; seed <= 3; ++seed) check_faults_by_puts<PutPlatform<WarpPlatform<4>>>(2, seed);
}

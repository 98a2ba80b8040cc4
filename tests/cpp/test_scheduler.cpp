// The order in which the scheduler publishes ready tasks: each field of OrderPolicy by itself.
#include <vector>

#include "abstract_group.h"

namespace flashmoe::test {
namespace {

using P = cpu::CpuPlatform;
// The tasks in the order in which they are published, each as its kind, tile and block of columns.
using Order = std::vector<std::array<uint32_t, 3>>;
constexpr uint32_t kGemm0 = static_cast<uint32_t>(TaskKind::kGemm0), kGemm1 = static_cast<uint32_t>(TaskKind::kGemm1),
                   kStop = static_cast<uint32_t>(TaskKind::kStop);

Limits limits() {
  Limits l;
  l.ranks = 2;
  l.processors = 1;
  l.max_tokens = 32;
  l.hidden = l.intermediate = 3;
  l.experts = l.max_local_experts = l.top_k = l.return_slots = 4;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.tile_rows = 2;
  l.columns_per_task = each_product(1);
  return l;
}

// The scheduler of rank 0 by itself. The test pushes what formers and processors would push. Nobody takes a task.
class Bench {
 public:
  // gemm0_columns, gemm1_columns: at most 3.
  Bench(const OrderPolicy& order, uint32_t gemm0_columns, uint32_t gemm1_columns, uint32_t groups = 1)
      : group_(limits()), problem_(problem(order, gemm0_columns, gemm1_columns, groups)), call_(prepared()) {}

  void gemm0(uint32_t tile, uint32_t expert) { push(Ready::of_tile(TaskKind::kGemm0, {tile}, expert, 0)); }
  void gemm1(uint32_t tile, uint32_t expert, bool remote) {
    push(Ready::of_tile(TaskKind::kGemm1, {tile}, expert, remote));
  }
  // All experts are formed, into so many tiles.
  void formed(uint32_t tiles) { push(Ready::formed(call_.shape.local_experts, tiles)); }
  // Processors ask for `tasks` more tasks.
  void ask(uint32_t tasks) { call_.control()->queue_head.value += tasks; }

  // Returns what one step publishes.
  Order step() {
    scheduler_.look();
    scheduler_.step([] { return true; });
    Order order;
    for (; *call_.queue_slot(published_) != 0; ++published_) {
      const Task task = Task::unpack(*call_.queue_slot(published_));
      order.push_back({static_cast<uint32_t>(task.kind), task.tile().whole(), task.column});
    }
    return order;
  }

 private:
  static Problem problem(const OrderPolicy& order, uint32_t gemm0_columns, uint32_t gemm1_columns, uint32_t groups) {
    Problem x;
    x.epoch = 1;
    x.intermediate = gemm0_columns;
    x.hidden = gemm1_columns;
    x.experts = x.top_k = 4;
    x.groups = groups;
    x.place({0, 0, 0, 0}, 2);
    x.of.resize(2);
    x.of[0].order = order;
    return x;
  }
  const Call& prepared() {
    group_.rank(0).prepare(problem_);
    return group_.rank(0).call;
  }
  void push(Ready ready) { push_ready<P>(call_, true, ready); }

  AbstractGroup<P> group_;
  const Problem problem_;
  const Call& call_;
  std::vector<Source> sources_ = std::vector<Source>(2);
  Subscriber<P> subscriber_{call_, {sources_.data(), {nullptr, 0, 0}}};
  Scheduler<P>::Memory memory_;
  Scheduler<P> scheduler_{call_, subscriber_, memory_};
  uint64_t published_ = 0;
};

// The tasks of a band are published column by column.
void check_raster() {
  Bench bench({.raster = 2, .window = 100}, 3, 1);
  for (uint32_t tile = 0; tile < 3; ++tile) bench.gemm0(tile, 0);
  CHECK(bench.step() == (Order{{kGemm0, 0, 0},
                               {kGemm0, 1, 0},
                               {kGemm0, 0, 1},
                               {kGemm0, 1, 1},
                               {kGemm0, 0, 2},
                               {kGemm0, 1, 2},
                               {kGemm0, 2, 0},
                               {kGemm0, 2, 1},
                               {kGemm0, 2, 2}}));
}

// A band takes ready tiles expert by expert. If all tiles are known, and there are no more tiles than experts, it
// takes them in the order in which they became ready.
void check_windows() {
  for (const uint32_t tiles : {0u, 4u, 5u}) {  // 0: not known yet
    Bench bench({.raster = 2, .window = 100}, 1, 1);
    for (uint32_t tile = 0; tile < 4; ++tile) bench.gemm0(tile, tile % 2);
    if (tiles != 0) bench.formed(tiles);
    const Order by_expert = {{kGemm0, 0, 0}, {kGemm0, 2, 0}, {kGemm0, 1, 0}, {kGemm0, 3, 0}};
    const Order as_ready = {{kGemm0, 0, 0}, {kGemm0, 1, 0}, {kGemm0, 2, 0}, {kGemm0, 3, 0}};
    CHECK(bench.step() == (tiles == 4 ? as_ready : by_expert));
  }
}

// At most `window` tasks are published beyond those that are asked for. What becomes ready later may be published
// before what was ready and waited.
void check_window() {
  Bench bench({.window = 2}, 1, 1);
  for (uint32_t tile = 0; tile < 4; ++tile) bench.gemm0(tile, 0);
  CHECK(bench.step() == (Order{{kGemm0, 0, 0}, {kGemm0, 1, 0}}));
  CHECK(bench.step().empty());
  bench.gemm1(0, 0, false);
  CHECK(bench.step().empty());
  bench.ask(3);
  CHECK(bench.step() == (Order{{kGemm1, 0, 0}, {kGemm0, 2, 0}, {kGemm0, 3, 0}}));
}

// GEMM1 tasks go first; but while there are GEMM0 tasks, GEMM1 trails GEMM0 by gemm1_lag tasks.
void check_lag() {
  const Order expected[] = {
      {{kGemm1, 9, 0}, {kGemm1, 9, 1}, {kGemm0, 0, 0}, {kGemm0, 0, 1}, {kGemm0, 1, 0}, {kGemm0, 1, 1}},
      {{kGemm0, 0, 0}, {kGemm0, 0, 1}, {kGemm0, 1, 0}, {kGemm1, 9, 0}, {kGemm0, 1, 1}, {kGemm1, 9, 1}},
      {{kGemm0, 0, 0}, {kGemm0, 0, 1}, {kGemm0, 1, 0}, {kGemm0, 1, 1}, {kGemm1, 9, 0}, {kGemm1, 9, 1}}};
  const uint32_t lags[] = {0, 3, 0xffffffffu};
  for (uint32_t i = 0; i < 3; ++i) {
    Bench bench({.gemm1_lag = lags[i], .window = 100}, 2, 2);
    bench.gemm0(0, 0);
    bench.gemm0(1, 0);
    bench.gemm1(9, 0, false);
    CHECK(bench.step() == expected[i]);
  }
}

// When as many GEMM1 tasks are published as the first return group has, link_clusters stop words follow. The clusters
// that take no stop word go on; they get theirs behind the last task.
void check_early_stops() {
  Bench bench({.window = 100, .link_clusters = 2}, 1, 2, 2);
  bench.gemm1(0, 0, false);
  CHECK(bench.step() == (Order{{kGemm1, 0, 0}, {kGemm1, 0, 1}}));
  bench.formed(2);  // two tiles in all, so the first return group has two tasks
  CHECK(bench.step() == (Order{{kStop, 0, 0}, {kStop, 0, 0}}));
  bench.gemm1(1, 1, true);
  CHECK(bench.step() == (Order{{kGemm1, 1, 0}, {kGemm1, 1, 1}}));
}

// With two lists, tiles with rows of another rank go first. With one list, all tiles go in the order in which they
// became ready.
void check_lists() {
  for (const uint32_t lists : {1u, 2u}) {
    Bench bench({.raster = 32, .window = 100, .gemm1_lists = lists}, 1, 1);
    for (uint32_t tile = 0; tile < 4; ++tile) bench.gemm1(tile, 0, tile % 2 != 0);
    const Order as_ready = {{kGemm1, 0, 0}, {kGemm1, 1, 0}, {kGemm1, 2, 0}, {kGemm1, 3, 0}};
    const Order remote_first = {{kGemm1, 1, 0}, {kGemm1, 3, 0}, {kGemm1, 0, 0}, {kGemm1, 2, 0}};
    CHECK(bench.step() == (lists == 2 ? remote_first : as_ready));
  }
}

// The columns of a return group go before those of the next group, for all ready tiles: also for a tile that becomes
// ready later than others.
void check_groups() {
  Bench bench({.window = 3}, 1, 2, 2);
  bench.gemm1(0, 0, false);
  bench.gemm1(1, 1, false);
  CHECK(bench.step() == (Order{{kGemm1, 0, 0}, {kGemm1, 1, 0}, {kGemm1, 0, 1}}));
  bench.gemm1(2, 0, false);
  bench.ask(100);
  CHECK(bench.step() == (Order{{kGemm1, 1, 1}, {kGemm1, 2, 0}, {kGemm1, 2, 1}}));
}

// If both are ready, GEMM1 is chosen.
void check_choice() {
  CHECK(choose({}, {.product = {true, true}, .published = {}}) == TaskKind::kGemm1);
  CHECK(choose({}, {.product = {true, false}, .published = {}}) == TaskKind::kGemm0);
  CHECK(choose({}, {}) == TaskKind::kNone);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  check_raster();
  check_windows();
  check_window();
  check_lag();
  check_early_stops();
  check_lists();
  check_groups();
  check_choice();
}

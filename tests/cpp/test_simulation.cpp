// Simulated time: the same run every time, machines that are folded into one, and a call of two ranks whose time is added
// up by hand.
#include <string>

#include "check.h"
#include "flashmoe/protocol/machines.h"
#include "sim/simulation.h"

namespace flashmoe::sim {
namespace {

Time us(double t) {
  return static_cast<Time>(t * static_cast<double>(kMicrosecond));
}

// A machine on which nothing takes time but what a test says.
Machine instant() {
  Machine m;
  m.blocks = 132;
  m.memory = 1e18;
  for (auto& points : m.tasks.of) points = {{256, 0.0, 0.0}};
  return m;
}

// A machine with times of the order of a GPU's.
Machine usual() {
  Machine m = instant();
  m.blocks = 16;
  m.costs = {.meeting = us(0.04),
             .load = us(0.3),
             .store = us(0.3),
             .atomic = us(0.6),
             .peer_store = us(1.1),
             .network = us(5),
             .first_former = us(10),
             .first_os = us(6),
             .first_task = us(4)};
  m.links.nvlink = 350e9;
  m.links.nic = 50e9;
  m.gate = us(15);
  m.packets = us(9);
  m.memory = 2.6e12;
  m.sum_piece = us(2.7);
  m.sum_beside_tasks = us(26);
  m.fill = us(3);
  for (auto& points : m.tasks.of) points = {{16, 0.3, 0.5}, {256, 0.7, 2.0}};
  return m;
}

Setup setup(const Machine& machine, uint32_t machines, uint32_t gpus, uint32_t tokens) {
  Setup s;
  s.machine = machine;
  s.layer.hidden = 1024;
  s.layer.intermediate = 512;
  s.layer.experts = 32;
  s.layer.top_k = 4;
  s.tokens = tokens;
  s.machines = machines;
  s.gpus = gpus;
  return s;
}

void check_same(const Result& a, const Result& b) {
  CHECK_EQ(a.events, b.events);
  CHECK_EQ(a.tasks, b.tasks);
  CHECK_EQ(a.sent.nvlink, b.sent.nvlink);
  CHECK_EQ(a.sent.nic, b.sent.nic);
  CHECK_EQ(a.ends.size(), b.ends.size());
  for (size_t i = 0; i < a.ends.size(); ++i) CHECK_EQ(a.ends[i], b.ends[i]);
}

void test_deterministic() {
  for (const uint32_t machines : {1u, 2u}) {
    Setup s = setup(usual(), machines, 2, 1024);
    check_same(simulate(s), simulate(s));
    s.seed = 2;
    CHECK(simulate(s).call != simulate(setup(usual(), machines, 2, 1024)).call);
  }
}

// Where all machines choose alike, counted from themselves, the first one's ranks stand for those of all.
void test_folded() {
  for (const uint32_t machines : {2u, 4u, 8u}) {  // with 8, more ranks than experts: each has copies
    Setup s = setup(usual(), machines, 2, 256);
    s.layer.experts = 8;
    s.alike = true;
    const Result whole = simulate(s);
    s.folded = true;
    const Result folded = simulate(s);
    CHECK_EQ(folded.ends.size(), size_t{2});
    CHECK_EQ(whole.ends.size(), size_t{2 * machines});
    CHECK_EQ(whole.tasks, folded.tasks * machines);
    CHECK_EQ(whole.sent.nvlink, folded.sent.nvlink);
    CHECK_EQ(whole.sent.nic, folded.sent.nic);
    for (size_t r = 0; r < whole.ends.size(); ++r) CHECK_EQ(whole.ends[r], folded.ends[r % 2]);
  }
}

// Two ranks with an expert each that all tokens of both choose, on which only gate, packets, tasks and rows take time.
//
// A rank has 1024 tokens of 2 KiB, so that each expert has 8 tiles of 256 rows, 4 of them of the other rank. GEMM0 contracts
// over 16 stages, and has 4 columns of tasks (of 128, with a gate); GEMM1 over 8, and has 4 (of 256). All 64 tasks of a rank
// fit its 66 clusters, also without the 8 that send.
void test_two_ranks() {
  constexpr double kPackets = 10 + 5, kGemm0 = 16 * 1.0 + 4, kGemm1 = 8 * 1.0 + 4;  // gate, packets; stages, epilogue
  Machine m = instant();
  m.gate = us(10);
  m.packets = us(5);
  for (auto& points : m.tasks.of) points = {{256, 1.0, 4.0}};
  Setup s = setup(m, 1, 2, 1024);
  s.layer.experts = s.layer.top_k = 2;
  const Result free = simulate(s);
  CHECK_EQ(free.tasks, uint64_t{2 * 8 * (4 + 4)});
  CHECK_EQ(free.first_task, kPackets);
  CHECK_EQ(free.last_task, kPackets + kGemm0 + kGemm1);
  CHECK_EQ(free.call, free.last_task);

  // 1 MiB a microsecond: 1024 rows of 2 KiB take 2 us, and behind them the last tile of the other rank's rows is there. Its
  // results, half a MiB, leave within their epilogue. Entries of 16 bytes, signals and offsets take less than 0.1 us in all.
  s.machine.links.nvlink = double{1 << 20} * 1e6;
  const Result linked = simulate(s);
  const double late = linked.last_task - (kPackets + 2 + kGemm0 + kGemm1);
  std::printf("two ranks: %.3f us, of which words take %.3f\n", linked.last_task, late);
  CHECK_EQ(linked.first_task, kPackets);
  CHECK(late >= 0 && late < 0.1);
  CHECK(linked.call >= linked.last_task && linked.call - linked.last_task < 0.1);
  CHECK_EQ(linked.sent.nvlink >> 20, uint64_t{4});  // 2 MiB there and 2 MiB back, and the words
}

// Every token chooses every expert, so that every rank needs each row: M machines of G GPUs, an expert each. A rank's rows cross
// to each other machine once, and one sum comes back; there its relay passes on G - 1 copies, and as many sums come to it, as
// fp32. Within its machine rows and sums go as among mapped ranks.
void test_bytes_of_machines() {
  constexpr uint64_t kMachines = 4, kGpus = 2, kTokens = 64, kOthers = kMachines - 1, kWords = 2048;
  Setup s = setup(usual(), kMachines, kGpus, kTokens);
  s.layer.experts = s.layer.top_k = kMachines * kGpus;
  const uint64_t row = s.layer.hidden * 2, entries = kGpus * sizeof(Entry), counts = kGpus * sizeof(uint16_t);
  const uint64_t nic = kOthers * kTokens * (2 * row + entries + counts);
  const uint64_t rows_and_sums = kTokens * (kGpus - 1) * (2 * row + kOthers * (row + 2 * row));
  const uint64_t nvlink = rows_and_sums + kMachines * kTokens * (kGpus - 1) * sizeof(Entry);
  const Result r = simulate(s);
  // Words, offsets and what calls are believed to be come beside these.
  CHECK(r.sent.nic >= nic && r.sent.nic < nic + kWords);
  CHECK(r.sent.nvlink >= nvlink && r.sent.nvlink < nvlink + kWords);
  // Rows; sums, of four return groups (a row has as many columns of tasks); that the call has begun, to each rank.
  CHECK_EQ(r.sent.messages, kOthers * (1 + 4 + kGpus));
}

void test_refused() {
  Setup s = setup(usual(), 1, 3, 64);  // 32 experts on 3 GPUs
  bool refused = false;
  try {
    simulate(s);
  } catch (const std::exception& error) {
    refused = std::string(error.what()).find("machines x gpus") != std::string::npos;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace flashmoe::sim

int main() {
  flashmoe::sim::test_deterministic();
  flashmoe::sim::test_folded();
  flashmoe::sim::test_two_ranks();
  flashmoe::sim::test_bytes_of_machines();
  flashmoe::sim::test_refused();
  std::puts("ok");
  return 0;
}

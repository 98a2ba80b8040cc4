// Simulated time: every simulation of a call gives the same result, machines may be folded into one, and the time of
// a call of two ranks is what it should be when it is added up by hand.
#include <string>

#include "check.h"
#include "flashmoe/protocol/machines.h"
#include "sim/simulation.h"

namespace flashmoe::sim {
namespace {

Time us(double t) {
  return static_cast<Time>(t * static_cast<double>(kMicrosecond));
}

// A machine on which nothing takes time, unless a test sets this.
Machine instant() {
  Machine m;
  m.blocks = 132;
  m.memory = 1e18;
  for (auto& points : m.tasks.of) points = {{256, 0.0, 0.0}};
  return m;
}

// A machine whose times are about those of a GPU.
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

// If the tokens of all machines choose alike, counted from their own machine, the ranks of the first machine stand
// for all ranks.
void test_folded() {
  for (const uint32_t machines : {2u, 4u, 8u}) {  // with 8, there are more ranks than experts: experts have copies
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

// Two ranks with one expert each. All tokens of both ranks choose both experts. Only gate, packets, tasks and rows
// take time.
//
// A rank has 1024 tokens of 2 KiB, so each expert has 8 tiles of 256 rows, 4 of them with rows of the other rank. In
// GEMM0 a task has 16 stages, and a tile has 4 tasks (of 128 columns, because there is a gate). In GEMM1 a task has 8
// stages, and a tile has 4 tasks (of 256 columns). So each product has 32 tasks on a rank. Its 66 clusters can run
// them at the same time, even without the 8 clusters that send.
void test_two_ranks() {
  constexpr double kPackets = 10 + 5, kGemm0 = 16 * 1.0 + 4, kGemm1 = 8 * 1.0 + 4;  // gate + packets; stages + epilogue
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

  // The link passes 1 MiB a microsecond. So 1024 rows of 2 KiB take 2 us; then the last tile of the other rank's rows
  // can begin. The results of this tile, half a MiB, leave while the epilogue lasts. Entries (of 12 bytes), signals
  // and offsets take less than 0.1 us together.
  s.machine.links.nvlink = double{1 << 20} * 1e6;
  const Result linked = simulate(s);
  const double late = linked.last_task - (kPackets + 2 + kGemm0 + kGemm1);
  std::printf("two ranks: %.3f us, of which words take %.3f\n", linked.last_task, late);
  CHECK_EQ(linked.first_task, kPackets);
  CHECK(late >= 0 && late < 0.1);
  CHECK(linked.call >= linked.last_task && linked.call - linked.last_task < 0.1);
  CHECK_EQ(linked.sent.nvlink >> 20, uint64_t{4});  // 2 MiB of rows there, 2 MiB back; signals and entries are far less
}

// M machines of G GPUs, with one expert on each rank. Every token chooses every expert, so every rank needs each row.
// A rank's row crosses to each other machine once, and one sum comes back. The relay there passes on G - 1 copies of
// the row, and gets G - 1 sums in fp32. Within its own machine, the rank's rows and sums go as among mapped ranks.
void test_bytes_of_machines() {
  constexpr uint64_t kMachines = 4, kGpus = 2, kTokens = 64, kOthers = kMachines - 1, kWords = 2048;
  Setup s = setup(usual(), kMachines, kGpus, kTokens);
  s.layer.experts = s.layer.top_k = kMachines * kGpus;
  const uint64_t row = s.layer.hidden * 2, entries = kGpus * sizeof(Entry), counts = kGpus * sizeof(uint16_t);
  const uint64_t nic = kOthers * kTokens * (2 * row + entries + counts);
  const uint64_t rows_and_sums = kTokens * (kGpus - 1) * (2 * row + kOthers * (row + 2 * row));
  const uint64_t nvlink = rows_and_sums + kMachines * kTokens * (kGpus - 1) * sizeof(Entry);
  const Result r = simulate(s);
  // Signals, offsets and the configurations of calls come in addition.
  CHECK(r.sent.nic >= nic && r.sent.nic < nic + kWords);
  CHECK(r.sent.nvlink >= nvlink && r.sent.nvlink < nvlink + kWords);
  // Messages from one rank to another machine: 1 with rows; 4 with sums, one for each return group (a row has four
  // blocks of columns); and one to each rank of that machine, which says that the call has begun.
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

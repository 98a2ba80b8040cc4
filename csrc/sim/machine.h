// The hardware as it was measured: what a GPU's operations cost, and what its links carry. Every figure is an input; where each
// comes from stands beside it in python/flashmoe/simulation/inputs.py.
#pragma once

#include <array>
#include <vector>

#include "cuda/arch.h"
#include "flashmoe/spec/program.h"
#include "sim/world.h"

namespace flashmoe::sim {

// Whose GPUs were measured.
inline constexpr const cuda::Arch& kArch = cuda::kHopper;
inline constexpr uint32_t kWarps = kArch.fused.threads / 32;  // of a thread block

// Times of a GPU's words and instructions.
struct Costs {
  Time meeting = 0;     // instructions of a warp between two of its collectives
  Time load = 0;        // of a word from the L2
  Time store = 0;       // until a word stored there can be loaded
  Time atomic = 0;      // a fetch-add's answer
  Time peer_store = 0;  // until a word stored to a GPU of the same machine can be loaded there
  Time network = 0;     // until a message is at a GPU of another machine, beside the time that its bytes take
  // Code that runs for the first time in a call, which comes from memory: a former's, the OS actor's, and a clerk's with
  // what a first task needs besides.
  Time first_former = 0, first_os = 0, first_task = 0;
};

// Links. Each GPU has one to the switch of its machine, and a network interface.
struct LinkRates {
  double nvlink = 0, nic = 0;  // bytes a second, each way; 0: no bytes take time
};

// A task's products and epilogue, by the rows of a tile.
struct TaskTimes {
  struct Point {
    uint32_t rows;
    double stage_us;     // of a k-block of 64 elements
    double epilogue_us;  // from accumulators to memory
  };
  std::array<std::vector<Point>, kProducts> of;  // ascending rows

  Point at(uint32_t product, uint32_t rows) const;
};

struct Machine {
  Costs costs;
  LinkRates links;
  TaskTimes tasks;
  uint32_t blocks = 0;                       // thread blocks of a GPU
  Time gate = 0, packets = 0;                // of a token block's gate; from there to its packets
  double memory = 0;                         // bytes a second that sums read and write, all warps together
  Time sum_piece = 0, sum_beside_tasks = 0;  // of a piece that one warp sums, at least; while its block computes
  Time fill = 0;    // from a task's rows being looked up to its first product, if nothing was loaded ahead
  Time launch = 0;  // of the kernel, and of its end
};

}  // namespace flashmoe::sim

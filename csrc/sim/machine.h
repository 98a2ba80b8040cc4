// The hardware as it was measured: what a GPU's operations cost, and what its links carry. Every figure is an input.
// python/flashmoe/simulation/inputs.py names the source of each.
#pragma once

#include <array>
#include <vector>

#include "cuda/arch.h"
#include "flashmoe/spec/program.h"
#include "sim/world.h"

namespace flashmoe::sim {

// The architecture whose GPUs were measured.
inline constexpr const cuda::Arch& kArch = cuda::kHopper;
inline constexpr uint32_t kWarps = kArch.fused.threads / 32;  // of a thread block

// Times of a GPU's memory operations and instructions.
struct Costs {
  Time meeting = 0;     // of a warp's instructions between two of its collectives
  Time load = 0;        // load of a word from the L2
  Time store = 0;       // until a word that was stored in the L2 can be loaded
  Time atomic = 0;      // until a fetch-add's answer is there
  Time peer_store = 0;  // until a word stored to a GPU of the same machine can be loaded there
  Time network = 0;     // until a message is at a GPU of another machine, in addition to the time of its bytes
  // What code costs in addition when it first runs in a call, because it has to be loaded from memory: the code of a
  // former, of the OS actor, and of a clerk together with everything else that a first task needs.
  Time first_former = 0, first_os = 0, first_task = 0;
};

// Each GPU has a link to the switch of its machine, and a network interface.
struct LinkRates {
  double nvlink = 0, nic = 0;  // bytes a second, each way; 0: bytes take no time
};

// The times of a task's products and epilogue, by the number of rows of its tile.
struct TaskTimes {
  struct Point {
    uint32_t rows;
    double stage_us;     // of a stage, which has 64 elements of each row
    double epilogue_us;  // of the way from accumulators to memory
  };
  std::array<std::vector<Point>, kProducts> of;  // ascending rows

  Point at(uint32_t product, uint32_t rows) const;
};

struct Machine {
  Costs costs;
  LinkRates links;
  TaskTimes tasks;
  uint32_t blocks = 0;         // thread blocks of a GPU
  Time gate = 0, packets = 0;  // of a token block: its gate; from the gate's end to the block's packets
  double memory = 0;           // bytes a second that all warps' sums together read and write
  // sum_piece: the least time of a piece that one warp sums. sum_beside_tasks: the same for a warp whose block
  // computes tasks meanwhile.
  Time sum_piece = 0, sum_beside_tasks = 0;
  // From the look-up of a task's rows to its first product, if nothing was loaded ahead.
  Time fill = 0;
  Time launch = 0;  // of the kernel's launch and its end
};

}  // namespace flashmoe::sim

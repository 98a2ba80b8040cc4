// A whole simulated call: a layer on machines of GPUs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashmoe/spec/layer.h"
#include "sim/links.h"
#include "sim/machine.h"

namespace flashmoe::sim {

struct Setup {
  Machine machine;
  LayerSpec layer;                  // its return mode is not read: the engine's own choice is taken
  uint32_t tokens = 0;              // of each rank
  uint32_t machines = 1, gpus = 1;  // gpus: of a machine
  // Simulates the ranks of the first machine alone, the others being like it (Group).
  bool folded = false;
  // Every machine's tokens choose as the first one's, counted from themselves; else all choose for themselves.
  bool alike = false;
  uint64_t seed = 1;  // of the choices, which are even
};

struct Result {
  // In microseconds, of the slowest rank: from the call's begin to its end, to the first task's begin and the last one's end.
  double call = 0, first_task = 0, last_task = 0;
  double busy = 0;  // mean over ranks of the clusters' mean time in tasks
  uint64_t tasks = 0, events = 0;
  Links::Bytes sent;         // mean of a rank
  std::vector<double> ends;  // of each simulated rank
};

// Throws host::Error if it is no call that the kernel computes in the simulated way.
Result simulate(const Setup& setup);

}  // namespace flashmoe::sim

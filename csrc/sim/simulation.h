// Simulates a whole call: a layer on machines of GPUs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashmoe/protocol/order.h"
#include "flashmoe/spec/layer.h"
#include "sim/links.h"
#include "sim/machine.h"
#include "sim/spans.h"

namespace flashmoe::sim {

struct Setup {
  Machine machine;
  LayerSpec layer;                              // its return mode is not read
  uint32_t tokens = 0;                          // tokens of each rank
  uint32_t machines = 1, gpus = 1;              // gpus: GPUs of a machine
  std::optional<ReturnMode> return_mode;        // none: the engine's own choice; several machines have kReduced alone
  OrderPolicy order = OrderPolicy::built_in();  // what is asked for
  // Simulates only the ranks of the first machine; the other machines are like it (Group).
  bool folded = false;
  // The tokens of every machine choose as those of the first one, counted from their own machine. If false, all tokens
  // choose for themselves.
  bool alike = false;
  uint64_t seed = 1;   // seed of the choices, which are even
  bool spans = false;  // keeps when clusters do what
};

struct Result {
  // In microseconds, for the slowest rank, from the call's begin: to its end, to the begin of the first task, and to
  // the end of the last task.
  double call = 0, first_task = 0, last_task = 0;
  double busy = 0;  // mean over ranks of the mean time that a cluster spends in tasks
  uint64_t tasks = 0, events = 0;
  Links::Bytes sent;         // mean over ranks
  std::vector<double> ends;  // end of each simulated rank
  // What the clusters of each simulated rank do when, if Setup::spans.
  std::vector<std::vector<Spans::Span>> spans;
};

// Throws host::Error if this simulation does not cover how the kernel computes the call.
Result simulate(const Setup& setup);

}  // namespace flashmoe::sim

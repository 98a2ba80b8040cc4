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
  LayerSpec layer;                              // its return mode is not read, but return_mode below
  uint32_t tokens = 0;                          // tokens of each rank
  uint32_t machines = 1, gpus = 1;              // gpus: GPUs of a machine
  std::optional<ReturnMode> return_mode;        // none: the CUDA engine's choice; on several machines always kReduced
  OrderPolicy order = OrderPolicy::built_in();  // as a user asks for it
  // Whether only the ranks of the first machine are simulated, as if all machines did the same (Group).
  bool folded = false;
  // Whether the tokens of every machine choose as those of the first machine, counted from their own machine. If not,
  // the tokens of each rank choose independently.
  bool alike = false;
  uint64_t seed = 1;   // seed of the choices; all experts are equally likely
  bool spans = false;  // whether Result::spans is wanted
};

struct Result {
  // Microseconds from the begin of the call, on the rank where it takes longest: to the end of the call, to the begin
  // of the first task, and to the end of the last task.
  double call = 0, first_task = 0, last_task = 0;
  double busy = 0;  // microseconds that a cluster spends in tasks: mean over all clusters
  uint64_t tasks = 0, events = 0;
  Links::Bytes sent;         // by a rank: mean over ranks
  std::vector<double> ends;  // microseconds to the end of each simulated rank
  // Of each simulated rank: what its clusters do, and when. Empty unless Setup::spans is set.
  std::vector<std::vector<Spans::Span>> spans;
};

// Throws host::Error if the setup is not valid, or if the simulation cannot say how the kernel would compute this
// call.
Result simulate(const Setup& setup);

}  // namespace flashmoe::sim

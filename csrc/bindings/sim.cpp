// The functions of the simulation (csrc/sim) that Python calls.
#include <tvm/ffi/function.h>

#include "bindings/codec.h"
#include "bindings/registry.h"
#include "sim/simulation.h"

namespace flashmoe::sim {
namespace {

// Reads a field that is in microseconds, and converts it to the unit of the simulated clock.
Time time_of(Fields& fields, const char* name) {
  return static_cast<Time>(fields.take<double>(name) * static_cast<double>(kMicrosecond));
}

int64_t nanoseconds(Time time) {
  return static_cast<int64_t>(time / kNanosecond);
}

Machine machine_of(Map map, const ffi::Array<ffi::Array<double>>& tasks) {
  Fields f("machine", std::move(map));
  Machine m;
  m.costs = {.meeting = time_of(f, "meeting_us"),
             .load = time_of(f, "load_us"),
             .store = time_of(f, "store_us"),
             .atomic = time_of(f, "atomic_us"),
             .peer_store = time_of(f, "peer_store_us"),
             .network = time_of(f, "network_us"),
             .first_former = time_of(f, "first_former_us"),
             .first_os = time_of(f, "first_os_us"),
             .first_task = time_of(f, "first_task_us")};
  m.links.nvlink = f.take<double>("nvlink_gb_s") * 1e9;
  m.links.nic = f.take<double>("nic_gb_s") * 1e9;
  m.blocks = f.take<uint32_t>("blocks");
  m.gate = time_of(f, "gate_us");
  m.packets = time_of(f, "packets_us");
  m.memory = f.take<double>("memory_gb_s") * 1e9;
  m.sum_piece = time_of(f, "sum_piece_us");
  m.sum_beside_tasks = time_of(f, "sum_beside_tasks_us");
  m.fill = time_of(f, "fill_us");
  m.launch = time_of(f, "launch_us");
  f.done();
  for (const ffi::Array<double>& row : tasks) {  // product, rows of a tile, microseconds of a stage, of an epilogue
    m.tasks.of[static_cast<size_t>(row[0])].push_back({static_cast<uint32_t>(row[1]), row[2], row[3]});
  }
  return m;
}

Map simulated(Map call, Map order, Map machine, ffi::Array<ffi::Array<double>> tasks) {
  return guarded([&] {
    Fields f("call", std::move(call));
    Setup s;
    f("hidden", s.layer.hidden);
    f("intermediate", s.layer.intermediate);
    f("experts", s.layer.experts);
    f("top_k", s.layer.top_k);
    f("activation", s.layer.activation);
    f("tokens", s.tokens);
    f("machines", s.machines);
    f("gpus", s.gpus);
    f("seed", s.seed);
    ReturnMode mode;
    if (f.if_given("return_mode", mode)) s.return_mode = mode;
    s.alike = f.take<uint32_t>("alike") != 0;
    s.folded = f.take<uint32_t>("folded") != 0;
    s.spans = f.take<uint32_t>("spans") != 0;
    f.done();
    s.order = order_of(std::move(order));
    s.machine = machine_of(std::move(machine), tasks);
    const Result r = simulate(s);
    ffi::Array<ffi::Array<int64_t>> spans;
    for (size_t rank = 0; rank < r.spans.size(); ++rank) {
      for (const Spans::Span& each : r.spans[rank]) {
        spans.push_back({static_cast<int64_t>(rank), static_cast<int64_t>(each.cluster),
                         static_cast<int64_t>(each.phase), nanoseconds(each.begin), nanoseconds(each.end)});
      }
    }
    ffi::Array<double> ends;
    for (const double end : r.ends) ends.push_back(end);
    return Map{{"call_us", r.call},
               {"first_task_us", r.first_task},
               {"last_task_us", r.last_task},
               {"busy_us", r.busy},
               {"tasks", static_cast<int64_t>(r.tasks)},
               {"events", static_cast<int64_t>(r.events)},
               {"nvlink_bytes", static_cast<int64_t>(r.sent.nvlink)},
               {"nic_bytes", static_cast<int64_t>(r.sent.nic)},
               {"nic_messages", static_cast<int64_t>(r.sent.messages)},
               {"ends_us", ends},
               {"spans", spans}};
  });
}

}  // namespace
}  // namespace flashmoe::sim

TVM_FFI_DLL_EXPORT_TYPED_FUNC(simulate, flashmoe::sim::simulated)

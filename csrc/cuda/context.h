// A rank on one GPU: its heap, its workspace, the layers that were added, and its calls.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/arch.h"
#include "cuda/clock.h"
#include "cuda/device/device.h"
#include "cuda/layer.h"
#include "cuda/limits.h"
#include "cuda/machines.h"
#include "cuda/plan.h"
#include "cuda/policy.h"
#include "cuda/side_copies.h"
#include "cuda/transport/group.h"
#include "cuda/transport/registration.h"

namespace flashmoe::cuda {

class Context {
 public:
  // limits.processors: number of thread blocks; 0: one on every multiprocessor. ordinal: see Device. The context
  // chooses the fields of `order` that are OrderPolicy::kBuiltIn. With several ranks, joins the group. machines: the
  // machine of each rank, the same numbers from which `limits` was made (MachineTables::set); empty: all ranks are on
  // one machine.
  Context(int ordinal, const Membership& who, const Limits& limits, const OrderPolicy& order, uint64_t timeout_ns,
          const std::vector<uint32_t>& machines = {});
  // Waits for the device, because a call may still run.
  ~Context();

  // Encodes the layer's tensor maps. Loads its kernels and uploads its placement if they are new. Returns the layer's
  // number. `stream` is where the layer's calls will go: while it is being captured, nothing can be loaded or uploaded.
  int64_t add_layer(const Layer& layer, DriverStream stream);
  void remove_layer(int64_t layer);

  // Launches the kernel; does nothing else to the stream, and does not wait. Calls must follow one another on the
  // device: use one stream, or streams that wait for each other. Throws the error of an earlier call of this context,
  // if it had one.
  void call(int64_t layer, const TokenSpec& tokens, DriverStream stream);
  // The same for a backward pass of at least one token.
  void backward(int64_t layer, const TokenSpec& tokens, const GradientSpec& gradients, DriverStream stream);

  // kept_routing: where in the kept memory a call of a Pass::kForward layer keeps the routing; the field `bytes` is the
  // size of that memory. pass_bytes: how many bytes a call of a Pass::kBackward layer needs in addition. `room` and
  // `rows` only matter among several ranks.
  RoutingLayout kept_routing(int64_t layer, uint32_t tokens, const gpu::KeptRoom& room);
  uint64_t pass_bytes(int64_t layer, uint32_t tokens, const KeptRows& rows);

  // For a layer of Pass::kForward, among several ranks. call_bytes: bytes of the memory in which a call leaves its rows
  // (refused while `stream` is being captured). expected_room: the room that is expected to suit the next call; for the
  // first call it is empty.
  uint64_t call_bytes(int64_t layer, DriverStream stream);
  gpu::KeptRoom expected_room(int64_t layer);
  // Used after a call that has left its rows in `memory`. count_rows launches the kernel that counts the rows.
  // move_rows launches the kernel that moves the rows to `kept`, which is memory of kept_routing for this room. The
  // kernel moves nothing if the rows need more room. It never moves the routing: the caller sees to it that the routing
  // is in `kept` (TokenSpec::routing).
  void count_rows(int64_t layer, uint64_t memory, DriverStream stream);
  void move_rows(int64_t layer, uint64_t memory, uint64_t kept, const gpu::KeptRoom& room, DriverStream stream);
  // Waits until the rows are counted, but not until they are moved. Throws the call's error, if it had one. The room in
  // the result is `room` if rows that were moved there should stay. Otherwise it is the room that they need, and the
  // caller moves them to memory of that room.
  KeptRows read_counts(int64_t layer, const gpu::KeptRoom& room);

  // If heaps are mapped, changes this rank's progress word, so that other ranks' waits for this rank's call do not
  // expire. May be called from any thread.
  void beat();

  // Which kernels add_layer() will need for such a layer.
  KernelsOfLayer kernels_of(const LayerSpec& spec, Pass pass) const;

  // Called instead of a call that this rank cannot begin, on the call's stream. Tells the group, and the other ranks
  // end their calls (see protocol/refusal.h). Waits for this rank's earlier calls. Does nothing if a rank cannot refuse
  // (may_refuse), if the context has failed, or while `stream` is being captured, since then no call is made. Throws if
  // an earlier call was refused and not all ranks have left that call in time.
  void refuse(const std::string& reason, DriverStream stream);

  // Waits for the device, then throws the error of a call, if a call had one. An error for a row (RowNote) is thrown
  // once. Refused while `stream` is being captured.
  void synchronize(DriverStream stream);

  // For the last call, once it is over: [tokens, top_k] chosen experts (where there is none, Choice::recorded says why)
  // and weights.
  void read_routing(uint32_t tokens, uint32_t top_k, int32_t* ids, float* weights) const;
  // For the last call, once it is over, if it was this layer's: adds to rows[p * El + l] the number of rows that rank
  // p's tokens have with local expert l.
  RowsSent read_received(int64_t layer, int32_t* rows);
  // For the last call, if its layer is traced: reads trace_bytes() bytes, kTraceBytesPerBlock per thread block.
  void read_trace(uint8_t* to) const;
  // For a layer that is traced. Waits for the device.
  ClockReading read_clock(int64_t layer, DriverStream stream);
  uint64_t trace_bytes() const { return uint64_t{processors()} * gpu::kTraceBytesPerBlock; }

  int device() const { return device_.ordinal(); }
  const Arch& arch() const { return common_.arch; }
  uint32_t processors() const { return common_.limits.processors; }
  uint64_t heap_bytes() const { return cuda_heap_bytes(common_.limits); }
  uint64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  void take_memory(const Membership& who);
  const Kernels& kernels(const std::string& cubin, KernelSet which, DriverStream stream);
  const Placement& placement(const Layer& layer, DriverStream stream);
  Plan& plan_of(int64_t layer) const;
  Plan& plan_for(int64_t layer, const TokenSpec& tokens);
  void launch(Plan& plan, DriverStream stream);
  gpu::CountedRows counted_rows(const Plan& plan, uint64_t memory) const;
  void check_health();
  std::optional<Error> take_noted();
  std::optional<Error> take_refusal();
  void await_peers(DriverStream stream);
  [[noreturn]] void throw_fault(const HostFault& record);
  HostFault read_fault(const Fault& fault);
  Call call_on_host() const;
  uint64_t progress_of_all(const Call& c);

  std::mutex mutex_;  // calls come from any thread
  const Device device_;
  Common common_;
  DeviceMemory workspace_, heap_table_, trace_;
  std::unique_ptr<host::Group> group_;
  SideCopies copies_;
  std::optional<DeviceMachines> machines_;      // if ranks are on several machines
  const Nvshmem* puts_ = nullptr;               // not null if peers are reached by puts alone
  std::unique_ptr<Registration> registration_;  // registers the workspace, from which puts read
  MappedPage fault_page_, counts_page_;
  Event counted_;  // recorded behind the kernel that writes counts_page_
  bool broken_ = false;
  uint64_t refused_ = 0;  // epoch of a call that this rank has refused, until all ranks have left it; else 0
  uint64_t told_of_ = 0;  // epoch of the last call that, as the host knows, another rank has refused
  std::unordered_map<std::string, std::unique_ptr<Kernels>> kernels_;
  // The key: the holders, and whether there is a shared expert. The map never shrinks, because captured graphs
  // have pointers to the tables.
  std::map<std::pair<host::Holders, bool>, Placement> placements_;
  std::unordered_map<int64_t, std::unique_ptr<Plan>> plans_;
  int64_t last_plan_ = 0;  // number of the layer that was added last
  uint64_t calls_ = 0;     // launched or refused: the same number on all ranks of a group
};

}  // namespace flashmoe::cuda

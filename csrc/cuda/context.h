// A rank on one GPU: its heap, its workspace, the layers it has been told of, and its calls.
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
  // limits.processors: thread blocks, 0 for one on every multiprocessor. ordinal: see Device. Fields of `order` that
  // are 0 are left to the context. With several ranks, joins the group. machines: of each rank, by which the limits are made
  // (MachineTables::set); empty: all are on one.
  Context(int ordinal, const Membership& who, const Limits& limits, const OrderPolicy& order, uint64_t timeout_ns,
          const std::vector<uint32_t>& machines = {});
  // Waits for the device: a call may still be under way.
  ~Context();

  // Encodes the layer's tensor maps, loads its kernels and uploads its placement if they are new; returns its number.
  // `stream` is where its calls will go: while it is being captured, nothing can be loaded or uploaded.
  int64_t add_layer(const Layer& layer, DriverStream stream);
  void remove_layer(int64_t layer);

  // Launches the kernel; does nothing else to the stream, and does not wait. Calls must follow one another on the
  // device: one stream, or streams that wait for each other. Throws what an earlier call of this context ran into.
  void call(int64_t layer, const TokenSpec& tokens, DriverStream stream);
  // The same of a backward pass, of at least one token.
  void backward(int64_t layer, const TokenSpec& tokens, const GradientSpec& gradients, DriverStream stream);

  // Bytes that a call of so many tokens keeps, of a layer of Pass::kForward; and that a call of Pass::kBackward needs. room,
  // rows: among several ranks.
  RoutingLayout kept_routing(int64_t layer, uint32_t tokens, const gpu::KeptRoom& room);
  uint64_t pass_bytes(int64_t layer, uint32_t tokens, const KeptRows& rows);

  // Of a layer of Pass::kForward, among several ranks. Bytes of memory where its calls have their rows (refused while
  // `stream` is being captured); and the room that is expected to suit the next call: none for the first.
  uint64_t call_bytes(int64_t layer, DriverStream stream);
  gpu::KeptRoom expected_room(int64_t layer);
  // Behind a call, which has left its rows in `memory`: launches what counts them; and what moves them to `kept`, memory of
  // kept_routing for this room, but for the routing, which is the caller's, or does nothing if they need more.
  void count_rows(int64_t layer, uint64_t memory, DriverStream stream);
  void move_rows(int64_t layer, uint64_t memory, uint64_t kept, const gpu::KeptRoom& room, DriverStream stream);
  // Waits until they are counted, not moved, and throws what the call ran into. The room is this one, if they have been moved
  // there and should stay; else what they need, to which they are to be moved.
  KeptRows read_counts(int64_t layer, const gpu::KeptRoom& room);

  // Of a group whose heaps are mapped: other ranks wait half a timeout more for this one's call. From any thread.
  void beat();

  // Which kernels add_layer() will need of such a layer.
  KernelsOfLayer kernels_of(const LayerSpec& spec, Pass pass) const;

  // In place of a call that this rank cannot begin, on that stream: tells the group, whose other ranks end theirs (see
  // protocol/refusal.h). Waits for its earlier calls. Does nothing where a rank cannot refuse (may_refuse), or the context has
  // failed, or while `stream` is being captured: then no call is made. Throws if an earlier call was refused that not all ranks have left in time.
  void refuse(const std::string& reason, DriverStream stream);

  // Waits for the device, then throws what a call ran into, if one did; a row that is an error (RowNote) once. Refused while `stream` is being captured.
  void synchronize(DriverStream stream);

  // Of the last call, once it is over: [tokens, top_k] chosen experts (or as Choice::recorded) and weights.
  void read_routing(uint32_t tokens, uint32_t top_k, int32_t* ids, float* weights) const;
  // Of the last call, once it is over, if it was this layer's: adds to rows[p * El + l] the rows that rank p's tokens have
  // with local expert l.
  RowsSent read_received(int64_t layer, int32_t* rows);
  // Of the last call, if its layer is traced: trace_bytes() bytes, kTraceBytesPerBlock per thread block.
  void read_trace(uint8_t* to) const;
  // Of a layer that is traced; waits for the device.
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
  std::optional<DeviceMachines> machines_;      // where ranks are on several
  const Nvshmem* puts_ = nullptr;               // not null where peers are reached by puts alone
  std::unique_ptr<Registration> registration_;  // of the workspace, which puts then read
  MappedPage fault_page_, counts_page_;
  Event counted_;  // what is told in counts_page_ is there
  bool broken_ = false;
  uint64_t refused_ = 0;  // epoch of a call that this rank has refused, as long as others may not have left it; else 0
  uint64_t told_of_ = 0;  // the last call of which the host knows that another rank has refused it
  std::unordered_map<std::string, std::unique_ptr<Kernels>> kernels_;
  // By holders, and whether there is a shared expert. Never shrinks: captured graphs have pointers to the tables.
  std::map<std::pair<host::Holders, bool>, Placement> placements_;
  std::unordered_map<int64_t, std::unique_ptr<Plan>> plans_;
  int64_t last_plan_ = 0;  // number
  uint64_t calls_ = 0;     // launched; all ranks of a group launch the same
};

}  // namespace flashmoe::cuda

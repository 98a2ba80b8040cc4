// A rank of a group on the CPU engine: its heap, its workspace, its threads, and its calls.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/backward_engine.h"
#include "cpu/weight_gradients.h"
#include "flashmoe/actors/os.h"
#include "flashmoe/protocol/refusal.h"
#include "host/group.h"
#include "host/machines.h"
#include "host/placement.h"

namespace flashmoe::cpu {

// What a call adds to its layer.
struct CallOptions {
  uint32_t tokens = 0;
  host::Holders placement;  // of each of E experts
  uint32_t groups = 1;      // return groups, as far as GEMM1 has columns for them
  OrderPolicy order;
  bool record_events = false;
  uint64_t perturbation = 0;  // seed of schedule perturbation, 0: none
  Epoch forward = 0;          // of a backward pass: the call whose gradients it computes
  bool redispatch = false;    // of a backward pass: x is dispatched again
  bool strict = false;        // a row for which no choice can be made is an error
};

// What a call did on this rank. Times are sums over processors.
struct CallReport {
  uint64_t wall_ns = 0;
  uint64_t ns[kPhases] = {};
  uint64_t count[kPhases] = {};
  uint64_t tiles = 0, tile_rows = 0;
  uint64_t rows_sent = 0, entries_sent = 0, return_rows_sent = 0;
  uint64_t dropped = 0, bad_rows = 0;
  std::vector<Event> events;
};

// Where a call leaves the chosen experts (-1: none) and their weights, [T, K] each, or [T, K slices] of their slices.
// Null: nowhere.
struct RoutingOut {
  int32_t* ids = nullptr;
  float* weights = nullptr;
};

class Context {
 public:
  // The group's heaps have member_heap_bytes(limits) each. limits are the same on every rank but for the part that sizes the workspace, see Limits, and as MachineTables::set()
  // makes them.
  // machines: the machine of each rank; empty: all are on one.
  Context(std::unique_ptr<host::Group> group, uint32_t rank, const Limits& limits, uint64_t timeout_ns,
          const std::vector<uint32_t>& machines = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Runs the layer on this rank; every rank of the group must call. Blocks until this rank's output is complete. After
  // a bad row (RowNote) that is an error it throws that, and where another rank refuses the call what that rank says: the
  // next call is as any other. After
  // a fault it throws the fault, or what check_interrupt threw, and from then on that the context is broken. Of several
  // threads one calls at a time; what check_interrupt throws while a thread waits for the others' calls leaves them alone. A
  // call from within a call, as a handler of signals may make it, is an Error.
  CallReport call(const Layer& layer, const CallOptions& options, const RoutingOut& routing = {});

  // The gradients of a call from what it has kept; every rank of the group must call, for the same call. What a group does
  // when it fails, and who may call, is as in call(). Throws Error where `kept` is of another rank or group, or where x
  // is to be dispatched again and there is no room for it.
  std::vector<Event> backward(const Kept& kept, const Gradients& gradients, const CallOptions& options);

  // In place of a call that this rank cannot begin, for a reason of its own: tells the group, on every rank of which that call
  // is over. Waits, as a call does, where an earlier call was refused and not all ranks have come to it. Does nothing for a
  // rank alone, a broken context, and within a call of the thread.
  void refuse(const std::string& reason);

  uint64_t heap_bytes() const { return member_heap_bytes(limits_); }
  uint64_t workspace_bytes() const { return work_bytes(limits_); }

  // For tests: tiles of another shape, so that small problems have many.
  void set_tile(uint32_t rows, uint32_t columns);

 private:
  class Turn;

  void make_workspace();
  void prepare(const Layer& layer, const CallOptions& options);
  void throw_if_broken() const;
  void throw_posted_fault();
  void throw_refusal();
  void leave_refused();
  void await_peers();
  void run();
  void start_actors();
  void stop_actors();
  void actor_loop(uint32_t actor);
  void run_actor(uint32_t actor);
  void run_processor_of(uint32_t id);
  void end_call(std::exception_ptr& to, std::exception_ptr why);
  void await_actors();
  void check_outcome();
  CallReport report(const CallOptions& options, uint64_t start_ns, uint64_t end_ns) const;
  std::vector<Event> events(uint64_t start_ns, uint64_t end_ns) const;

  std::unique_ptr<host::Group> group_;
  Limits limits_;
  GradientLayout gradient_layout_;
  host::MachineTables machines_;
  SpreadCall call_;
  Reasons reasons_;
  Layer layer_;
  std::array<uint32_t, kProducts> task_columns_{};  // of the call
  std::unique_ptr<host::Group> workspace_;          // private memory of this rank
  bool broken_ = false;
  bool refused_ = false;  // the last call was, by some rank
  uint64_t perturbation_ = 0;

  // Placement tables and OS scratch, as Call and OsScratch point to them.
  host::PlacementTables placement_;
  std::vector<Source> sources_;
  std::vector<FormedExpert> experts_;
  Scheduler<ContextPlatform>::Memory scheduler_;
  std::vector<Status> seen_;

  std::vector<ActorTrace> traces_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<BackwardEngine>> backward_engines_;
  std::vector<WeightBuffers> weight_buffers_;                      // of each processor
  std::vector<OneWorker<ContextPlatform>::Memory> worker_memory_;  // of each processor
  // Actors, each a thread: 0 is the OS, behind it come the processors. They sleep between calls; generation_ wakes them,
  // running_ counts those not yet done.
  std::mutex mutex_;
  std::condition_variable wake_, done_, turn_;
  std::thread::id caller_;  // the thread whose call it is, if there is one
  uint64_t generation_ = 0;
  uint32_t running_ = 0;
  // What actors do when they wake: a call; a backward pass, or what that leaves for when its rows are home.
  enum class Work { kCall, kBackward, kWeights } work_ = Work::kCall;
  Backward* backward_ = nullptr;
  bool stopping_ = false;
  std::exception_ptr failure_;    // what an actor threw in this call, the first of them
  std::exception_ptr interrupt_;  // what check_interrupt threw
  std::vector<std::thread> threads_;
};

// A thread's turn to call, once no other thread has one. No mutex: a thread that has its turn must be told so, rather than
// wait for itself, and one that waits for a long call must hear an interrupt.
class Context::Turn {
 public:
  explicit Turn(Context& context);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Context& c_;
};

}  // namespace flashmoe::cpu

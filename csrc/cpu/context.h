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

// What a call has in addition to its layer.
struct CallOptions {
  uint32_t tokens = 0;
  host::Holders placement;  // which ranks hold each of the E experts
  uint32_t groups = 1;      // most return groups; fewer if GEMM1 has fewer blocks of columns
  OrderPolicy order;
  bool record_events = false;
  uint64_t perturbation = 0;  // seed of schedule perturbation, 0: none
  Epoch forward = 0;          // in a backward pass: epoch of the call whose gradients it computes; else 0
  bool redispatch = false;    // in a backward pass: x is dispatched again
  bool strict = false;        // a row whose router logits allow no choice is an error
};

// What a call did on this rank. `ns` (nanoseconds) and `count` are sums over all actors, for each phase.
struct CallReport {
  uint64_t wall_ns = 0;
  uint64_t ns[kPhases] = {};
  uint64_t count[kPhases] = {};
  uint64_t tiles = 0, tile_rows = 0;
  uint64_t rows_sent = 0, entries_sent = 0, return_rows_sent = 0;
  uint64_t dropped = 0, bad_rows = 0;
  std::vector<Event> events;
};

// Where a call leaves the chosen experts (-1: none) and their weights: [T, K] each, or [T, K slices] if experts are cut
// into slices. Null: nowhere.
struct RoutingOut {
  int32_t* ids = nullptr;
  float* weights = nullptr;
};

class Context {
 public:
  // The group's heaps have member_heap_bytes(limits) bytes each. `limits` must be the same on every rank, except for
  // the part that sizes the workspace (see Limits), and must have gone through MachineTables::set(). machines: the
  // machine of each rank; empty: all ranks are on one machine.
  Context(std::unique_ptr<host::Group> group, uint32_t rank, const Limits& limits, uint64_t timeout_ns,
          const std::vector<uint32_t>& machines = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Runs the layer on this rank; every rank of the group must call. Blocks until this rank's output is complete.
  //
  // If a bad row (RowNote) is an error, throws that error. If another rank refuses the call, throws an error with that
  // rank's reason. In both cases the next call is as any other. After a fault throws the fault, and after an interrupt
  // what check_interrupt threw; then every later call throws that the context is broken.
  //
  // Several threads take turns. If check_interrupt throws while a thread waits for its turn, the other threads' calls
  // go on. A call from within a call, as a signal handler may make it, throws Error.
  CallReport call(const Layer& layer, const CallOptions& options, const RoutingOut& routing = {});

  // Computes the gradients of a call from what the call has kept. Every rank of the group must call, for the same call.
  // Errors and the turns of threads are as in call(). Also throws Error if `kept` is of another rank or group, or if x
  // is to be dispatched again and there is no room for it.
  std::vector<Event> backward(const Kept& kept, const Gradients& gradients, const CallOptions& options);

  // Called instead of a call that this rank cannot begin, for a reason of its own. Tells the group, and the call is
  // over on every rank. If an earlier call was refused and not all ranks have left it, waits as a call does. Does
  // nothing for a rank alone, in a broken context, or from within a call of the same thread.
  void refuse(const std::string& reason);

  uint64_t heap_bytes() const { return member_heap_bytes(limits_); }
  uint64_t workspace_bytes() const { return work_bytes(limits_); }

  // For tests: sets another shape of tiles, so that small problems have many.
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
  std::array<uint32_t, kProducts> task_columns_{};  // columns of each product's tasks in the call
  std::unique_ptr<host::Group> workspace_;          // private memory of this rank
  bool broken_ = false;
  bool refused_ = false;  // the last call was refused by some rank
  uint64_t perturbation_ = 0;

  // Placement tables and OS scratch, to which Call and OsScratch point.
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
  // Each actor is a thread: 0 is the OS actor, the processors follow. The threads sleep between calls. generation_
  // wakes them; running_ counts the threads that have not finished the call.
  std::mutex mutex_;
  std::condition_variable wake_, done_, turn_;
  std::thread::id caller_;  // the thread whose call runs, if there is one
  uint64_t generation_ = 0;
  uint32_t running_ = 0;
  // What actors do when they wake: a call; a backward pass; or the gradients of weights, once the rows of the backward
  // pass are home.
  enum class Work { kCall, kBackward, kWeights } work_ = Work::kCall;
  Backward* backward_ = nullptr;
  bool stopping_ = false;
  std::exception_ptr failure_;    // the first exception that an actor threw in this call
  std::exception_ptr interrupt_;  // what check_interrupt threw
  std::vector<std::thread> threads_;
};

// A thread's turn to call, which it gets when no other thread has one. A mutex would not do, for two reasons: a thread
// that already has its turn must get an error rather than wait for itself, and a thread that waits for its turn must
// ask for interrupts.
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

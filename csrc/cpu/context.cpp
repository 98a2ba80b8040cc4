#include "cpu/context.h"

#include <algorithm>
#include <cfenv>
#include <chrono>

#include "cpu/fault.h"
#include "cpu/gemm.h"
#include "cpu/policy.h"
#include "host/agreement.h"
#include "host/fault_message.h"
#include "host/interrupt.h"
#include "host/received.h"
#include "host/text.h"

namespace flashmoe::cpu {
namespace {

using host::concat;
using host::Error;

// Appends an actor's events to `to`. If the actor is a processor, also appends an event kWait for each gap before,
// between and after its events. expert_of(e): the number in the layer of local expert e.
template <class ExpertOf>
void append_events(std::vector<Event>& to, const ActorTrace& trace, uint64_t start_ns, uint64_t end_ns,
                   ExpertOf&& expert_of) {
  uint64_t last = start_ns;
  for (const Event& e : trace.events) {
    if (trace.actor != 0 && e.start_ns > last) to.push_back({trace.actor, Phase::kWait, last, e.start_ns, 0, 0});
    to.push_back(e);
    if (e.expert != kNoExpert) to.back().expert = expert_of(e.expert);
    last = e.end_ns;
  }
  if (trace.actor != 0 && end_ns > last) to.push_back({trace.actor, Phase::kWait, last, end_ns, 0, 0});
}

// While this object lives, its thread has the floating-point environment that a program begins with. Other environments
// flush subnormals to zero or round in another way. A thread may inherit such an environment from the thread that made
// it, but a call's bits must not depend on who made which thread.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

// Throws Error if a slice of an expert, other than its first slice, has a bias of the second product that is not 0. An
// expert's result is the sum over its slices, so it would have this bias too. (The CUDA engine does not look at the
// values.)
void check_later_slices(const Layer& layer, const host::PlacementTables& placement, uint32_t rank) {
  const LayerSpec& l = layer.spec;
  if (l.slices == 1 || layer.down_bias == nullptr) return;
  std::vector<float> row(l.hidden);
  const uint32_t* slices = placement.by_owner.data() + placement.owner_base[rank];
  for (uint32_t i = 0; i < placement.local_experts(rank); ++i) {
    if (slices[i] % l.slices == 0) continue;
    const uint64_t at = uint64_t{i} * l.hidden * element_bytes(l.y_type);
    widen(row.data(), static_cast<const uint8_t*>(layer.down_bias) + at, l.y_type, l.hidden);
    const auto bias = std::find_if(row.begin(), row.end(), [](float v) { return v != 0.0f; });
    if (bias == row.end()) continue;
    throw Error(Error::Kind::kInvalidArgument,
                concat("down_bias: expected 0 in all slices but the first, got ", *bias, " in row ", i, ", of slice ",
                       slices[i] % l.slices, " of expert ", slices[i] / l.slices));
  }
}

// For each product, the columns of a task that has all columns of its tile.
std::array<uint32_t, kProducts> all_columns(const LayerSpec& layer) {
  std::array<uint32_t, kProducts> all{};
  for (uint32_t n = 0; n < kProducts; ++n) {
    all[n] = kProgram[n].columns == Axis::kHidden ? layer.hidden : layer.intermediate;
  }
  return all;
}

// How often a waiting thread asks whether it is interrupted.
constexpr auto kRarely = std::chrono::milliseconds(50);

}  // namespace

Context::Turn::Turn(Context& context) : c_(context) {
  std::unique_lock lock(c_.mutex_);
  if (c_.caller_ == std::this_thread::get_id()) {
    throw Error(
        Error::Kind::kOther,
        "context: expected one call of a thread at a time, got a second within the first (a signal handler's?); let "
        "the handler return, or call with a context of its own");
  }
  while (!c_.turn_.wait_for(lock, kRarely, [&] { return c_.caller_ == std::thread::id(); })) {
    lock.unlock();
    host::check_interrupt();
    lock.lock();
  }
  c_.caller_ = std::this_thread::get_id();
}

Context::Turn::~Turn() {
  const std::lock_guard lock(c_.mutex_);
  c_.caller_ = {};
  c_.turn_.notify_one();
}

Context::Context(std::unique_ptr<host::Group> group, uint32_t rank, const Limits& limits, uint64_t timeout_ns,
                 const std::vector<uint32_t>& machines)
    : group_(std::move(group)),
      limits_(limits),
      gradient_layout_(make_gradient_layout(limits)),
      machines_(machines, limits.ranks, rank),
      seen_(limits.ranks),
      traces_(limits.processors + 1),
      weight_buffers_(limits.processors),
      worker_memory_(limits.processors) {
  call_.rank = rank;
  call_.spread = machines_.machines(limits);
  reasons_ = {make_refusal_layout(limits), spread_heap_bytes(limits)};
  call_.shape.ranks = limits.ranks;
  call_.policy.clusters = limits.processors;
  // A rank alone waits only for its own threads, which come to an end however long a task takes. So it has no timeout.
  call_.policy.timeout_ns = limits.ranks == 1 ? 0 : timeout_ns;
  sources_.resize(limits.ranks);
  make_workspace();
  for (uint32_t id = 0; id < limits.processors; ++id) {
    traces_[id + 1].actor = id + 1;
    engines_.push_back(std::make_unique<Engine>(call_, layer_, task_columns_, traces_[id + 1]));
    backward_engines_.push_back(std::make_unique<BackwardEngine>(call_, layer_, task_columns_, traces_[id + 1]));
  }
  start_actors();
}

Context::~Context() {
  stop_actors();
}

void Context::start_actors() {
  const uint32_t actors = limits_.processors + 1;
  try {
    for (uint32_t actor = 0; actor < actors; ++actor) threads_.emplace_back([this, actor] { actor_loop(actor); });
  } catch (const std::exception& e) {
    const size_t started = threads_.size();
    stop_actors();
    throw Error(Error::Kind::kOther,
                concat("processors: expected ", actors, " threads, one of them the OS actor's, got ", started, " (",
                       e.what(), ")"));
  }
}

void Context::stop_actors() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Context::make_workspace() {
  call_.memory = make_call_memory(limits_);
  call_.memory.heaps = group_->heaps();
  workspace_ = host::make_single_rank_group(work_bytes(limits_));  // zeroed page by page, when first touched
  call_.memory.work = workspace_->heaps()[0];
}

void Context::set_tile(uint32_t rows, uint32_t columns) {
  const Turn no_call(*this);
  if (rows == 0 || rows > kMaxTileRows || columns == 0) {
    throw Error(Error::Kind::kInvalidArgument,
                concat("tile: expected rows in [1, ", kMaxTileRows, "] and columns >= 1, got ", rows, " x ", columns));
  }
  limits_.tile_rows = rows;
  limits_.columns_per_task = each_product(columns);
  make_workspace();
}

void Context::prepare(const Layer& layer, const CallOptions& o) {
  const DefaultFloats here;  // prepare() is the only place where the calling thread computes
  const bool backward = o.forward != 0;
  placement_ = host::placement_tables(o.placement, limits_, call_.rank, layer.spec.shared != 0);
  if (!backward) check_later_slices(layer, placement_, call_.rank);
  layer_ = layer;
  const LayerSpec& spec = layer_.spec;
  perturbation_ = o.perturbation;
  call_.placement = {.owner = placement_.owner.data(),
                     .by_owner = placement_.by_owner.data(),
                     .owner_base = placement_.owner_base.data()};
  call_.shape.local_experts = placement_.local_experts(call_.rank);
  call_.control()->noted.value = 0;
  call_.shape.tokens = o.tokens;
  call_.set_layer(spec);
  call_.policy.log2_block = log2_token_block(o.tokens, call_.policy.clusters, limits_.entries_per_token());
  // The forward pass has already dropped what a capacity drops.
  call_.shape.capacity = backward ? 0 : expert_capacity(spec.capacity_factor, o.tokens, spec.top_k, spec.experts);
  call_.shape.return_mode = spec.return_mode;
  call_.policy.tile_rows = limits_.tile_rows;
  task_columns_ = backward ? all_columns(spec) : task_columns(spec, limits_.columns_per_task);
  call_.cut_columns(task_columns_);
  call_.policy.joined = !backward && joins_rows(spec, call_.shape.ranks, o.tokens) ? 1 : 0;
  // With ranks on other machines, there is one return group, because rows go to other machines whole.
  const uint32_t groups = group_->bell() == nullptr ? o.groups : 1;
  call_.policy.groups = return_groups(call_.policy.columns[kReturning], groups, call_.policy.group_first);
  call_.policy.order = o.order;
  call_.spread.sums = call_.spread.count != 1 && call_.reduced() && !backward;
  call_.spread.second_row = o.redispatch ? redispatched_behind(call_, gradient_layout_) : 0;
  call_.config = host::make_config(call_, spec, o.placement, task_columns_[kReturning], o.forward, o.redispatch);
  experts_.resize(std::max(call_.shape.local_experts, 1u));
  for (ActorTrace& t : traces_) t = {.actor = t.actor, .record_events = o.record_events};
}

void Context::actor_loop(uint32_t actor) {
  const DefaultFloats here;
  peers_bell = group_->bell();
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
    }
    Perturbation::seed(perturbation_ == 0 ? 0 : (perturbation_ * 1000003 + call_.rank) * 1000003 + actor);
    try {
      run_actor(actor);
    } catch (...) {
      end_call(failure_, std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }
}

void Context::run_actor(uint32_t actor) {
  if (actor != 0) return run_processor_of(actor - 1);
  if (work_ == Work::kWeights) return;
  const uint64_t start = monotonic_ns();
  run_os<ContextPlatform>(
      call_,
      {.subscriber = {sources_.data(), {experts_.data(), 0, 1}}, .scheduler = &scheduler_, .seen = seen_.data()});
  traces_[0].add(Phase::kSchedule, start, monotonic_ns(), 0, 0);
}

void Context::run_processor_of(uint32_t id) {
  switch (work_) {
    case Work::kCall: return run_processor<ContextPlatform>(call_, id, *engines_[id], worker_memory_[id]);
    case Work::kBackward: return run_processor<ContextPlatform>(call_, id, *backward_engines_[id], worker_memory_[id]);
    case Work::kWeights: {
      const uint64_t start = monotonic_ns();
      weight_gradients(*backward_, weight_buffers_[id]);
      traces_[id + 1].add(Phase::kGradients, start, monotonic_ns(), 0, 0);
    }
  }
}

// Called if an actor runs out of memory during its work, or if the user interrupts. Ends this rank's call. The peers'
// calls end when their waits for this rank expire.
void Context::end_call(std::exception_ptr& to, std::exception_ptr why) {
  const std::lock_guard lock(mutex_);
  if (to == nullptr) to = std::move(why);
  CpuPlatform::store_release(&call_.control()->abort.value, uint64_t{1}, kDevice);
}

// The calling thread is no actor: before it can ask for an interrupt, it may have to wait long for the interpreter, and
// meanwhile an OS actor's heartbeat must not stop.
void Context::await_actors() {
  std::unique_lock lock(mutex_);
  while (!done_.wait_for(lock, kRarely, [&] { return running_ == 0; })) {
    if (interrupt_ != nullptr) continue;  // the interrupt is being handled
    lock.unlock();
    try {
      host::check_interrupt();
    } catch (...) {
      end_call(interrupt_, std::current_exception());
    }
    lock.lock();
  }
}

void Context::run() {
  const bool calls = work_ != Work::kWeights;  // otherwise this rank computes without its peers
  if (calls) group_->begin_call(call_);
  {
    const std::lock_guard lock(mutex_);
    ++generation_;
    running_ = static_cast<uint32_t>(threads_.size());
  }
  wake_.notify_all();
  await_actors();
  if (calls) group_->end_call();
}

void Context::throw_if_broken() const {
  if (!broken_) return;
  throw Error(Error::Kind::kGroup, "context: an earlier call failed on this group; close it and make a new one");
}

CallReport Context::call(const Layer& layer, const CallOptions& options, const RoutingOut& routing) {
  const Turn one_at_a_time(*this);
  throw_if_broken();
  await_peers();
  prepare(layer, options);
  work_ = Work::kCall;
  ++call_.epoch;  // from here on the call has begun, so an error is no refusal
  const uint64_t start = monotonic_ns();
  run();
  const uint64_t end = monotonic_ns();
  check_outcome();
  const RowNote note = RowNote::unpack(call_.control()->noted.value);
  if (host::is_error(note, options.strict)) throw host::row_error(note, call_.rank, layer.spec.experts);
  broken_ = true;  // stays so if memory runs out below, because the other ranks have completed this call
  for (uint32_t t = 0; routing.ids != nullptr && t < options.tokens; ++t) {
    const uint32_t choices = call_.shape.routed_top_k();
    std::transform(call_.routing(t), call_.routing(t) + choices, routing.ids + uint64_t{t} * choices,
                   [](int32_t id) { return std::max(id, -1); });
    std::copy_n(call_.weights(t), choices, routing.weights + uint64_t{t} * choices);
  }
  if (layer.kept != nullptr) layer.kept->finish(call_);
  CallReport made = report(options, start, end);
  broken_ = false;
  return made;
}

std::vector<Event> Context::backward(const Kept& kept, const Gradients& gradients, const CallOptions& options) {
  const Turn one_at_a_time(*this);
  throw_if_broken();
  await_peers();
  if (kept.rank != call_.rank || kept.ranks != call_.shape.ranks) {
    throw Error(Error::Kind::kOther, concat("backward pass: expected a call of rank ", kept.rank, " of ", kept.ranks,
                                            ", got the context of rank ", call_.rank, " of ", call_.shape.ranks));
  }
  if (kept.redispatch && limits_.redispatch == 0) {
    throw Error(Error::Kind::kOther, "backward pass: expected a context with room for rows that are dispatched again");
  }
  Backward pass(kept, gradients);
  Layer layer = gradients.layer;
  layer.x = gradients.y, layer.out = gradients.x;
  CallOptions of_pass = options;
  of_pass.placement = kept.placement, of_pass.tokens = kept.tokens, of_pass.forward = kept.epoch;
  of_pass.redispatch = kept.redispatch;
  prepare(layer, of_pass);
  for (auto& engine : backward_engines_) engine->begin_pass(pass, gradient_layout_);
  backward_ = &pass;
  work_ = Work::kBackward;
  ++call_.epoch;
  const uint64_t start = monotonic_ns();
  run();
  check_outcome();
  work_ = Work::kWeights;
  run();
  check_outcome();
  return options.record_events ? events(start, monotonic_ns()) : std::vector<Event>{};
}

void Context::check_outcome() {
  if (CpuPlatform::load_acquire(&call_.control()->abort.value, kDevice) == 0) return;
  const bool here = interrupt_ != nullptr || failure_ != nullptr;
  if (!here) throw_posted_fault();
  if (!here) throw_refusal();
  broken_ = true;
  if (interrupt_ != nullptr) std::rethrow_exception(interrupt_);
  if (!here) throw Error(Error::Kind::kOther, "the call was aborted without a fault record");
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& e) {
    throw Error(Error::Kind::kOther,
                concat("call ", call_.epoch, ": a thread of rank ", call_.rank, " could not go on: ", e.what()));
  }
}

void Context::throw_posted_fault() {
  const std::optional<HostFault> record = posted_fault(call_);
  if (!record) return;
  broken_ = true;
  throw host::fault_error(*record, {call_.rank, call_.policy.timeout_ns, group_->obituary(record->fault.culprit)});
}

std::vector<Event> Context::events(uint64_t start_ns, uint64_t end_ns) const {
  const LayerSpec& spec = layer_.spec;
  const uint32_t* const slices = placement_.by_owner.data() + placement_.owner_base[call_.rank];
  const auto expert_of = [&](uint32_t local) {
    return local < call_.shape.routed_local_experts() ? slices[local] / spec.slices : spec.experts;
  };
  std::vector<Event> all;
  for (const ActorTrace& t : traces_) append_events(all, t, start_ns, end_ns, expert_of);
  return all;
}

CallReport Context::report(const CallOptions& o, uint64_t start_ns, uint64_t end_ns) const {
  CallReport r;
  r.wall_ns = end_ns - start_ns;
  for (const ActorTrace& t : traces_) {
    for (uint32_t p = 0; p < kPhases; ++p) {
      r.ns[p] += t.ns[p];
      r.count[p] += t.count[p];
    }
    r.rows_sent += t.rows_sent;
    r.entries_sent += t.entries_sent;
  }
  if (o.record_events) r.events = events(start_ns, end_ns);
  for (uint32_t t = 0; t < o.tokens; ++t) {
    const int32_t* ids = call_.routing(t);
    r.dropped += static_cast<uint64_t>(std::count(ids, ids + call_.shape.top_k, -1)) / call_.shape.slices;
    r.bad_rows += ids[0] == Choice::recorded(Choice::kBad) ? 1 : 0;
  }
  // In a joined call, Phase::kCombine was counted for each joined row (if tokens have two rows) or not at all (if they
  // have one). The report has the number of token blocks instead.
  if (call_.policy.joined != 0) r.count[static_cast<uint32_t>(Phase::kCombine)] = call_.blocks();
  r.tiles = r.count[static_cast<uint32_t>(phase_of(kReturning))] / call_.policy.columns[kReturning];
  for (uint32_t t = 0; t < r.tiles; ++t) r.tile_rows += call_.tile(t)->shape.rows;
  const Machines::Counts& relayed = call_.spread.counts[call_.parity()];
  r.rows_sent += relayed.rows_passed;
  r.return_rows_sent += relayed.sums_sent + host::rows_returned(call_, call_.spread);
  return r;
}

}  // namespace flashmoe::cpu

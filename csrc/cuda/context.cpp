#include "cuda/context.h"

#include <atomic>

#include "cuda/limits.h"
#include "cuda/report.h"
#include "flashmoe/gpu/decode_memory.h"
#include "host/clock.h"
#include "host/fault_message.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

// A call in which the fields are set that all calls of a context have in common, except the addresses of its memory.
Call common_call(const Arch& arch, const Membership& who, const Limits& limits, uint64_t timeout_ns) {
  Call c;
  c.rank = who.rank;
  c.shape.ranks = limits.ranks;
  c.policy.clusters = limits.processors / arch.cluster_blocks;
  c.policy.timeout_ns = timeout_ns;
  c.policy.tile_rows = limits.tile_rows;
  c.memory = make_call_memory(limits);
  return c;
}

}  // namespace

Context::Context(int ordinal, const Membership& who, const Limits& limits, const OrderPolicy& order,
                 uint64_t timeout_ns, const std::vector<uint32_t>& machines)
    : device_(ordinal),
      common_{.arch = arch_of(device_),
              .limits = cuda_limits(common_.arch, limits, device_.processors()),
              .call = {},
              .asked = order},
      copies_(device_),
      fault_page_(device_),
      counts_page_(device_),
      counted_(device_) {
  common_.fault = fault_page_.mapped<HostFault>();
  common_.call = common_call(common_.arch, who, common_.limits, timeout_ns);
  take_memory(who);
  if (limits.relayed == 0) return;
  machines_.emplace(device_, machines, common_.limits, who.rank);
  common_.call.machines = machines_->on_device();
}

Context::~Context() {
  const Device::Use use(device_);
  driver().cuCtxSynchronize();
}

void Context::take_memory(const Membership& who) {
  const Limits& limits = common_.limits;
  Call& call = common_.call;
  auto take_own_memory = [&] {
    workspace_ = DeviceMemory(device_, gpu::make_few_layout(limits).bytes, "workspace");
    heap_table_ = DeviceMemory(device_, limits.ranks * sizeof(uint8_t*), "heap table");
  };
  if (limits.ranks == 1) {
    take_own_memory();
    group_ = make_single_gpu_group(device_, heap_bytes());
  } else {
    group_ = join_gpu_group(device_, who, limits, heap_bytes(), call.policy.timeout_ns, take_own_memory);
  }
  if (limits.rdma != 0) {
    puts_ = &nvshmem(who.nvshmem);
    registration_ = std::make_unique<Registration>(*puts_, device_, workspace_);
  }
  if (may_refuse(limits)) common_.reasons = cuda_reasons(limits).of(group_->heaps()[call.rank], 0);
  heap_table_.upload(group_->heaps(), heap_table_.bytes());
  call.memory.heaps = heap_table_.as<uint8_t*>();
  call.memory.work = workspace_.as<uint8_t>();
}

// ---- Layers -----------------------------------------------------------------------------------------------

const Kernels& Context::kernels(const std::string& cubin, KernelSet which, DriverStream stream) {
  std::unique_ptr<Kernels>& loaded = kernels_[cubin];
  if (loaded == nullptr) {
    device_.refuse_capture(stream, "loading a kernel, as the first call of a dtype and activation does,");
    loaded = std::make_unique<Kernels>(device_, cubin, which, puts_);
  }
  return *loaded;
}

const Placement& Context::placement(const Layer& layer, DriverStream stream) {
  const auto key = std::make_pair(layer.placement, layer.spec.shared != 0);
  if (const auto it = placements_.find(key); it != placements_.end()) return it->second;
  device_.refuse_capture(stream, "uploading a placement, as the first call with it does,");
  const uint32_t rank = common_.call.rank;
  Placement uploaded(device_, host::placement_tables(layer.placement, common_.limits, rank, layer.spec.shared != 0),
                     rank);
  return placements_.emplace(key, std::move(uploaded)).first->second;
}

void Context::beat() {
  if (common_.limits.ranks == 1 || common_.limits.rdma != 0) return;
  const uint64_t time = host::monotonic_ns();  // a value that neither a kernel nor an earlier beat has written
  copies_.write(&call_on_host().status(common_.call.rank)->progress, &time, sizeof(time));
}

KernelsOfLayer Context::kernels_of(const LayerSpec& spec, Pass pass) const {
  return cuda::kernels_of(common_.limits, spec, pass);
}

int64_t Context::add_layer(const Layer& layer, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  const Limits& l = common_.limits;
  const LayerSpec& spec = layer.spec;
  if (spec.hidden > l.hidden || spec.intermediate > l.intermediate || spec.experts * spec.slices > l.experts ||
      spec.top_k * spec.slices > l.top_k || spec.shared > l.shared ||
      layer.placement.experts() != spec.experts * spec.slices || element_bytes(spec.token_type) > l.x_bytes ||
      element_bytes(spec.intermediate_type) > l.intermediate_bytes ||
      element_bytes(spec.return_type) > l.return_bytes) {
    throw Error(Error::Kind::kHeap, "layer: expected sizes within the context's limits");
  }
  const bool trains = layer.pass != Pass::kInference;
  if (trains && (l.rdma != 0 || has_scales(spec.weight_type))) {
    throw Error(Error::Kind::kInvalidArgument,
                "layer: expected memory that is mapped and weights without scales for gradients");
  }
  if (l.relayed != 0 && (trains || (spec.return_mode == ReturnMode::kReduced) != (l.staging != 0))) {
    throw Error(Error::Kind::kInvalidArgument,
                "layer: expected no gradients, and the context's return mode, among ranks of several machines");
  }
  const KernelsOfLayer needed = kernels_of(spec, layer.pass);
  const LoadedKernels loaded{
      .general = needed.general ? &kernels(layer.cubin, general_kernels(common_.arch, layer, l), stream) : nullptr,
      .few = needed.few ? &kernels(layer.few_cubin, few_kernels(common_.arch, layer), stream) : nullptr};
  const Placement& where = placement(layer, stream);
  if (layer.traced && trace_.bytes() == 0) {
    device_.refuse_capture(stream, "tracing");
    trace_ = DeviceMemory(device_, trace_bytes(), "trace");
  }
  uint8_t* const trace = layer.traced ? trace_.as<uint8_t>() : nullptr;
  auto plan = std::make_unique<Plan>(common_, layer, where, loaded, trace);
  plans_[++last_plan_] = std::move(plan);
  return last_plan_;
}

void Context::remove_layer(int64_t layer) {
  const std::lock_guard lock(mutex_);
  plans_.erase(layer);
}

Plan& Context::plan_of(int64_t layer) const {
  const auto found = plans_.find(layer);
  if (found == plans_.end()) throw Error(Error::Kind::kOther, "layer: expected one of this context");
  return *found->second;
}

// ---- Calls ------------------------------------------------------------------------------------------------

// The layer's plan, with the tokens set.
Plan& Context::plan_for(int64_t layer, const TokenSpec& tokens) {
  check_health();
  Plan& plan = plan_of(layer);
  const Limits& limits = common_.limits;
  if (tokens.tokens > limits.max_tokens) {
    throw Error(Error::Kind::kHeap,
                concat("max_tokens: expected at most ", limits.max_tokens, ", got ", tokens.tokens));
  }
  plan.set_tokens(common_, tokens);
  return plan;
}

void Context::call(int64_t layer, const TokenSpec& tokens, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  Plan& plan = plan_for(layer, tokens);
  if (tokens.tokens == 0 && common_.limits.ranks == 1) return;  // alone, a rank without tokens has nothing to compute
  if (only_few(plan.spec) && !plan.few()) {
    throw Error(
        Error::Kind::kInvalidArgument,
        concat("x: expected at most ", plan.most_few(), " tokens with weights of ", name_of(plan.spec.weight_type),
               " on the CUDA engine, which has no kernel for more, got ", tokens.tokens));
  }
  const std::optional<Error> earlier = take_noted();
  launch(plan, stream);
  if (earlier) throw *earlier;
}

void Context::backward(int64_t layer, const TokenSpec& tokens, const GradientSpec& gradients, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);  // autograd's threads may have no current context of the driver, which encoding
                                   // tensor maps needs
  Plan& plan = plan_for(layer, tokens);
  plan.set_gradients(gradients);
  const std::optional<Error> earlier = take_noted();
  launch(plan, stream);
  if (earlier) throw *earlier;
}

void Context::launch(Plan& plan, DriverStream stream) {
  const Device::Use use(device_);
  await_peers(stream);
  if (plan.args.trace != nullptr) device_.refuse_capture(stream, "tracing");
  const Kernels& chosen = plan.few() ? *plan.kernels.few : *plan.kernels.general;
  chosen.launch(plan.args, processors(), stream);
  ++calls_;
}

RoutingLayout Context::kept_routing(int64_t layer, uint32_t tokens, const gpu::KeptRoom& room) {
  const std::lock_guard lock(mutex_);
  return plan_of(layer).routing_layout(tokens, room);
}

uint64_t Context::pass_bytes(int64_t layer, uint32_t tokens, const KeptRows& rows) {
  const std::lock_guard lock(mutex_);
  return plan_of(layer).pass_layout(tokens, rows).bytes;
}

// ---- Forward passes that keep, among several ranks ------------------------------------------------------------------

uint64_t Context::call_bytes(int64_t layer, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  device_.refuse_capture(stream, "a forward pass that keeps rows of several ranks, which the host counts,");
  return plan_of(layer).call_layout(common_).bytes;
}

gpu::KeptRoom Context::expected_room(int64_t layer) {
  const std::lock_guard lock(mutex_);
  return plan_of(layer).expected_room;
}

gpu::CountedRows Context::counted_rows(const Plan& plan, uint64_t memory) const {
  const GroupCallLayout layout = plan.call_layout(common_);
  const auto words = [&](uint64_t offset) { return reinterpret_cast<uint32_t*>(memory + offset); };
  return {counts_page_.mapped<gpu::RankRows>(), reinterpret_cast<gpu::RankRows*>(memory + layout.ranks),
          words(layout.rows), words(layout.numbers)};
}

void Context::count_rows(int64_t layer, uint64_t memory, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  Plan& plan = plan_of(layer);
  plan.kernels.general->launch_count(plan.args, counted_rows(plan, memory), stream);
  counted_.record(stream);
}

void Context::move_rows(int64_t layer, uint64_t memory, uint64_t kept, const gpu::KeptRoom& room, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  Plan& plan = plan_of(layer);
  const auto& shape = plan.args.call.shape;
  const GroupKeptLayout layout = plan.kept_layout(shape.tokens, room);
  const auto words = [&](uint64_t offset) { return reinterpret_cast<uint32_t*>(kept + offset); };
  const gpu::MovedRows to{counted_rows(plan, memory),
                          reinterpret_cast<uint8_t*>(kept),
                          plan.redispatch ? nullptr : reinterpret_cast<uint8_t*>(kept + layout.received),
                          words(layout.numbers),
                          words(layout.first_row),
                          room,
                          processors()};
  const uint64_t experts = shape.local_experts + later_slices(plan.spec);  // the kernel that moves rows counts a later
                                                                           // slice as an expert
  const uint64_t tiles = room.rows / common_.limits.tile_rows + min_of(experts, uint64_t{room.rows});
  plan.kernels.general->launch_move(plan.args, to, static_cast<uint32_t>(tiles), stream);
}

KeptRows Context::read_counts(int64_t layer, const gpu::KeptRoom& room) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  counted_.wait();
  check_health();
  if (const std::optional<Error> noted = take_noted()) throw *noted;
  static_assert(gpu::kMaxRanks * sizeof(gpu::RankRows) <= MappedPage::kBytes);
  gpu::RankRows all{};
  for (uint32_t p = 0; p < common_.limits.ranks; ++p) {
    const gpu::RankRows& of_rank = counts_page_.host<gpu::RankRows>()[p];
    all = {max_of(all.tokens, of_rank.tokens), all.received + of_rank.received, all.rows + of_rank.rows};
  }
  Plan& plan = plan_of(layer);
  const gpu::KeptRoom needed{all.rows, plan.redispatch ? 0 : all.received, all.tokens};
  const bool stays = plan.suits(plan.args.call.shape.tokens, room, needed);
  if (!stays) plan.expect(needed);
  return {all.rows, all.received, calls_, stays ? room : needed};
}

void Context::synchronize(DriverStream stream) {
  const std::lock_guard lock(mutex_);
  device_.refuse_capture(stream, "waiting for the device");
  // Waiting for the last call's stream alone would not do: a captured call runs wherever its graph is launched.
  device_.synchronize();
  check_health();
  if (const std::optional<Error> noted = take_noted()) throw *noted;
}

// Takes the error of a call that another rank has refused, or the error for a row. Each error is taken once. call()
// and backward() raise an earlier call's error only after they have launched the new call, so that all ranks go on with
// the same calls.
std::optional<Error> Context::take_noted() {
  if (std::optional<Error> refusal = take_refusal()) return refusal;
  auto* record = fault_page_.host<HostFault>();
  const std::atomic_ref noted(record->noted);
  const RowNote note = RowNote::unpack(noted.load(std::memory_order_acquire));
  if (note.fault == RowFault::kNone) return std::nullopt;
  const uint32_t experts = record->noted_experts;
  noted.store(0, std::memory_order_release);  // from now on the kernel may leave the next note here
  return host::row_error(note, common_.call.rank, experts);
}

void Context::check_health() {
  if (broken_) {
    throw Error(Error::Kind::kGroup, "context: an earlier call failed on this group; close it and make a new one");
  }
  auto* record = fault_page_.host<HostFault>();
  if (std::atomic_ref(record->posted).load(std::memory_order_acquire) == 0) return;
  throw_fault(*record);
}

void Context::throw_fault(const HostFault& record) {
  broken_ = true;
  const Call& c = common_.call;
  throw host::fault_error(record, {c.rank, c.policy.timeout_ns, group_->obituary(record.fault.culprit)});
}

// ---- Reports ----------------------------------------------------------------------------------------------

void Context::read_routing(uint32_t tokens, uint32_t top_k, int32_t* ids, float* weights) const {
  cuda::read_routing(common_.call, workspace_, common_.limits, tokens, top_k, ids, weights);
}

RowsSent Context::read_received(int64_t layer, int32_t* rows) {
  const std::lock_guard lock(mutex_);
  const uint8_t* const own_heap = group_->heaps()[common_.call.rank];
  const DeviceMachines* const machines = machines_ ? &*machines_ : nullptr;
  return cuda::read_received(plan_of(layer).args.call, device_, workspace_, own_heap, machines, rows);
}

void Context::read_trace(uint8_t* to) const {
  trace_.download(to, trace_.bytes());
}

ClockReading Context::read_clock(int64_t layer, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  device_.refuse_capture(stream, "waiting for the device");
  device_.synchronize();
  check_health();
  return cuda::read_clock(device_, plan_of(layer).kernels.any(), stream);
}

}  // namespace flashmoe::cuda

#include "cuda/context.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "host/agreement.h"
#include "host/fault_message.h"
#include "host/placement.h"
#include "host/received.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using cpu::concat;

// Less than this returns in less time than the signals of more groups would take.
constexpr uint64_t kGroupedReturnBytes = 8u << 20;
// Of a window, with several ranks: all of an expert's, where it has about a thousand rows.
constexpr uint32_t kRaster = 8, kRasterOfSeveral = 6;
constexpr uint32_t kSenders = 16;
constexpr uint32_t kAlwaysHeld = 0xffffffffu;
// Tasks published ahead for each processor, most and least: fewer where they take longer.
constexpr uint32_t kMostAhead = 4, kLeastAhead = 1;
constexpr uint32_t kStagesAhead = 32;  // 20 us

// Thread blocks. 0: one on every multiprocessor.
uint32_t processors_of(const Limits& limits, uint32_t multiprocessors) {
  const uint32_t all = multiprocessors / sm90::kPair * sm90::kPair;
  const uint32_t wanted = limits.processors == 0 ? all : limits.processors;
  const uint32_t least = sm90::least_blocks(limits.ranks, limits.max_local_experts);
  if (wanted < least || wanted > all || wanted % sm90::kPair != 0) {
    const std::string most =
        least > all ? concat(", of which the device has ", all) : concat(" to ", all, ", the device's multiprocessors");
    throw Error(Error::Kind::kInvalidArgument,
                concat("processors: expected an even number from ", least, " (for R=", limits.ranks,
                       " and El=", limits.max_local_experts, ")", most, ", got ", wanted));
  }
  return wanted;
}

// What the kernel counts in units of 16 bytes, in 31 or 32 bits: rows of other ranks' tokens (TokenRows), and rows to sum
// (SumPiece).
void check_reach(const Limits& limits) {
  const uint64_t pitch = row_pitch(limits.hidden, limits.elem_bytes), tokens = limits.max_tokens;
  const struct {
    const char* what;
    uint64_t bytes, most;
  } fields[] = {
      {"other ranks' tokens", (limits.ranks - 1) * tokens * pitch, sm90::kReachBytes},
      {"results to sum", tokens * limits.return_slots * pitch, 2 * sm90::kReachBytes},
      {"results to reduce", limits.staging * tokens * limits.entries_per_token() * pitch, 2 * sm90::kReachBytes}};
  for (const auto& f : fields) {
    if (f.bytes <= f.most) continue;
    throw Error(Error::Kind::kInvalidArgument,
                concat("max_tokens: expected rows of ", f.what, " within ", f.most >> 30, " GiB, got ", f.bytes,
                       " bytes for R=", limits.ranks, ", T=", tokens, ", K=", limits.top_k, " and H=", limits.hidden));
  }
}

// Whether there is no combine, see sm90/join.cuh. With two rows a token it pays where most tiles are full: small tasks
// leave no time to join their rows beside them.
bool joins_rows(const Call& c) {
  if (c.ranks != 1 || c.capacity != 0 || c.tokens > sm90::kMaxJoinedTokens) return false;
  return c.top_k == 1 || (c.top_k == 2 && c.tokens * 2 >= sm90::kTileTokens * c.local_experts);
}

// Tasks published ahead for each processor. Several ranks' rows become ready one after the other, and what is ready waits
// behind what is published, however late that is computed; short tasks need more of it to hide the scheduler.
uint32_t tasks_ahead(const Call& c) {
  if (c.ranks == 1) return kMostAhead;
  const uint32_t stages = ceil_div(min_of(c.hidden, c.intermediate) * c.element_bytes, sm90::kRowBytes);
  return std::clamp(ceil_div(kStagesAhead, stages), kLeastAhead, kMostAhead);
}

// Operations of the GEMMs and bytes out over the link, a second, as measured on H200.
constexpr double kGemmRate = 750e12, kLinkRate = 350e9;

// Whether rows are computed by GEMM1 no faster than the link takes those that go to other ranks.
bool link_keeps_up(const Call& c) {
  return c.element_bytes * (c.ranks - 1) / kLinkRate <= c.ranks * 2.0 * c.intermediate / kGemmRate;
}

// Whether the kernel of a few tokens takes the call.
bool is_few(const Call& c) {
  return c.ranks == 1 && c.tokens <= kFewTokens;
}

sm90::WeightRows rows_of(const Matrix& m) {
  return {reinterpret_cast<const uint8_t*>(m.data), m.row_bytes, m.expert_bytes};
}

}  // namespace

Limits cuda_limits(Limits limits, uint32_t multiprocessors) {
  check_reach(limits);
  limits.processors = processors_of(limits, multiprocessors);
  limits.tile_rows = sm90::kTileTokens;
  // A context serves every activation; gated ones have more columns of tasks.
  limits.gemm0_columns_per_task = sm90::gemm0_columns_per_task(true);
  limits.gemm1_columns_per_task = sm90::kGemm1ColumnsPerTask;
  return limits;
}

bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate) {
  constexpr double kElementBytes = 2, kOperations = 6;  // of a row's element; of it and a column of a gated expert's I
  const double others = ranks - 1;
  const double sent = others * (1 - std::pow(1 - 1.0 / ranks, top_k)), back = top_k * others / ranks;
  const double link = (sent + back) * kElementBytes / kLinkRate;
  const double gemms = top_k * kOperations * intermediate / kGemmRate;
  return link > 1.5 * gemms && sent < 0.8 * back;
}

uint32_t token_block(uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors) {
  uint32_t block = kMinTokenBlock;
  auto fits = [&](uint32_t b) {
    return b <= kMaxTokenBlock && b * experts <= sm90::kMaxGateLogits && b * top_k <= sm90::kMaxPairs;
  };
  while (ceil_div(tokens, block) > processors && fits(2 * block)) block *= 2;
  return block;
}

uint32_t return_groups(uint32_t columns, ReturnMode mode, uint64_t return_bytes, uint16_t (&first)[kMaxGroups + 1]) {
  // Eighths after which a group ends. Each group reads the hidden rows once more. Rows that go as they are computed, or
  // nowhere, lose by more of them than two what combining under way wins; those that are reduced do not go before their
  // group is computed, so that the link waits for the first, and everybody for the last.
  constexpr uint32_t kOnce = 1u << 8, kHalves = 1u << 4 | 1u << 8;
  constexpr uint32_t kDescending = 1u << 2 | 1u << 4 | 1u << 6 | 1u << 7 | 1u << 8;
  const uint32_t ends = return_bytes < kGroupedReturnBytes ? kOnce
                        : mode == ReturnMode::kDirect      ? kHalves
                                                           : kDescending;
  uint32_t groups = 0;
  first[0] = 0;
  for (uint32_t eighths = 1; eighths <= 8; ++eighths) {
    const uint32_t end = ceil_div(columns * eighths, 8u);
    if ((ends >> eighths & 1u) != 0 && end > first[groups]) first[++groups] = static_cast<uint16_t>(end);
  }
  return groups;
}

Context::Context(int ordinal, const Membership& who, const Limits& limits, const OrderPolicy& order,
                 uint64_t timeout_ns)
    : device_(ordinal), limits_(cuda_limits(limits, device_.processors())), asked_(order), fault_page_(device_) {
  call_.rank = who.rank;
  call_.ranks = limits_.ranks;
  call_.processors = limits_.processors / sm90::kPair;
  call_.timeout_ns = timeout_ns;
  call_.tile_rows = limits_.tile_rows;
  call_.heap_layout = make_heap_layout(limits_);
  call_.work_layout = make_work_layout(limits_);
  call_.max_blocks = limits_.max_blocks();
  call_.queue_mask = limits_.queue_capacity() - 1;
  call_.list_mask = limits_.list_capacity() - 1;
  auto take_own_memory = [&] {
    workspace_ = DeviceMemory(device_, work_bytes(limits_), "workspace");
    heap_table_ = DeviceMemory(device_, limits_.ranks * sizeof(uint8_t*), "heap table");
  };
  const uint64_t heap_bytes = call_.heap_layout.bytes;
  if (limits_.ranks == 1) {
    take_own_memory();
    group_ = make_single_gpu_group(device_, heap_bytes);
  } else {
    group_ = join_gpu_group(device_, who, limits_, heap_bytes, timeout_ns, take_own_memory);
  }
  if (limits_.rdma != 0) {
    puts_ = &nvshmem(who.nvshmem);
    registration_ = std::make_unique<Registration>(*puts_, device_, workspace_);
  }
  heap_table_.upload(group_->heaps(), heap_table_.bytes());
  call_.heaps = heap_table_.as<uint8_t*>();
  call_.work = workspace_.as<uint8_t>();
}

Context::~Context() {
  const Device::Use use(device_);
  driver().cuCtxSynchronize();
}

bool Context::capturing(DriverStream stream) const {
  const Device::Use use(device_);
  int status = kCaptureNone;
  check(driver().cuStreamIsCapturing(stream, &status), "cannot query the stream");
  return status != kCaptureNone;
}

void Context::refuse_capture(DriverStream stream, const char* what) const {
  if (!capturing(stream)) return;
  throw Error(Error::Kind::kOther, concat("capture: ", what, " cannot be done while the stream is being captured"));
}

Context::Kernels::Kernels(const Device& on, const std::string& cubin, const Nvshmem* nvshmem)
    : device(on),
      api(nvshmem),
      module(device, cubin),
      general(module.kernel("flashmoe_moe", sm90::kSharedBytes)),
      few(module.kernel("flashmoe_few", sm90::kFewSharedBytes)) {
  if (api == nullptr) return;
  const Device::Use use(device);
  check_nvshmem(api->nvshmemx_cumodule_init(module.handle()), "nvshmemx_cumodule_init");
}

Context::Kernels::~Kernels() {
  if (api == nullptr) return;
  const Device::Use use(device);
  api->nvshmemx_cumodule_finalize(module.handle());
}

Registration::Registration(const Nvshmem& api, const Device& device, const DeviceMemory& memory)
    : api_(api), device_(device), address_(memory.as<void>()) {
  const Device::Use use(device_);
  check_nvshmem(api_.nvshmemx_buffer_register(address_, memory.bytes()), "nvshmemx_buffer_register");
}

Registration::~Registration() {
  const Device::Use use(device_);
  api_.nvshmemx_buffer_unregister(address_);
}

const Context::Kernels& Context::kernels(const std::string& cubin, DriverStream stream) {
  std::unique_ptr<Kernels>& loaded = kernels_[cubin];
  if (loaded == nullptr) {
    refuse_capture(stream, "loading a kernel, as the first call of a dtype and activation does,");
    loaded = std::make_unique<Kernels>(device_, cubin, puts_);
  }
  return *loaded;
}

const Context::Placement& Context::placement(const std::vector<uint32_t>& owners, DriverStream stream) {
  if (const auto it = placements_.find(owners); it != placements_.end()) return it->second;
  refuse_capture(stream, "uploading a placement, as the first call with it does,");
  const cpu::PlacementTables t = cpu::placement_tables(owners, limits_);
  std::vector<uint32_t> tables(t.owner);
  tables.insert(tables.end(), t.by_owner.begin(), t.by_owner.end());
  tables.insert(tables.end(), t.owner_base.begin(), t.owner_base.end());
  const uint64_t bytes = tables.size() * sizeof(uint32_t);
  Placement p{.tables = DeviceMemory(device_, bytes, "placement"),
              .owner = nullptr,
              .by_owner = nullptr,
              .owner_base = nullptr,
              .local_experts = t.local_experts(call_.rank)};
  p.tables.upload(tables.data(), bytes);
  p.owner = p.tables.as<uint32_t>();
  p.by_owner = p.owner + owners.size();
  p.owner_base = p.by_owner + owners.size();
  return placements_.emplace(owners, std::move(p)).first->second;
}

Call Context::call_of(const LayerSpec& spec, const Placement& where) const {
  Call c = call_;
  c.hidden = spec.hidden;
  c.intermediate = spec.intermediate;
  c.experts = spec.experts;
  c.top_k = spec.top_k;
  c.local_experts = where.local_experts;
  c.owner = where.owner;
  c.by_owner = where.by_owner;
  c.owner_base = where.owner_base;
  c.element_bytes = element_bytes(spec.dtype);
  const bool gated = spec.activation == Activation::kSwiGlu;
  c.gemm0_columns = ceil_div(spec.intermediate, sm90::gemm0_columns_per_task(gated));
  c.gemm1_columns = ceil_div(spec.hidden, sm90::kGemm1ColumnsPerTask);
  c.order = order_of(c, spec.return_mode);
  if (c.ranks > 1) {
    // Alike on all ranks, whatever their tokens: one's signal is another's columns.
    c.return_mode = spec.return_mode;
    // By puts, one group: a message is then a whole row.
    const uint64_t return_bytes = limits_.rdma != 0 ? 0 : kGroupedReturnBytes;
    c.groups = return_groups(c.gemm1_columns, c.return_mode, return_bytes, c.group_first);
    c.config = cpu::make_config(c, spec.dtype, spec.activation, spec.capacity_factor, spec.placement,
                                sm90::kGemm1ColumnsPerTask);
  }
  return c;
}

OrderPolicy Context::order_of(const Call& c, ReturnMode return_mode) const {
  // Rows that go as they are computed, and faster than the link takes them, are to use it for as long as there are tasks, once
  // the first rows are sent, and those that it takes before others. Elsewhere nothing is won by an early GEMM1.
  const bool early = c.ranks > 1 && return_mode == ReturnMode::kDirect && !link_keeps_up(c);
  OrderPolicy chosen{.gemm1_lag = early ? 2 * c.processors : kAlwaysHeld,
                     .raster = c.ranks > 1 ? kRasterOfSeveral : kRaster,
                     .window = tasks_ahead(c) * c.processors,
                     .gemm1_lists = early ? 2u : 1u,
                     .own_first = early ? 2u : 1u,
                     .senders = kSenders};
  for (const auto field : {&OrderPolicy::gemm1_lag, &OrderPolicy::raster, &OrderPolicy::window,
                           &OrderPolicy::gemm1_lists, &OrderPolicy::own_first, &OrderPolicy::senders}) {
    if (asked_.*field != 0) chosen.*field = asked_.*field;
  }
  const uint32_t service = 1 + sm90::formers_of(c.ranks, c.local_experts, processors());
  chosen.senders = c.ranks == 1 ? 0 : min_of(chosen.senders, processors() - service);
  return chosen;
}

int64_t Context::add_layer(const LayerSpec& spec, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  const Limits& l = limits_;
  if (spec.hidden > l.hidden || spec.intermediate > l.intermediate || spec.experts > l.experts ||
      spec.top_k > l.top_k || spec.placement.size() != spec.experts || element_bytes(spec.dtype) > l.elem_bytes) {
    throw Error(Error::Kind::kHeap, "layer: expected sizes within the context's limits");
  }
  const Kernels& loaded = kernels(spec.cubin, stream);
  const Placement& where = placement(spec.placement, stream);
  if (spec.traced && trace_.bytes() == 0) {
    refuse_capture(stream, "tracing");
    trace_ = DeviceMemory(device_, trace_bytes(), "trace");
  }
  auto plan = std::make_unique<Plan>();
  plan->kernels = &loaded;
  plan->dtype = spec.dtype;
  plan->capacity_factor = spec.capacity_factor;
  sm90::KernelArgs& a = plan->args;
  a = {};
  a.call = call_of(spec, where);
  const uint32_t bytes = a.call.element_bytes, experts = a.call.local_experts;
  const bool gated = spec.activation == Activation::kSwiGlu;
  if (experts != 0) {  // else it has no tasks
    a.gate_up = encode(gate_up_shape(spec.gate_up, bytes, spec.hidden, spec.intermediate, experts, gated),
                       spec.gate_up.data, spec.dtype, "gate_up_proj");
    a.down = encode(down_shape(spec.down, bytes, spec.hidden, spec.intermediate, experts), spec.down.data, spec.dtype,
                    "down_proj");
  }
  a.gate_up_rows = rows_of(spec.gate_up);
  a.down_rows = rows_of(spec.down);
  a.router_rows = rows_of(spec.router);
  if (spec.router.data != 0) {
    a.router =
        encode(router_shape(spec.router, bytes, spec.hidden, spec.experts), spec.router.data, spec.dtype, "router");
  }
  const auto hidden_rows = reinterpret_cast<uint64_t>(a.call.hidden_row(0, 0));
  const uint64_t pitch = reinterpret_cast<uint64_t>(a.call.hidden_row(0, 1)) - hidden_rows;
  a.hidden = encode(rows_shape(pitch, bytes, spec.intermediate, l.max_tiles() * l.tile_rows), hidden_rows, spec.dtype,
                    "the hidden rows");
  a.gate_up_bias = reinterpret_cast<const void*>(spec.gate_up_bias);
  a.down_bias = reinterpret_cast<const void*>(spec.down_bias);
  a.router_bias = reinterpret_cast<const void*>(spec.router_bias);
  a.topk_ids_64 = spec.topk_ids_64;
  a.renormalize = spec.renormalize;
  a.host_fault = fault_page_.mapped<HostFault>();
  a.trace = spec.traced ? trace_.as<uint8_t>() : nullptr;
  plans_[++last_plan_] = std::move(plan);
  return last_plan_;
}

void Context::remove_layer(int64_t layer) {
  const std::lock_guard lock(mutex_);
  plans_.erase(layer);
}

void Context::set_tokens(Plan& plan, const TokenSpec& t) const {
  sm90::KernelArgs& a = plan.args;
  Call& c = a.call;
  c.tokens = t.tokens;
  c.log2_block = static_cast<uint32_t>(std::countr_zero(token_block(t.tokens, c.experts, c.top_k, processors())));
  c.capacity = expert_capacity(plan.capacity_factor, t.tokens, c.top_k, c.experts);
  c.joined = joins_rows(c) ? 1 : 0;
  if (c.ranks == 1) {
    // Rows are joined one by one: groups would only have GEMM1 read the hidden rows more often.
    const uint64_t return_bytes = c.joined != 0 ? 0 : uint64_t{t.tokens} * c.top_k * c.hidden * c.element_bytes;
    c.groups = return_groups(c.gemm1_columns, c.return_mode, return_bytes, c.group_first);
  }
  a.x = reinterpret_cast<const uint8_t*>(t.x);
  a.x_row_bytes = t.x_row_bytes;
  a.out = reinterpret_cast<uint8_t*>(t.out);
  a.topk_ids = reinterpret_cast<const void*>(t.topk_ids);
  a.topk_weights = reinterpret_cast<const float*>(t.topk_weights);
  if (t.topk_ids == 0 && t.tokens != 0 && !is_few(c)) {
    a.tokens = encode(rows_shape(t.x_row_bytes, c.element_bytes, c.hidden, t.tokens), t.x, plan.dtype, "x");
  }
}

Context::Plan& Context::plan_of(int64_t layer) const {
  const auto found = plans_.find(layer);
  if (found == plans_.end()) throw Error(Error::Kind::kOther, "layer: expected one of this context");
  return *found->second;
}

void Context::call(int64_t layer, const TokenSpec& tokens, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  check_health();
  Plan& plan = plan_of(layer);
  if (tokens.tokens > limits_.max_tokens) {
    throw Error(Error::Kind::kHeap,
                concat("max_tokens: expected at most ", limits_.max_tokens, ", got ", tokens.tokens));
  }
  if (tokens.tokens == 0 && limits_.ranks == 1) return;  // alone, a rank without tokens has nothing to compute
  set_tokens(plan, tokens);
  const Device::Use use(device_);
  if (plan.args.trace != nullptr) {
    refuse_capture(stream, "tracing");
    check(driver().cuMemsetD8Async(reinterpret_cast<DevicePtr>(plan.args.trace), 0, trace_.bytes(), stream), "trace");
  }
  launch(plan, stream);
}

void Context::launch(Plan& plan, DriverStream stream) const {
  const bool few = is_few(plan.args.call);
  LaunchAttribute cooperative{.id = kLaunchCooperative, .pad = {}, .value = {}};
  cooperative.value.cooperative = 1;
  LaunchConfig config{processors(), 1, 1, sm90::kThreads, 1, 1, sm90::kSharedBytes, stream, &cooperative, 1};
  if (few) {
    config.block_x = sm90::kFewThreads;
    config.shared_bytes = sm90::kFewSharedBytes;
  }
  void* parameters[] = {&plan.args};
  check(driver().cuLaunchKernelEx(&config, few ? plan.kernels->few : plan.kernels->general, parameters, nullptr),
        "cannot launch the kernel");
}

void Context::synchronize(DriverStream stream) {
  const std::lock_guard lock(mutex_);
  refuse_capture(stream, "waiting for the device");
  // Not for the last call's stream alone: a call that was captured runs wherever its graph is launched.
  device_.synchronize();
  check_health();
}

void Context::check_health() {
  if (broken_) {
    throw Error(Error::Kind::kGroup, "context: an earlier call failed on this group; close it and make a new one");
  }
  auto* record = fault_page_.host<HostFault>();
  if (std::atomic_ref(record->posted).load(std::memory_order_acquire) == 0) return;
  broken_ = true;
  throw worded(*record);
}

// The CPU engine words a fault from the heaps in which it lies: here are some that hold nothing else.
Error Context::worded(const HostFault& record) const {
  const Fault& fault = record.fault;
  Limits limits;
  limits.ranks = limits_.ranks;
  const HeapLayout layout = make_heap_layout(limits);
  const auto groups = cpu::make_thread_groups(limits.ranks, layout.bytes);
  Call c;
  c.epoch = fault.epoch;
  c.rank = call_.rank;
  c.ranks = limits.ranks;
  c.timeout_ns = call_.timeout_ns;
  c.heaps = groups.front()->heaps();
  c.heap_layout = layout;
  c.status(fault.culprit)->entered = record.entered;
  *c.call_config(fault.rank, fault.rank) = record.mine;
  *c.call_config(fault.awaited, fault.awaited) = record.theirs;
  *c.fault(c.rank, fault.rank) = {1, fault};
  return cpu::fault_error(c, *group_);
}

void Context::read_routing(uint32_t tokens, uint32_t top_k, int32_t* ids, float* weights) const {
  if (tokens > limits_.max_tokens || top_k > limits_.top_k) {
    throw Error(Error::Kind::kOther, "routing: expected no more than the context's limits");
  }
  // Rows of the workspace are as long as the largest K.
  const uint64_t words = uint64_t{tokens} * limits_.top_k;
  std::vector<uint32_t> rows(words);
  auto read = [&](WorkField field, auto* to) {
    workspace_.download(rows.data(), words * sizeof(uint32_t), call_.work_layout.offset[static_cast<uint32_t>(field)]);
    for (uint32_t t = 0; t < tokens; ++t) {
      std::memcpy(to + uint64_t{t} * top_k, rows.data() + uint64_t{t} * limits_.top_k, top_k * sizeof(*to));
    }
  };
  read(WorkField::kRouting, ids);
  read(WorkField::kWeights, weights);
}

uint64_t Context::read_received(int64_t layer, int32_t* rows) {
  const std::lock_guard lock(mutex_);
  Call c = plan_of(layer).args.call;
  Control control;
  workspace_.download(&control, sizeof(control), c.work_layout.offset[static_cast<uint32_t>(WorkField::kControl)]);
  c.epoch = control.calls.value;
  // A copy of the heap up to the packets' entries. The others may be a call ahead, and write: with the other parity.
  static_assert(std::max({HeapField::kCallSignal, HeapField::kPacketSignal, HeapField::kPacketOffsets,
                          HeapField::kPacketCounts}) < HeapField::kPacketEntries);
  std::vector<uint8_t> heap(c.heap_layout.offset[static_cast<uint32_t>(HeapField::kPacketEntries)]);
  const Device::Use use(device_);
  const auto own = reinterpret_cast<DevicePtr>(group_->heaps()[c.rank]);
  check(driver().cuMemcpyDtoH_v2(heap.data(), own, heap.size()), "cannot copy from the heap");
  const std::vector<uint8_t*> heaps(c.ranks, heap.data());
  c.heaps = heaps.data();
  cpu::count_rows(c, rows);
  return cpu::rows_returned(c);
}

void Context::read_trace(uint8_t* to) const {
  trace_.download(to, trace_.bytes());
}

}  // namespace flashmoe::cuda

// The functions of the CPU engine that Python calls, through apache-tvm-ffi. Python names a context by its handle,
// and passes tensors as DLPack views. Each kind of error becomes a Python exception of its own. (The CUDA engine's
// functions are in bindings/cuda.cpp.)
//
// Python has checked every argument against its documented domain (python/flashmoe/calls/arguments.py). Here only
// arguments that could corrupt memory are checked again.
#include <sys/syscall.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <unistd.h>

#include <atomic>

#include "bindings/codec.h"
#include "bindings/registry.h"
#include "cpu/context.h"
#include "flashmoe/gpu/decode_memory.h"
#include "host/agreement.h"
#include "host/interrupt.h"
#include "network/group.h"

namespace flashmoe {
namespace {

const char* writer_name(Writer w) {
  switch (w) {
    case Writer::kSelf: return "this rank";
    case Writer::kRank0: return "the rank of the first coordinate";
    case Writer::kRank1: return "the rank of the second coordinate";
    case Writer::kPeer0: return "the peer of the first coordinate";
    case Writer::kReturn: return "the owner of (token, slot)'s expert, or the rank of the slot";
  }
  return "";
}

template <class Field, size_t N>
void append_fields(FieldRows& to, const FieldSpec<Field> (&table)[N], const Limits& limits, const char* region) {
  for (const auto& spec : table) {
    const FieldShape shape = spec.shape(limits);
    ffi::Array<int64_t> dims;
    uint64_t bytes = shape.elem_bytes;
    for (const uint64_t d : shape.dim) {
      dims.push_back(static_cast<int64_t>(d));
      bytes *= d;
    }
    Map row;
    row.Set("name", ffi::String(spec.name));
    row.Set("region", ffi::String(region));
    row.Set("shape", dims);
    row.Set("elem_bytes", static_cast<int64_t>(shape.elem_bytes));
    row.Set("bytes", static_cast<int64_t>(align_up(bytes, Layout<Field>::kFieldAlign)));
    row.Set("writer", ffi::String(writer_name(spec.writer)));
    row.Set("why", ffi::String(spec.why));
    to.push_back(row);
  }
}

}  // namespace

FieldRows field_rows(const Limits& limits, bool gradients, bool refusals, bool few) {
  FieldRows rows;
  append_fields(rows, kHeapTable, limits, "heap");
  append_fields(rows, kWorkTable, limits, "workspace");
  if (make_put_layout(limits).bytes != 0) append_fields(rows, kPutTable, limits, "workspace");
  if (few) append_fields(rows, gpu::kFewTable, limits, "workspace");
  if (gradients) append_fields(rows, kGradientTable, limits, "heap");
  if (limits.relayed != 0) append_fields(rows, kRelayTable, limits, "heap");
  if (refusals) append_fields(rows, kRefusalTable, limits, "heap");
  return rows;
}

template <>
inline constexpr const char* kGone<cpu::Kept> =
    "backward pass: what the forward pass kept is gone: its tensor was copied, and the original dropped (by a hook on "
    "saved tensors?)";

}  // namespace flashmoe

namespace flashmoe::cpu {
namespace {

// machines: the machine of each rank; empty: all ranks are on one machine.
FieldRows layout_fields(Map limits, ffi::Array<int64_t> machines) {
  return guarded([&] { return field_rows(spread_over(limits_of(limits), machines), true, true, false); });
}

// Eight numbers of bytes: the four of what a call keeps, then the four of what a backward pass takes. The four are the
// bytes for each row, for each row of the shared expert, for each token received, and for each own token.
ffi::Array<int64_t> training_bytes(Map layer, bool redispatch) {
  return guarded([&] {
    const LayerSpec spec = layer_of(std::move(layer));
    ffi::Array<int64_t> out;
    for (const BytesOfEach& each : {kept_bytes(spec, redispatch), pass_bytes(spec, redispatch)}) {
      for (const uint64_t bytes : {each.row, each.shared_row, each.received, each.token}) {
        out.push_back(static_cast<int64_t>(bytes));
      }
    }
    return out;
  });
}

int64_t rows_of_rank(Map limits) {
  return guarded([&] { return static_cast<int64_t>(limits_of(limits).rows_of_rank()); });
}

// The names of an option's values, in the order of their numbers.
template <class E>
ffi::Array<ffi::String> names() {
  ffi::Array<ffi::String> out;
  for (const char* name : Names<E>::kAll) out.push_back(name);
  return out;
}

Map option_names() {
  return {{"dtype", names<DType>()},
          {"activation", names<Activation>()},
          {"routing", names<Routing>()},
          {"return_mode", names<ReturnMode>()},
          {"weight_scales", names<WeightScales>()},
          {"phase", names<Phase>()}};
}

// For tests: quantises rows of float32 [T, n] as the engine does, to e4m3 [T, n] and scales [T, ceil(n / 128)].
void quantise_rows(const ffi::Tensor& values, const ffi::Tensor& elements, const ffi::Tensor& scales) {
  const auto n = static_cast<uint32_t>(values.shape()[1]);
  for (int64_t t = 0; t < values.shape()[0]; ++t) {
    quantise(static_cast<uint8_t*>(elements.data_ptr()) + t * n,
             static_cast<float*>(scales.data_ptr()) + t * scale_blocks(n),
             static_cast<const float*>(values.data_ptr()) + t * n, n);
  }
}

int64_t capacity_of(double factor, int64_t tokens, int64_t top_k, int64_t experts) {
  return expert_capacity(factor, static_cast<uint32_t>(tokens), static_cast<uint32_t>(top_k),
                         static_cast<uint32_t>(experts));
}

long this_thread() {
  return syscall(SYS_gettid);
}

// The thread that is ending Python; 0: Python is not ending. While Python ends, calls in all other threads must end
// (python/flashmoe/calls/ending.py).
std::atomic<long> ended_by{0};

void end_calls() {
  ended_by = this_thread();
}

// Python runs signal handlers only in the main thread, when that thread calls TVMFFIEnvCheckSignals(). Other threads do
// not call it, so they do not wait for the interpreter's lock.
void end_if_interrupted() {
  if (const long by = ended_by; by != 0 && by != this_thread()) {
    throw host::Error(host::Error::Kind::kOther, "the process ends");
  }
  if (this_thread() != getpid()) return;
  if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
}

// Sets check_interrupt when the library is loaded.
[[maybe_unused]] const bool kHooked = (host::check_interrupt = end_if_interrupted, true);

// machines: the machine of each rank; empty: all ranks are on one machine. The ranks of these groups always are,
// because they share memory. Tests name several machines: then calls behave as if the ranks were on them.
ffi::Function context_create(Map map, int64_t rank, ffi::String name, int64_t timeout_ns,
                             ffi::Array<int64_t> machines) {
  return guarded([&] {
    const std::vector<uint32_t> of = numbers_of(machines);
    const Limits limits = spread_over(context_limits_of(map), machines);
    const uint64_t heap_bytes = member_heap_bytes(limits);
    auto group = limits.ranks == 1 ? host::make_single_rank_group(heap_bytes)
                                   : host::join_process_group(name, static_cast<uint32_t>(rank), limits, heap_bytes,
                                                              static_cast<uint64_t>(timeout_ns));
    return owned(std::make_shared<Context>(std::move(group), static_cast<uint32_t>(rank), limits,
                                           static_cast<uint64_t>(timeout_ns), of));
  });
}

// ---- Groups on several machines -------------------------------------------------------------------------------------

// Reads a text that Python's bytes.hex() has made, and returns its bytes.
std::string from_hex(const std::string& text) {
  const auto digit = [](char c) { return static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10); };
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) bytes += static_cast<char>(digit(text[i]) << 4 | digit(text[i + 1]));
  return bytes;
}

// A message about the first of the limits that must be the same on two ranks but differ; empty if there is none.
ffi::String limits_difference(Map mine, int64_t rank, Map theirs, int64_t peer) {
  return guarded([&] {
    return ffi::String(host::difference(limits_of(std::move(mine)), static_cast<uint32_t>(rank),
                                        limits_of(std::move(theirs)), static_cast<uint32_t>(peer)));
  });
}

// Makes a rank's courier; Python owns the handle. key: 32 bytes in hexadecimal digits, which only the group's ranks
// know. library, at: see network::Wire.
ffi::Function network_open(int64_t rank, int64_t ranks, ffi::String key, int64_t timeout_ns, ffi::String library,
                           ffi::String at) {
  return guarded([&] {
    const std::string bytes = from_hex(key);
    network::GroupKey of_group{};
    if (bytes.size() != of_group.size()) {
      throw host::Error(host::Error::Kind::kOther, host::concat("key: expected 32 bytes, got ", bytes.size()));
    }
    std::memcpy(of_group.data(), bytes.data(), bytes.size());
    return owned(std::make_shared<network::Courier>(static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks), of_group,
                                                    static_cast<uint64_t>(timeout_ns), library, at));
  });
}

// The addresses at which the couriers of other ranks reach this courier.
ffi::String network_address(int64_t network) {
  return guarded([&] { return ffi::String(registry<network::Courier>().get(network)->address()); });
}

// Like context_create(), for a rank that has peers on other machines. machines, addresses, hosts: one for each rank.
ffi::Function network_context(int64_t network, Map map, int64_t rank, ffi::String name, int64_t timeout_ns,
                              ffi::Array<int64_t> machines, ffi::Array<ffi::String> addresses,
                              ffi::Array<ffi::String> hosts) {
  return guarded([&] {
    const std::vector<uint32_t> of = numbers_of(machines);
    const Limits limits = spread_over(context_limits_of(map), machines);
    network::Spread spread;
    for (uint32_t p = 0; p < of.size(); ++p) {
      if (of[p] == of[static_cast<uint32_t>(rank)]) spread.here.push_back(p);
    }
    for (const ffi::String& each : addresses) spread.addresses.push_back(each);
    for (const ffi::String& each : hosts) spread.hosts.push_back(each);
    const auto self = static_cast<uint32_t>(rank);
    const auto timeout = static_cast<uint64_t>(timeout_ns);
    auto local = host::join_process_group(name, self, limits, member_heap_bytes(limits), timeout, spread.here);
    auto group =
        network::join_network_group(std::move(local), self, limits, registry<network::Courier>().get(network), spread);
    return owned(std::make_shared<Context>(std::move(group), self, limits, timeout, of));
  });
}

// Returns once this rank has heard from all ranks on other machines.
void network_await(int64_t network) {
  guarded([&] { registry<network::Courier>().get(network)->await_peers(); });
}

// The number of messages that this rank has had to send to other machines, without those that carry only the rank's
// status, and the bytes of data in these messages. Then, for each n, how many of these bytes were in messages of at least
// 2^n and fewer than 2^(n + 1) bytes.
ffi::Array<int64_t> network_crossed(int64_t network) {
  return guarded([&] {
    const network::Crossed crossed = registry<network::Courier>().get(network)->crossed();
    ffi::Array<int64_t> out{static_cast<int64_t>(crossed.messages), static_cast<int64_t>(crossed.bytes)};
    for (const uint64_t bytes : crossed.bytes_of_size) out.push_back(static_cast<int64_t>(bytes));
    return out;
  });
}

void context_close(int64_t handle) {
  registry<Context>().remove(handle);
}

ffi::Array<int64_t> context_bytes(int64_t handle) {
  return guarded([&] {
    const auto c = registry<Context>().get(handle);
    return ffi::Array<int64_t>{static_cast<int64_t>(c->heap_bytes()), static_cast<int64_t>(c->workspace_bytes())};
  });
}

void context_refuse(int64_t handle, ffi::String reason) {
  guarded([&] { registry<Context>().get(handle)->refuse(reason); });
}

void context_set_tile(int64_t handle, int64_t rows, int64_t columns) {
  guarded(
      [&] { registry<Context>().get(handle)->set_tile(static_cast<uint32_t>(rows), static_cast<uint32_t>(columns)); });
}

using Given = ffi::Optional<ffi::Tensor>;

// Where a tensor begins; null if it is not wanted. A wanted tensor that is missing is an error, and so is a tensor that
// is given but not wanted.
template <class T>
T* memory_of(const char* name, const Given& tensor, bool wanted = true) {
  if (tensor.has_value() != wanted) {
    throw host::Error(host::Error::Kind::kOther,
                      host::concat(name, wanted ? ": expected a tensor, got none" : ": expected no tensor, got one"));
  }
  if (!wanted) return nullptr;
  return reinterpret_cast<T*>(static_cast<uint8_t*>((*tensor).data_ptr()) + (*tensor).byte_offset());
}

// What a call has kept, as a tensor of two int64: its handle and its bytes. The kept memory is freed with the tensor's
// memory. So what was kept lives as long as the tensor, and whoever saves the tensor (PyTorch's graph) owns it.
class KeptTensor {
 public:
  explicit KeptTensor(std::shared_ptr<Kept> kept)
      : words_{registry<Kept>().add(kept), static_cast<int64_t>(kept->bytes())} {}
  void AllocData(DLTensor* tensor) { tensor->data = new Words(words_); }
  void FreeData(DLTensor* tensor) {
    registry<Kept>().remove(words_[0]);
    delete static_cast<Words*>(tensor->data);
  }

  static ffi::Tensor of(std::shared_ptr<Kept> kept) {
    return ffi::Tensor::FromNDAlloc(KeptTensor(std::move(kept)), ffi::Shape{2}, DLDataType{kDLInt, 64, 1},
                                    DLDevice{kDLCPU, 0});
  }

 private:
  using Words = std::array<int64_t, 2>;
  Words words_;
};

// Seven numbers for each event: actor, phase, start, end, index, column, expert (-1: none).
ffi::Array<int64_t> as_rows(const std::vector<Event>& events) {
  ffi::Array<int64_t> rows;
  for (const Event& e : events) {
    const int64_t expert = e.expert == kNoExpert ? -1 : int64_t{e.expert};
    for (const int64_t v : {int64_t{e.actor}, static_cast<int64_t>(e.phase), static_cast<int64_t>(e.start_ns),
                            static_cast<int64_t>(e.end_ns), int64_t{e.index}, int64_t{e.column}, expert}) {
      rows.push_back(v);
    }
  }
  return rows;
}

Map as_map(const CallReport& r) {
  Map out;
  auto set = [&](const char* name, uint64_t v) { out.Set(name, static_cast<int64_t>(v)); };
  set("wall_ns", r.wall_ns);
  set("tiles", r.tiles);
  set("tile_rows", r.tile_rows);
  set("rows_sent", r.rows_sent);
  set("entries_sent", r.entries_sent);
  set("return_rows_sent", r.return_rows_sent);
  set("dropped", r.dropped);
  set("bad_rows", r.bad_rows);
  ffi::Array<int64_t> ns, count;
  for (uint32_t p = 0; p < kPhases; ++p) {
    ns.push_back(static_cast<int64_t>(r.ns[p]));
    count.push_back(static_cast<int64_t>(r.count[p]));
  }
  out.Set("ns", ns);
  out.Set("count", count);
  out.Set("events", as_rows(r.events));
  return out;
}

// For each expert, the rank to which `rank` sends its tokens of that expert.
ffi::Array<int64_t> placement_owners(ffi::Array<int64_t> placement, int64_t rank) {
  return guarded([&] {
    const host::Holders holders = holders_of(placement);
    ffi::Array<int64_t> owners;
    for (uint32_t e = 0; e < holders.experts(); ++e) owners.push_back(holders.for_rank(e, static_cast<uint32_t>(rank)));
    return owners;
  });
}

// Returns a function that calls one layer on a context; the function does not keep the context alive. Its arguments:
// T; whether the call is traced; the seed of its perturbation; whether it keeps what gradients need; whether it keeps
// no x of other ranks' tokens, because the backward pass will send it again; whether a row for which no choice can be
// made is an error; the tensors, in host memory; and two tensors [T, K] that get the chosen experts and their
// weights. It returns the call's report: times and counts of each phase, events as rows (as_rows), and what is kept.
ffi::Function context_layer(int64_t handle, Map layer, ffi::Array<int64_t> placement, Map order, int64_t groups) {
  return guarded([&] {
    CallOptions options;
    options.placement = holders_of(placement);
    options.groups = static_cast<uint32_t>(groups);
    options.order = order_of(std::move(order));
    auto call = [handle, options, spec = layer_of(std::move(layer))](
                    int64_t tokens, bool trace, int64_t perturbation, bool keeps, bool redispatch, bool strict,
                    const Given& x, const Given& gate_up_proj, const Given& down_proj, const Given& router,
                    const Given& router_bias, const Given& choice_bias, const Given& gate_up_bias,
                    const Given& down_bias, const Given& shared_gate_up, const Given& shared_down,
                    const Given& shared_gate, const Given& shared_up, const Given& gate_up_scale,
                    const Given& down_scale, const Given& shared_gate_up_scale, const Given& shared_down_scale,
                    const Given& x_scale, const Given& topk_ids, const Given& topk_weights, const Given& load,
                    const Given& router_logits, const Given& out, const Given& chosen, const Given& weights) {
      return guarded([&] {
        const auto context = registry<Context>().get(handle);
        const bool routed = spec.routing != Routing::kGiven;
        const bool scaled = spec.weight_scales != WeightScales::kNone, scaled_shared = scaled && spec.shared != 0;
        const auto kept = keeps ? std::make_shared<Kept>() : nullptr;
        if (keeps) {
          kept->spec = spec, kept->placement = options.placement, kept->redispatch = redispatch;
          kept->shared_up = shared_up.has_value();
          if (routed) kept->logits.resize(static_cast<uint64_t>(tokens) * spec.experts);
        }
        const Layer l{
            .spec = spec,
            .x = memory_of<void>("x", x),
            .x_scale = memory_of<float>("x_scale", x_scale, spec.x_type == DType::kFloat8E4M3),
            .gate_up = memory_of<void>("gate_up_proj", gate_up_proj),
            .gate_up_bias = memory_of<void>("gate_up_bias", gate_up_bias, spec.gate_up_bias),
            .down = memory_of<void>("down_proj", down_proj),
            .down_bias = memory_of<void>("down_bias", down_bias, spec.down_bias),
            .router = memory_of<void>("router", router, routed),
            .router_bias = memory_of<void>("router_bias", router_bias, spec.router_bias),
            .choice_bias = memory_of<float>("choice_bias", choice_bias, spec.choice_bias),
            .shared_gate_up = memory_of<void>("shared_gate_up", shared_gate_up, spec.shared != 0),
            .shared_down = memory_of<void>("shared_down", shared_down, spec.shared != 0),
            .shared_gate = memory_of<void>("shared_gate", shared_gate, spec.shared_gate),
            .shared_up = memory_of<void>("shared_up", shared_up, shared_up.has_value()),
            .gate_up_scale = memory_of<void>("gate_up_scale", gate_up_scale, scaled),
            .down_scale = memory_of<void>("down_scale", down_scale, scaled),
            .shared_gate_up_scale = memory_of<void>("shared_gate_up_scale", shared_gate_up_scale, scaled_shared),
            .shared_down_scale = memory_of<void>("shared_down_scale", shared_down_scale, scaled_shared),
            .topk_ids = memory_of<int32_t>("topk_ids", topk_ids, !routed),
            .topk_weights = memory_of<void>("topk_weights", topk_weights, !routed),
            .topk_weight_type = routed || (*topk_weights).dtype().bits == 32 ? DType::kFloat32 : spec.y_type,
            .out = memory_of<void>("out", out),
            .load = memory_of<uint64_t>("load", load, load.has_value()),
            .router_logits = keeps && routed
                                 ? kept->logits.data()
                                 : memory_of<float>("router_logits", router_logits, router_logits.has_value()),
            .kept = kept.get()};
        CallOptions o = options;
        o.tokens = static_cast<uint32_t>(tokens);
        o.record_events = trace;
        o.perturbation = static_cast<uint64_t>(perturbation);
        o.strict = strict;
        Map report = as_map(
            context->call(l, o, {memory_of<int32_t>("topk_ids", chosen), memory_of<float>("topk_weights", weights)}));
        if (!keeps) return report;
        if (routed && router_logits.has_value()) {
          std::copy(kept->logits.begin(), kept->logits.end(), memory_of<float>("router_logits", router_logits));
        }
        report.Set("kept", KeptTensor::of(kept));
        return report;
      });
    };
    return ffi::Function::FromTyped(std::move(call));
  });
}

// For tests: the number of calls whose gradients may still be asked for.
int64_t kept_calls() {
  return registry<Kept>().count();
}

using Named = ffi::Map<ffi::String, ffi::Tensor>;

// Where the tensor of that name begins; null if there is none.
void* memory_of(const Named& tensors, const char* name) {
  const ffi::String key(name);
  if (tensors.count(key) == 0) return nullptr;
  const ffi::Tensor tensor = tensors.at(key);
  return static_cast<uint8_t*>(tensor.data_ptr()) + tensor.byte_offset();
}

// Throws Error if a tensor of a backward pass does not fit the kept call: it is missing, or its number of elements or
// their size differs. `all`: none may be missing. `float32`: tensors of weights and biases are float32.
void check_tensors(const Kept& kept, const Named& tensors, bool all, bool float32) {
  const LayerSpec& l = kept.spec;
  const uint64_t t = kept.tokens, h = l.hidden, e = l.experts, up = l.gate_up_rows(), i = l.intermediate, s = l.shared;
  const uint64_t local = kept.local_experts() - shared_experts(l.shared);
  const bool routed = l.routing != Routing::kGiven;
  const uint32_t of_matrix = element_bytes(float32 ? DType::kFloat32 : l.weight_type);
  const uint32_t of_other = element_bytes(float32 ? DType::kFloat32 : l.y_type);
  const struct {
    const char* name;
    uint64_t elements;
    bool wanted;
    uint32_t bytes;
  } rows[] = {{"x", t * h, true, element_bytes(l.x_type)},
              {"y", t * h, all, element_bytes(l.y_type)},
              {"gate_up_proj", local * up * h, true, of_matrix},
              {"down_proj", local * h * i, true, of_matrix},
              {"gate_up_bias", local * up, l.gate_up_bias, of_other},
              {"down_bias", local * h, l.down_bias, of_other},
              {"router", e * h, routed, of_other},
              {"router_bias", e, l.router_bias, of_other},
              {"choice_bias", e, l.choice_bias, 4},
              {"shared_gate_up", s * (kept.shared_up ? i : up) * h, s != 0, of_matrix},
              {"shared_up", kept.shared_up ? s * i * h : 0, kept.shared_up, of_matrix},
              {"shared_down", s * h * i, s != 0, of_matrix},
              {"shared_gate", h, l.shared_gate, of_other},
              {"topk_weights", t * l.top_k, !routed, 0},  // may be of either of two types, so its size is not checked
              {"router_logits", t * e, false, 4}};
  for (const auto& row : rows) {
    const ffi::String key(row.name);
    if (tensors.count(key) == 0) {
      if (!all || !row.wanted) continue;
      throw host::Error(host::Error::Kind::kInvalidArgument,
                        host::concat(row.name, ": expected a tensor, as the forward pass had, got none"));
    }
    const ffi::Tensor tensor = tensors.at(key);
    const uint32_t bytes = tensor.dtype().bits / 8;
    if (static_cast<uint64_t>(tensor.numel()) == row.elements && (row.bytes == 0 || bytes == row.bytes)) continue;
    throw host::Error(host::Error::Kind::kInvalidArgument,
                      host::concat(row.name, ": expected ", row.elements, " elements of ", row.bytes,
                                   " bytes, as in the forward pass, got ", tensor.numel(), " of ", bytes));
  }
}

// Computes the gradients of the call that left `kept`. `given`: the call's tensors by name, and `y`, the gradient of
// its result (perhaps also the logits' gradients). `wanted`: where the gradients go, by the names of their tensors, x
// among them. `accumulates`: gradients of weights and biases are float32, and are added to what is there. Returns
// events as rows (as_rows) if the pass is traced.
ffi::Array<int64_t> context_backward(int64_t handle, int64_t kept_handle, bool trace, Map order, int64_t groups,
                                     int64_t perturbation, const Named& given, const Named& wanted, bool accumulates) {
  return guarded([&] {
    const auto context = registry<Context>().get(handle);
    const auto kept = registry<Kept>().get(kept_handle);
    check_tensors(*kept, given, true, false);
    check_tensors(*kept, wanted, false, accumulates);
    const ffi::String weights("topk_weights");
    const bool narrow = given.count(weights) != 0 && given.at(weights).dtype().bits != 32;
    const auto in = [&](const char* name) { return memory_of(given, name); };
    const auto out = [&](const char* name) { return memory_of(wanted, name); };
    const Gradients gradients{.layer = {.spec = kept->spec,
                                        .x = in("x"),
                                        .gate_up = in("gate_up_proj"),
                                        .down = in("down_proj"),
                                        .down_bias = in("down_bias"),
                                        .router = in("router"),
                                        .choice_bias = static_cast<const float*>(in("choice_bias")),
                                        .shared_gate_up = in("shared_gate_up"),
                                        .shared_down = in("shared_down"),
                                        .shared_gate = in("shared_gate"),
                                        .shared_up = kept->shared_up ? in("shared_up") : nullptr,
                                        .topk_weight_type = narrow ? kept->spec.y_type : DType::kFloat32},
                              .y = in("y"),
                              .logits = static_cast<const float*>(in("router_logits")),
                              .x = out("x"),
                              .gate_up = out("gate_up_proj"),
                              .gate_up_bias = out("gate_up_bias"),
                              .down = out("down_proj"),
                              .down_bias = out("down_bias"),
                              .router = out("router"),
                              .router_bias = out("router_bias"),
                              .shared_gate_up = out("shared_gate_up"),
                              .shared_down = out("shared_down"),
                              .shared_gate = out("shared_gate"),
                              .shared_up = out("shared_up"),
                              .topk_weights = out("topk_weights"),
                              .accumulates = accumulates};
    CallOptions options;
    options.groups = static_cast<uint32_t>(groups);
    options.order = order_of(std::move(order));
    options.perturbation = static_cast<uint64_t>(perturbation);
    options.record_events = trace;
    return as_rows(context->backward(*kept, gradients, options));
  });
}

}  // namespace
}  // namespace flashmoe::cpu

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout_fields, flashmoe::cpu::layout_fields)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(option_names, flashmoe::cpu::option_names)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(training_bytes, flashmoe::cpu::training_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows_of_rank, flashmoe::cpu::rows_of_rank)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantise_rows, flashmoe::cpu::quantise_rows)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_capacity, flashmoe::cpu::capacity_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(placement_owners, flashmoe::cpu::placement_owners)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(end_calls, flashmoe::cpu::end_calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_create, flashmoe::cpu::context_create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(limits_difference, flashmoe::cpu::limits_difference)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(network_open, flashmoe::cpu::network_open)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(network_address, flashmoe::cpu::network_address)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(network_context, flashmoe::cpu::network_context)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(network_await, flashmoe::cpu::network_await)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(network_crossed, flashmoe::cpu::network_crossed)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_close, flashmoe::cpu::context_close)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_bytes, flashmoe::cpu::context_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_refuse, flashmoe::cpu::context_refuse)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_set_tile, flashmoe::cpu::context_set_tile)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_layer, flashmoe::cpu::context_layer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kept_calls, flashmoe::cpu::kept_calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_backward, flashmoe::cpu::context_backward)

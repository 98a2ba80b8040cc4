// What Python calls of the CPU engine, through apache-tvm-ffi: contexts by handle, tensors as DLPack views, errors by
// kind. (The CUDA engine: bindings/cuda.cpp.)
//
// Python has checked every argument against its documented domain (python/flashmoe/arguments.py); here only what would
// otherwise corrupt memory is checked again.
#include <sys/syscall.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <atomic>

#include "bindings/codec.h"
#include "bindings/registry.h"
#include "cpu/context.h"
#include "host/interrupt.h"

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

FieldRows field_rows(const Limits& limits) {
  FieldRows rows;
  append_fields(rows, kHeapTable, limits, "heap");
  append_fields(rows, kWorkTable, limits, "workspace");
  if (limits.rdma != 0) append_fields(rows, kPutTable, limits, "workspace");
  return rows;
}

}  // namespace flashmoe

namespace flashmoe::cpu {
namespace {

FieldRows layout_fields(Map limits) {
  return guarded([&] { return field_rows(limits_of(limits)); });
}

int64_t rows_of_rank(Map limits) {
  return guarded([&] { return static_cast<int64_t>(limits_of(limits).rows_of_rank()); });
}

// The names of every option's values, in the order of their numbers.
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
          {"phase", names<Phase>()}};
}

int64_t capacity_of(double factor, int64_t tokens, int64_t top_k, int64_t experts) {
  return expert_capacity(factor, static_cast<uint32_t>(tokens), static_cast<uint32_t>(top_k),
                         static_cast<uint32_t>(experts));
}

long this_thread() {
  return syscall(SYS_gettid);
}

// The thread that ends Python, once it does; 0: none yet. All others are to come to an end (python/flashmoe/ending.py).
std::atomic<long> ended_by{0};

void end_calls() {
  ended_by = this_thread();
}

// Python's signal handlers run in the main thread, when it asks. Others need not wait for the interpreter's lock.
void end_if_interrupted() {
  if (const long by = ended_by; by != 0 && by != this_thread()) {
    throw host::Error(host::Error::Kind::kOther, "the process ends");
  }
  if (this_thread() != getpid()) return;
  if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
}

[[maybe_unused]] const bool kHooked = (host::check_interrupt = end_if_interrupted, true);  // when the library is loaded

int64_t context_create(Map map, int64_t rank, ffi::String name, int64_t timeout_ns) {
  return guarded([&] {
    const Limits limits = limits_of(map);
    const uint64_t heap_bytes = make_heap_layout(limits).bytes;
    auto group = limits.ranks == 1 ? host::make_single_rank_group(heap_bytes)
                                   : host::join_process_group(name, static_cast<uint32_t>(rank), limits, heap_bytes,
                                                              static_cast<uint64_t>(timeout_ns));
    return registry<Context>().add(std::make_shared<Context>(std::move(group), static_cast<uint32_t>(rank), limits,
                                                             static_cast<uint64_t>(timeout_ns)));
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

void context_set_tile(int64_t handle, int64_t rows, int64_t columns) {
  guarded(
      [&] { registry<Context>().get(handle)->set_tile(static_cast<uint32_t>(rows), static_cast<uint32_t>(columns)); });
}

Layer layer_with(const LayerSpec& spec, ffi::Map<ffi::String, ffi::Tensor> tensors) {
  Operands t(std::move(tensors));
  const bool routed = spec.routing == Routing::kSoftmax;
  Layer l;
  l.spec = spec;
  l.x = t.take<void>("x");
  l.gate_up = t.take<void>("gate_up_proj");
  l.gate_up_bias = t.take<void>("gate_up_bias", spec.gate_up_bias);
  l.down = t.take<void>("down_proj");
  l.down_bias = t.take<void>("down_bias", spec.down_bias);
  l.router = t.take<void>("router", routed);
  l.router_bias = t.take<void>("router_bias", spec.router_bias);
  l.topk_ids = t.take<int32_t>("topk_ids", !routed);
  l.topk_weights = t.take<float>("topk_weights", !routed);
  l.out = t.take<void>("out");
  t.done();
  return l;
}

CallOptions options_of(const ffi::Array<int64_t>& owners, Map order, Map call) {
  CallOptions o;
  o.placement = ranks_of(owners);
  o.order = order_of(std::move(order));
  Fields f("call", std::move(call));
  f("tokens", o.tokens);
  f("groups", o.groups);
  f("trace", o.record_events);
  f("perturbation", o.perturbation);
  f.done();
  return o;
}

// Copies the call's routing to topk_ids and topk_weights [T, K], and returns its report; events as rows of six.
Map context_call(int64_t handle, Map layer, ffi::Array<int64_t> owners, Map order, Map call,
                 ffi::Map<ffi::String, ffi::Tensor> tensors, ffi::Tensor topk_ids, ffi::Tensor topk_weights) {
  return guarded([&] {
    const auto context = registry<Context>().get(handle);
    const LayerSpec spec = layer_of(layer);
    const CallOptions o = options_of(owners, order, call);
    const CallReport r =
        context->call(layer_with(spec, tensors), o,
                      {static_cast<int32_t*>(topk_ids.data_ptr()), static_cast<float*>(topk_weights.data_ptr())});
    Map out;
    auto set = [&](const char* name, uint64_t v) { out.Set(name, static_cast<int64_t>(v)); };
    set("wall_ns", r.wall_ns);
    set("tiles", r.tiles);
    set("tile_rows", r.tile_rows);
    set("rows_sent", r.rows_sent);
    set("entries_sent", r.entries_sent);
    set("return_rows_sent", r.return_rows_sent);
    set("dropped", r.dropped);
    ffi::Array<int64_t> ns, count, events;
    for (uint32_t p = 0; p < kPhases; ++p) {
      ns.push_back(static_cast<int64_t>(r.ns[p]));
      count.push_back(static_cast<int64_t>(r.count[p]));
    }
    for (const Event& e : r.events) {
      for (const uint64_t v : {uint64_t{e.actor}, static_cast<uint64_t>(e.phase), e.start_ns, e.end_ns,
                               uint64_t{e.index}, uint64_t{e.column}}) {
        events.push_back(static_cast<int64_t>(v));
      }
    }
    out.Set("ns", ns);
    out.Set("count", count);
    out.Set("events", events);
    return out;
  });
}

}  // namespace
}  // namespace flashmoe::cpu

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout_fields, flashmoe::cpu::layout_fields)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(option_names, flashmoe::cpu::option_names)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows_of_rank, flashmoe::cpu::rows_of_rank)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_capacity, flashmoe::cpu::capacity_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(end_calls, flashmoe::cpu::end_calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_create, flashmoe::cpu::context_create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_close, flashmoe::cpu::context_close)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_bytes, flashmoe::cpu::context_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_set_tile, flashmoe::cpu::context_set_tile)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_call, flashmoe::cpu::context_call)

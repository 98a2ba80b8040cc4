// What Python calls of the CPU engine, through apache-tvm-ffi: contexts by handle, tensors as DLPack views, errors by
// kind. (The CUDA engine: bindings/cuda.cpp.)
//
// Python has checked every argument against its documented domain (python/flashmoe/ops.py); here only what would
// otherwise corrupt memory is checked again.
#include "bindings/codec.h"

#include <sys/syscall.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

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
    ffi::Map<ffi::String, ffi::Any> row;
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

using Tensors = ffi::Map<ffi::String, ffi::Tensor>;

FieldRows layout_fields(Sizes sizes) {
  return field_rows(limits_of(sizes));
}

int64_t rows_of_rank(Sizes sizes) {
  return static_cast<int64_t>(limits_of(sizes).rows_of_rank());
}

int64_t capacity_of(double factor, int64_t tokens, int64_t top_k, int64_t experts) {
  return expert_capacity(factor, static_cast<uint32_t>(tokens), static_cast<uint32_t>(top_k),
                         static_cast<uint32_t>(experts));
}

// Python's signal handlers run in the main thread, when it asks. Others need not wait for the interpreter's lock.
void end_if_interrupted() {
  if (syscall(SYS_gettid) != getpid()) return;
  if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
}

[[maybe_unused]] const bool kHooked = (host::check_interrupt = end_if_interrupted, true);  // when the library is loaded

int64_t context_create(Sizes sizes, int64_t rank, ffi::String name, int64_t timeout_ns) {
  return guarded([&] {
    const Limits limits = limits_of(sizes);
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

template <class T>
T* data(const Tensors& tensors, const char* name) {
  const ffi::String key(name);
  if (!tensors.count(key)) return nullptr;
  const ffi::Tensor t = tensors.at(key);
  return reinterpret_cast<T*>(static_cast<uint8_t*>(t.data_ptr()) + t.byte_offset());
}

Layer layer_of(const Sizes& s, const Tensors& t) {
  Layer l;
  l.dtype = static_cast<DType>(size(s, "dtype"));
  l.activation = static_cast<Activation>(size(s, "activation"));
  l.renormalize = size(s, "renormalize") != 0;
  l.x = data<void>(t, "x");
  l.gate_up = data<void>(t, "gate_up_proj");
  l.gate_up_bias = data<void>(t, "gate_up_bias");
  l.down = data<void>(t, "down_proj");
  l.down_bias = data<void>(t, "down_bias");
  l.router = data<void>(t, "router");
  l.router_bias = data<void>(t, "router_bias");
  l.topk_ids = data<int32_t>(t, "topk_ids");
  l.topk_weights = data<float>(t, "topk_weights");
  l.out = data<void>(t, "out");
  return l;
}

CallOptions options_of(const Sizes& s, double capacity_factor, const ffi::Array<int64_t>& placement) {
  CallOptions o;
  o.tokens = size(s, "tokens");
  o.hidden = size(s, "hidden");
  o.intermediate = size(s, "intermediate");
  o.experts = size(s, "experts");
  o.top_k = size(s, "top_k");
  o.return_mode = static_cast<ReturnMode>(size(s, "return_mode"));
  o.capacity_factor = capacity_factor;
  for (const int64_t q : placement) o.placement.push_back(static_cast<uint32_t>(q));
  o.groups = size(s, "groups", o.groups);
  o.order.gemm1_lag = size(s, "gemm1_lag");
  o.order.raster = size(s, "raster", o.order.raster);
  o.order.window = size(s, "window");
  o.record_events = size(s, "trace") != 0;
  o.perturbation = size(s, "perturbation");
  return o;
}

// Copies the call's routing to topk_ids and topk_weights [T, K], and returns its report; events as rows of six.
ffi::Map<ffi::String, ffi::Any> context_call(int64_t handle, Sizes sizes, double capacity_factor,
                                             ffi::Array<int64_t> placement, Tensors tensors, ffi::Tensor topk_ids,
                                             ffi::Tensor topk_weights) {
  return guarded([&] {
    const auto context = registry<Context>().get(handle);
    const CallOptions o = options_of(sizes, capacity_factor, placement);
    const CallReport r =
        context->call(layer_of(sizes, tensors), o,
                      {static_cast<int32_t*>(topk_ids.data_ptr()), static_cast<float*>(topk_weights.data_ptr())});
    ffi::Map<ffi::String, ffi::Any> out;
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows_of_rank, flashmoe::cpu::rows_of_rank)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_capacity, flashmoe::cpu::capacity_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_create, flashmoe::cpu::context_create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_close, flashmoe::cpu::context_close)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_bytes, flashmoe::cpu::context_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_set_tile, flashmoe::cpu::context_set_tile)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_call, flashmoe::cpu::context_call)

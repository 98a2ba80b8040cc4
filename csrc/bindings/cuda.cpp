// The functions of the CUDA engine that Python calls. A layer's sizes, addresses and options are given once, as a map.
// A call then passes plain integers, because it takes only a few microseconds, most of them for the launch.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "bindings/codec.h"
#include "bindings/registry.h"
#include "cuda/arch.h"
#include "cuda/context.h"
#include "cuda/limits.h"
#include "cuda/policy.h"

namespace flashmoe::cuda {
namespace {

// The architecture that is assumed for sizes when no GPU is asked.
constexpr const Arch& kAssumed = kHopper;

DriverStream stream_of(int64_t stream) {
  return reinterpret_cast<DriverStream>(stream);
}

std::shared_ptr<Context> context(int64_t handle) {
  return registry<Context>().get(handle);
}

// The fields of heap and workspace of a context of these limits. limits.processors must be the number of the GPU's
// multiprocessors. machines: see create().
FieldRows layout_fields(Map map, ffi::Array<int64_t> machines) {
  return guarded([&] {
    const Limits limits = spread_over(limits_of(map), machines);
    return field_rows(cuda_limits(kAssumed, limits, limits.processors), may_train_in_group(limits), may_refuse(limits),
                      true);
  });
}

// order: the context chooses the value of a field that is OrderPolicy::kBuiltIn. name and nvshmem: see Membership.
// machines: the machine of each rank; empty: all ranks are on one machine, as they really are. Tests name several
// machines: then calls behave as if the ranks were on them, although all memory is mapped. Returns None if some rank
// cannot map another's memory. Then all ranks must try again with limits whose `rdma` is 1.
ffi::Optional<ffi::Function> create(Map limits, Map order, int64_t rank, ffi::String name, ffi::String nvshmem,
                                    int64_t device, int64_t timeout_ns, ffi::Array<int64_t> machines) {
  return guarded([&]() -> ffi::Optional<ffi::Function> {
    const Membership who{static_cast<uint32_t>(rank), name, nvshmem};
    try {
      return owned(std::make_shared<Context>(static_cast<int>(device), who,
                                             spread_over(context_limits_of(limits), machines), order_of(order),
                                             static_cast<uint64_t>(timeout_ns), numbers_of(machines)));
    } catch (const NotMapped&) {
      return std::nullopt;
    }
  });
}

void close(int64_t handle) {
  registry<Context>().remove(handle);
}

ffi::String device_name_of(int64_t device) {
  return guarded([&] { return ffi::String(device_name(static_cast<int>(device))); });
}

// Device, processors, bytes of heap and of workspace, rows of a tile, weight rows of a task.
ffi::Array<int64_t> describe(int64_t handle) {
  return guarded([&] {
    const auto c = context(handle);
    return ffi::Array<int64_t>{c->device(),
                               c->processors(),
                               static_cast<int64_t>(c->heap_bytes()),
                               static_cast<int64_t>(c->workspace_bytes()),
                               c->arch().tile_rows,
                               c->arch().task_features};
  });
}

Matrix matrix(Fields& f, const std::string& name) {
  Matrix m;
  f(name.c_str(), m.data);
  f((name + "_row_bytes").c_str(), m.row_bytes);
  f((name + "_expert_bytes").c_str(), m.expert_bytes);
  return m;
}

// tensors: the address of each tensor, 0 if there is none; for matrices, also the bytes from row to row and from expert
// to expert. The other arguments: see Layer.
int64_t add_layer(int64_t handle, Map layer, ffi::Array<int64_t> placement, Map tensors, ffi::String cubin,
                  ffi::String few_cubin, bool traced, int64_t pass, bool redispatch, bool strict, int64_t stream) {
  return guarded([&] {
    Layer l;
    l.spec = layer_of(layer);
    l.placement = holders_of(placement);
    Fields f("tensors", tensors);
    l.gate_up = matrix(f, "gate_up_proj");
    l.down = matrix(f, "down_proj");
    l.router = matrix(f, "router");
    l.shared_gate_up = matrix(f, "shared_gate_up");
    l.shared_down = matrix(f, "shared_down");
    f("gate_up_bias", l.gate_up_bias);
    f("down_bias", l.down_bias);
    f("router_bias", l.router_bias);
    f("choice_bias", l.choice_bias);
    f("shared_gate", l.shared_gate);
    f("shared_up", l.shared_up);
    f("gate_up_scale", l.gate_up_scale);
    f("down_scale", l.down_scale);
    f("shared_gate_up_scale", l.shared_gate_up_scale);
    f("shared_down_scale", l.shared_down_scale);
    f("topk_ids_64", l.topk_ids_64);
    f("topk_weights_as_x", l.topk_weights_as_x);
    f.done();
    l.traced = traced;
    l.pass = static_cast<Pass>(pass);
    l.redispatch = redispatch;
    l.strict = strict;
    l.cubin = cubin;
    l.few_cubin = few_cubin;
    return context(handle)->add_layer(l, stream_of(stream));
  });
}

// [general, few, group], see KernelsOfLayer.
ffi::Array<int64_t> kernels_of_layer(int64_t handle, Map layer, int64_t pass) {
  return guarded([&] {
    const KernelsOfLayer needed = context(handle)->kernels_of(layer_of(layer), static_cast<Pass>(pass));
    return ffi::Array<int64_t>{needed.general, needed.few, needed.group};
  });
}

void beat(int64_t handle) {
  guarded([&] { context(handle)->beat(); });
}

void refuse(int64_t handle, ffi::String reason, int64_t stream) {
  guarded([&] { context(handle)->refuse(reason, stream_of(stream)); });
}

void remove_layer(int64_t handle, int64_t layer) {
  guarded([&] { context(handle)->remove_layer(layer); });
}

void call(int64_t handle, int64_t layer, int64_t stream, int64_t tokens, int64_t x, int64_t x_row_bytes,
          int64_t x_scale, int64_t out, int64_t topk_ids, int64_t topk_weights, int64_t load, int64_t router_logits,
          int64_t kept, int64_t routing) {
  guarded([&] {
    const TokenSpec t{.tokens = static_cast<uint32_t>(tokens),
                      .x = static_cast<uint64_t>(x),
                      .x_row_bytes = static_cast<uint64_t>(x_row_bytes),
                      .x_scale = static_cast<uint64_t>(x_scale),
                      .out = static_cast<uint64_t>(out),
                      .topk_ids = static_cast<uint64_t>(topk_ids),
                      .topk_weights = static_cast<uint64_t>(topk_weights),
                      .load = static_cast<uint64_t>(load),
                      .router_logits = static_cast<uint64_t>(router_logits),
                      .kept = static_cast<uint64_t>(kept),
                      .routing = static_cast<uint64_t>(routing)};
    context(handle)->call(layer, t, stream_of(stream));
  });
}

// gradients: the fields of GradientSpec, by name.
void backward(int64_t handle, int64_t layer, int64_t stream, int64_t tokens, int64_t y, int64_t x_out, Map gradients) {
  guarded([&] {
    GradientSpec g;
    Fields f("gradients", gradients);
    f("kept", g.kept);
    f("rows", g.rows.rows);
    f("received", g.rows.received);
    f("call", g.rows.call);
    f("room_rows", g.rows.room.rows);
    f("room_received", g.rows.room.received);
    f("pitch", g.rows.room.pitch);
    f("x", g.x);
    f("x_row_bytes", g.x_row_bytes);
    f("memory", g.memory);
    f("weights", g.weights);
    f("gate_up", g.gate_up);
    f("down", g.down);
    f("gate_up_bias", g.gate_up_bias);
    f("down_bias", g.down_bias);
    f("accumulates", g.accumulates);
    f("given_logit_gradients", g.given_logit_gradients);
    f("weights_by_bias", g.weights_by_bias);
    f("logit_gradients", g.logit_gradients);
    f("router", g.router);
    f("shared_gate_up", g.shared_gate_up);
    f("shared_down", g.shared_down);
    f("shared_up", g.shared_up);
    f("shared_logits", g.shared_logits);
    f.done();
    const auto c = context(handle);
    const TokenSpec t{
        .tokens = static_cast<uint32_t>(tokens), .x = static_cast<uint64_t>(y), .out = static_cast<uint64_t>(x_out)};
    c->backward(layer, t, g, stream_of(stream));
  });
}

// The fields of gpu::KeptRoom, in their order. A rank alone does not read them.
gpu::KeptRoom room_of(const ffi::Array<int64_t>& room) {
  const auto at = [&](int64_t i) { return static_cast<uint32_t>(room[i]); };
  return {at(0), at(1), at(2)};
}

// The fields of RoutingLayout for what a call of the layer keeps.
ffi::Array<int64_t> kept_routing(int64_t handle, int64_t layer, int64_t tokens, ffi::Array<int64_t> room) {
  return guarded([&] {
    const RoutingLayout r = context(handle)->kept_routing(layer, static_cast<uint32_t>(tokens), room_of(room));
    const auto as_given = [](uint64_t value) { return static_cast<int64_t>(value); };
    return ffi::Array<int64_t>{as_given(r.ids), as_given(r.weights), as_given(r.logits), as_given(r.bytes)};
  });
}

// For a rank alone: bytes that a call keeps for each token.
int64_t kept_token_bytes(Map layer) {
  return guarded([&] { return static_cast<int64_t>(KeptLayout(layer_of(std::move(layer)), 1).bytes); });
}

int64_t logit_pitch_of(int64_t experts) {
  return gpu::logit_pitch(static_cast<uint32_t>(experts));
}

// rows, received: see KeptRows. A rank alone does not read them.
int64_t pass_bytes(int64_t handle, int64_t layer, int64_t tokens, int64_t rows, int64_t received) {
  return guarded([&] {
    const KeptRows counted{static_cast<uint64_t>(rows), static_cast<uint64_t>(received)};
    return static_cast<int64_t>(context(handle)->pass_bytes(layer, static_cast<uint32_t>(tokens), counted));
  });
}

// For a layer that keeps, among several ranks.
int64_t call_bytes(int64_t handle, int64_t layer, int64_t stream) {
  return guarded([&] { return static_cast<int64_t>(context(handle)->call_bytes(layer, stream_of(stream))); });
}

ffi::Array<int64_t> expected_room(int64_t handle, int64_t layer) {
  return guarded([&] {
    const gpu::KeptRoom room = context(handle)->expected_room(layer);
    return ffi::Array<int64_t>{room.rows, room.received, room.pitch};
  });
}

void count_rows(int64_t handle, int64_t layer, int64_t stream, int64_t memory) {
  guarded([&] { context(handle)->count_rows(layer, static_cast<uint64_t>(memory), stream_of(stream)); });
}

void move_rows(int64_t handle, int64_t layer, int64_t stream, int64_t memory, int64_t kept, ffi::Array<int64_t> room) {
  guarded([&] {
    context(handle)->move_rows(layer, static_cast<uint64_t>(memory), static_cast<uint64_t>(kept), room_of(room),
                               stream_of(stream));
  });
}

// The fields of KeptRows; those of its room come last.
ffi::Array<int64_t> read_counts(int64_t handle, int64_t layer, ffi::Array<int64_t> room) {
  return guarded([&] {
    const KeptRows rows = context(handle)->read_counts(layer, room_of(room));
    const auto as_given = [](uint64_t value) { return static_cast<int64_t>(value); };
    return ffi::Array<int64_t>{as_given(rows.rows), as_given(rows.received), as_given(rows.call),
                               rows.room.rows,      rows.room.received,      rows.room.pitch};
  });
}

// The bytes that training a layer takes on a context of these limits, if every rank has max_tokens tokens and all
// experts have equal loads: what a call keeps, what a backward pass takes until it ends, and among several ranks also
// what a call that keeps takes until it ends.
Map training_bytes(Map layer, Map map) {
  return guarded([&] {
    const LayerSpec spec = layer_of(std::move(layer));
    Limits limits = limits_of(std::move(map));
    limits = cuda_limits(kAssumed, limits, limits.processors);
    const uint64_t tokens = limits.max_tokens, experts = limits.max_local_experts + shared_experts(spec.shared);
    const uint64_t rows_kept = tokens * rows_of_token(spec), choices = uint64_t{spec.top_k} * spec.slices;
    const bool alone = limits.ranks == 1, redispatch = !alone && limits.redispatch != 0;
    const uint64_t received = tokens * min_of<uint64_t>(choices, limits.ranks - 1);
    Map out;
    const auto set = [&](const char* name, uint64_t bytes) { out.Set(name, static_cast<int64_t>(bytes)); };
    const auto set_routing = [&](const RoutingLayout& r) {
      set("kept_routing", r.logits - r.ids);
      set("kept_logits", r.bytes - r.logits);
    };
    const PassLayout pass(kAssumed, spec, tokens, rows_kept, experts, received, redispatch, alone);
    set("tile_rows", pass.plain);
    set("pass_tokens", pass.gather - pass.received);
    set("gather", pass.parts - pass.gather);
    set("weight_parts", pass.bytes - pass.parts);
    if (alone) {
      const KeptLayout kept(spec, tokens);
      set("kept_rows", kept.ids);
      set_routing(kept);
      return out;
    }
    const auto count = [](uint64_t n) { return static_cast<uint32_t>(n); };
    const gpu::KeptRoom room{count(rows_kept), redispatch ? 0 : count(received), count(tokens)};
    const GroupKeptLayout kept(spec, tokens, limits.ranks, experts, room);
    set("kept_rows", kept.received);
    set("kept_tokens", kept.numbers - kept.received);
    set("kept_numbers", kept.routing.ids - kept.numbers);
    set_routing(kept.routing);
    const GroupCallLayout call(spec, limits, experts, redispatch);
    set("call_rows", call.received);
    set("call_tokens", call.ranks - call.received);
    set("call_numbers", call.bytes - call.ranks);
    return out;
  });
}

void synchronize(int64_t handle, int64_t stream) {
  guarded([&] { context(handle)->synchronize(stream_of(stream)); });
}

// Fills ids and weights, both [T, K], with the routing of the last call.
void read_routing(int64_t handle, ffi::Tensor ids, ffi::Tensor weights) {
  guarded([&] {
    const auto tokens = static_cast<uint32_t>(ids.shape()[0]), top_k = static_cast<uint32_t>(ids.shape()[1]);
    context(handle)->read_routing(tokens, top_k, static_cast<int32_t*>(ids.data_ptr()),
                                  static_cast<float*>(weights.data_ptr()));
  });
}

// Adds to rows [R, El], int32, the number of rows that each rank's tokens have with each of this rank's experts in the
// last call, which must have been a call of this layer. Returns the fields of RowsSent.
ffi::Array<int64_t> read_received(int64_t handle, int64_t layer, ffi::Tensor rows) {
  return guarded([&] {
    const RowsSent sent = context(handle)->read_received(layer, static_cast<int32_t*>(rows.data_ptr()));
    return ffi::Array<int64_t>{static_cast<int64_t>(sent.returned), static_cast<int64_t>(sent.passed_on)};
  });
}

int64_t trace_bytes(int64_t handle) {
  return guarded([&] { return static_cast<int64_t>(context(handle)->trace_bytes()); });
}

void read_trace(int64_t handle, ffi::Tensor to) {
  guarded([&] { context(handle)->read_trace(static_cast<uint8_t*>(to.data_ptr())); });
}

// [host_ns, device_ns, error_ns], see ClockReading. For a layer that is traced.
ffi::Array<int64_t> read_clock_of(int64_t handle, int64_t layer, int64_t stream) {
  return guarded([&] {
    const ClockReading r = context(handle)->read_clock(layer, stream_of(stream));
    return ffi::Array<int64_t>{static_cast<int64_t>(r.host_ns), static_cast<int64_t>(r.device_ns),
                               static_cast<int64_t>(r.error_ns)};
  });
}

int64_t token_block_of(int64_t handle, int64_t tokens, int64_t experts, int64_t top_k) {
  return guarded([&]() -> int64_t {
    const auto c = context(handle);
    return token_block(c->arch(), static_cast<uint32_t>(tokens), static_cast<uint32_t>(experts),
                       static_cast<uint32_t>(top_k), c->processors());
  });
}

bool reduces_of(int64_t ranks, int64_t top_k, int64_t intermediate) {
  return reduces(static_cast<uint32_t>(ranks), static_cast<uint32_t>(top_k), static_cast<uint32_t>(intermediate));
}

// The first block of columns of each return group, and the end of the last group.
ffi::Array<int64_t> return_groups_of(int64_t columns, int64_t return_mode, bool whole) {
  uint16_t first[kMaxGroups + 1];
  const uint32_t groups =
      return_groups(static_cast<uint32_t>(columns), static_cast<ReturnMode>(return_mode), whole, first);
  ffi::Array<int64_t> out;
  for (uint32_t g = 0; g <= groups; ++g) out.push_back(first[g]);
  return out;
}

}  // namespace
}  // namespace flashmoe::cuda

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_layout_fields, flashmoe::cuda::layout_fields)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_create, flashmoe::cuda::create)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_close, flashmoe::cuda::close)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_device_name, flashmoe::cuda::device_name_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_describe, flashmoe::cuda::describe)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_add_layer, flashmoe::cuda::add_layer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_kernels_of, flashmoe::cuda::kernels_of_layer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_beat, flashmoe::cuda::beat)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_refuse, flashmoe::cuda::refuse)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_remove_layer, flashmoe::cuda::remove_layer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_call, flashmoe::cuda::call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_backward, flashmoe::cuda::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_kept_routing, flashmoe::cuda::kept_routing)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_kept_token_bytes, flashmoe::cuda::kept_token_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_logit_pitch, flashmoe::cuda::logit_pitch_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_pass_bytes, flashmoe::cuda::pass_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_call_bytes, flashmoe::cuda::call_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_expected_room, flashmoe::cuda::expected_room)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_count_rows, flashmoe::cuda::count_rows)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_move_rows, flashmoe::cuda::move_rows)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_read_counts, flashmoe::cuda::read_counts)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_training_bytes, flashmoe::cuda::training_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_synchronize, flashmoe::cuda::synchronize)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_read_routing, flashmoe::cuda::read_routing)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_read_received, flashmoe::cuda::read_received)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_trace_bytes, flashmoe::cuda::trace_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_read_trace, flashmoe::cuda::read_trace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_read_clock, flashmoe::cuda::read_clock_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_reduces, flashmoe::cuda::reduces_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_token_block, flashmoe::cuda::token_block_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_return_groups, flashmoe::cuda::return_groups_of)

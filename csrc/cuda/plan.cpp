#include "cuda/plan.h"

#include <bit>

#include "cuda/policy.h"
#include "flashmoe/gpu/decode_memory.h"
#include "flashmoe/protocol/gradients.h"
#include "host/agreement.h"

namespace flashmoe::cuda {
namespace {

Shape shape_of(const Common& common, const Call& c, const LayerSpec& spec, Pass pass) {
  return {.ranks = c.shape.ranks,
          .local_experts = c.shape.local_experts,
          .hidden = c.shape.hidden,
          .intermediate = c.shape.intermediate,
          .top_k = c.shape.top_k,
          .x_bytes = element_bytes(spec.token_type),
          .intermediate_bytes = element_bytes(spec.intermediate_type),
          .return_bytes = element_bytes(spec.return_type),
          .tokens = c.shape.tokens,
          .experts = c.shape.experts,
          .first_columns = c.policy.columns[kFirst],
          .returning_k = pass == Pass::kBackward ? spec.gate_up_rows() : spec.intermediate,
          .work_behind = pass != Pass::kInference || common.limits.rdma != 0 || common.limits.machine_ranks != 0};
}

// Columns of results that a task of each product has. On the host, kProgram is the program of a forward pass. It serves
// backward passes too, whose tasks have as many columns as those of a forward pass without a gate.
std::array<uint32_t, kProducts> columns_of(const Arch& arch, const Layer& layer) {
  return arch.columns_per_task(layer.spec.gated() && layer.pass != Pass::kBackward);
}

Call call_of(const Common& common, const Layer& layer, const Placement& where) {
  const LayerSpec& spec = layer.spec;
  Call c = common.call;
  c.set_layer(spec);
  if (layer.pass == Pass::kBackward) {  // the intermediate rows of a backward pass are the pre-activations' gradients
    c.memory.intermediate_row_bytes = spec.gate_up_rows() * element_bytes(spec.intermediate_type);
  }
  c.shape.local_experts = where.local_experts;
  c.placement = {.owner = where.owner, .by_owner = where.by_owner, .owner_base = where.owner_base};
  c.cut_columns(columns_of(common.arch, layer));
  const bool alone = c.shape.ranks == 1;  // a rank alone returns nothing to others
  if (!alone) c.shape.return_mode = spec.return_mode;
  c.policy.groups = return_groups(c.policy.columns[kReturning], c.shape.return_mode, alone || common.limits.rdma != 0,
                                  c.policy.group_first);
  if (!alone && (layer.pass == Pass::kBackward || (layer.pass == Pass::kForward && !layer.redispatch))) {
    c.policy.keepers =
        static_cast<uint16_t>(common.arch.keepers_of(c.shape.ranks, c.shape.local_experts, common.limits.processors));
  }
  if (!alone) c.config = host::make_config(c, spec, layer.placement, common.arch.return_columns);
  return c;
}

gpu::WeightRows rows_of(const Matrix& m) {
  return {reinterpret_cast<const uint8_t*>(m.data), m.row_bytes, m.expert_bytes};
}

// A row of weights as the copy engine sees it: a row of elements, or of bytes if elements are smaller than a byte.
struct MapRow {
  uint32_t bytes, elements;  // bytes of an element; elements of the row

  MapRow(DType type, uint32_t columns)
      : bytes(max_of(encoding_of(type).bits / 8, 1u)),
        elements(static_cast<uint32_t>(stored_bytes(type, columns) / bytes)) {}
};

// The shapes for the matrices of `experts` experts, or of this number of slices of the shared expert.
TensorMapShape gate_up_map(const Arch& arch, const LayerSpec& spec, const Matrix& m, uint32_t experts,
                           gpu::GatedRows gated) {
  const uint32_t bytes = element_bytes(spec.weight_type);
  if (!spec.transposed) {
    const MapRow row(spec.weight_type, spec.hidden);
    return gate_up_shape(arch, m, row.bytes, row.elements, spec.intermediate, experts, spec.gated(), gated);
  }
  const uint32_t halves = spec.gated() && !spec.interleaved ? 2 : 1;
  return transposed_shape(arch, m, bytes, spec.gate_up_rows() / halves, halves, gated.up, spec.hidden, experts);
}

TensorMapShape down_map(const Arch& arch, const LayerSpec& spec, const Matrix& m, uint32_t experts) {
  const uint32_t bytes = element_bytes(spec.weight_type);
  if (!spec.transposed) {
    const MapRow row(spec.weight_type, spec.intermediate);
    return down_shape(arch, m, row.bytes, spec.hidden, row.elements, experts);
  }
  return transposed_shape(arch, m, bytes, spec.hidden, 1, 0, spec.intermediate, experts);
}

// The shapes for a backward pass. It multiplies by the same matrices as the forward pass, but contracts over the other
// axis: H of down_proj, and all rows of gate_up_proj. So a matrix that is K-major in the forward pass is MN-major here.
TensorMapShape backward_gate_up_map(const Arch& arch, const LayerSpec& spec, const Matrix& m, uint32_t experts) {
  const uint32_t bytes = element_bytes(spec.weight_type), rows = spec.gate_up_rows();
  if (spec.transposed) return down_shape(arch, m, bytes, spec.hidden, rows, experts);
  return transposed_shape(arch, m, bytes, spec.hidden, 1, 0, rows, experts);
}
TensorMapShape backward_down_map(const Arch& arch, const LayerSpec& spec, const Matrix& m, uint32_t experts) {
  const uint32_t bytes = element_bytes(spec.weight_type);
  if (spec.transposed) return down_shape(arch, m, bytes, spec.intermediate, spec.hidden, experts);
  return transposed_shape(arch, m, bytes, spec.intermediate, 1, 0, spec.hidden, experts);
}

// Sets the maps of the shared expert for a backward pass; each of its slices is an expert. dX contracts over the rows
// of a slice. If all gates lie before all ups, a slice's rows lie in two parts, `to_up` bytes apart. Then the parts are
// the map's dimension 2.
void set_shared_backward(const Arch& arch, gpu::KernelArgs& a, const LayerSpec& spec, Matrix gate_up, uint64_t to_up,
                         const Matrix& down) {
  const uint32_t parts = spec.gated() && !spec.interleaved ? 2 : 1, rows = spec.gate_up_rows() / parts;
  const uint32_t bytes = element_bytes(spec.weight_type);
  gate_up.expert_bytes = rows * (spec.transposed ? uint64_t{bytes} : gate_up.row_bytes);
  TensorMapShape shape = spec.transposed ? down_shape(arch, gate_up, bytes, spec.hidden, rows, spec.shared)
                                         : transposed_shape(arch, gate_up, bytes, spec.hidden, 1, 0, rows, spec.shared);
  if (parts == 2) shape.dims[2] = parts, shape.strides[1] = to_up;
  a.shared_gate_up = encode(shape, gate_up.data, spec.weight_type, "shared_gate_up");
  a.shared_down = encode(backward_down_map(arch, spec, down, spec.shared), down.data, spec.weight_type, "shared_down");
}

// Whether the kernel for a few tokens can read the layer's matrices, and these have 16 bits.
bool few_in_16_bits(Pass pass, const LayerSpec& spec) {
  return pass == Pass::kInference && !spec.transposed && encoding_of(spec.weight_type).bits == 16;
}

// Whether that kernel may halve tasks (decode/tasks.cuh).
bool may_halve(const gpu::KernelArgs& a, const Layer& layer) {
  return few_in_16_bits(layer.pass, layer.spec) && a.call.shape.ranks == 1;
}

// The map of the same matrices for halved tasks.
gpu::TensorMap encode_halved(TensorMapShape shape, uint64_t data, DType type, const char* what) {
  shape.box[3] /= 2;
  return encode(shape, data, type, what, kMapPromotionNone);
}

// Sets the shared expert's matrices as if each slice of width I were an expert. A slice is some rows of gate_up and
// some columns of down. In transposed weights it is columns of gate_up and rows of down.
void set_shared(const Arch& arch, gpu::KernelArgs& a, const Layer& layer, int promotion) {
  const LayerSpec& spec = layer.spec;
  const uint32_t bytes = element_bytes(spec.weight_type);
  Matrix gate_up = layer.shared_gate_up, down = layer.shared_down;
  a.shared_gated = spec.interleaved ? a.gated : gpu::GatedRows{1, spec.shared * spec.intermediate};
  const uint64_t columns = uint64_t{spec.intermediate} * a.shared_gated.step;
  gate_up.expert_bytes = columns * (spec.transposed ? bytes : gate_up.row_bytes);
  down.expert_bytes =
      spec.transposed ? spec.intermediate * down.row_bytes : stored_bytes(spec.weight_type, spec.intermediate);
  a.shared_gate = reinterpret_cast<const void*>(layer.shared_gate);
  const bool apart = layer.shared_up != 0;
  const uint64_t in_one = a.shared_gated.up * (spec.transposed ? bytes : gate_up.row_bytes);
  const uint64_t to_up = apart ? layer.shared_up - gate_up.data : in_one;
  if (layer.pass == Pass::kBackward) return set_shared_backward(arch, a, spec, gate_up, to_up, down);
  TensorMapShape shape = gate_up_map(arch, spec, gate_up, spec.shared, a.shared_gated);
  if (apart) shape.strides[1] = to_up;
  const TensorMapShape of_down = down_map(arch, spec, down, spec.shared);
  a.shared_gate_up = encode(shape, gate_up.data, spec.weight_type, "shared_gate_up", promotion);
  a.shared_down = encode(of_down, down.data, spec.weight_type, "shared_down", promotion);
  if (!may_halve(a, layer)) return;
  a.halved.shared_gate_up = encode_halved(shape, gate_up.data, spec.weight_type, "shared_gate_up");
  a.halved.shared_down = encode_halved(of_down, down.data, spec.weight_type, "shared_down");
}

// promotion: as in encode(), of the maps of experts' matrices.
void set_weights(const Arch& arch, gpu::KernelArgs& a, const Layer& layer, int promotion) {
  const LayerSpec& spec = layer.spec;
  const DType type = spec.weight_type;
  const uint32_t experts = a.call.shape.routed_local_experts();
  if (experts != 0) {  // otherwise this rank has no tasks for them
    const bool backward = layer.pass == Pass::kBackward;
    const TensorMapShape gate_up = backward ? backward_gate_up_map(arch, spec, layer.gate_up, experts)
                                            : gate_up_map(arch, spec, layer.gate_up, experts, a.gated);
    const TensorMapShape down =
        backward ? backward_down_map(arch, spec, layer.down, experts) : down_map(arch, spec, layer.down, experts);
    a.gate_up = encode(gate_up, layer.gate_up.data, type, "gate_up_proj", promotion);
    a.down = encode(down, layer.down.data, type, "down_proj", promotion);
    if (may_halve(a, layer)) {
      a.halved.gate_up = encode_halved(gate_up, layer.gate_up.data, type, "gate_up_proj");
      a.halved.down = encode_halved(down, layer.down.data, type, "down_proj");
    }
  }
  if (spec.shared != 0) set_shared(arch, a, layer, promotion);
  a.router_rows = rows_of(layer.router);
  if (layer.router.data != 0) {
    const uint32_t bytes = element_bytes(spec.y_type);
    a.router = encode(layer.pass == Pass::kBackward
                          ? spans_shape(arch, layer.router.row_bytes, bytes, spec.hidden, spec.experts)
                          : router_shape(arch, layer.router, bytes, spec.hidden, spec.experts),
                      layer.router.data, spec.y_type, "router");
  }
  a.gate_up_bias = reinterpret_cast<const void*>(layer.gate_up_bias);
  a.down_bias = reinterpret_cast<const void*>(layer.down_bias);
  a.router_bias = reinterpret_cast<const void*>(layer.router_bias);
}

// The scales of matrices of `rows` by `columns`. The rows are cut into `parts`, each with blocks of its own. Each part
// is cut into `slices`; the kernel takes a slice of every part for an expert. With one slice, the whole matrix is the
// expert.
gpu::ScaleTable scale_table(const LayerSpec& spec, uint64_t data, uint32_t rows, uint32_t parts, uint32_t columns,
                            uint32_t slices) {
  const Encoding encoding = encoding_of(spec.weight_type);
  gpu::ScaleTable t{};
  t.data = reinterpret_cast<const void*>(data);
  const uint32_t part = rows / parts;
  if (spec.weight_scales == WeightScales::kTensor) t.expert = slices == 1 ? 1 : 0;
  if (spec.weight_scales == WeightScales::kRow) t.expert = slices == 1 ? rows : part / slices;
  if (spec.weight_scales != WeightScales::kBlock) return t;
  t.row = ceil_div(columns, encoding.block_columns);
  t.step = 1;
  t.blocks = ceil_div(part / slices, encoding.block_rows);
  t.up = ceil_div(part, encoding.block_rows) * t.row;
  t.expert = (slices == 1 ? parts : 1) * t.blocks * t.row;
  return t;
}

void set_scales(gpu::KernelArgs& a, const Layer& layer) {
  const LayerSpec& spec = layer.spec;
  const uint32_t parts = spec.gated() && !spec.interleaved ? 2 : 1;
  a.scales_by_row = spec.weight_scales == WeightScales::kRow ? 1 : 0;
  a.gate_up_scale = scale_table(spec, layer.gate_up_scale, spec.gate_up_rows(), parts, spec.hidden, 1);
  a.down_scale = scale_table(spec, layer.down_scale, spec.hidden, 1, spec.intermediate, 1);
  if (spec.shared == 0) return;
  const uint32_t width = spec.shared * spec.intermediate;
  a.shared_gate_up_scale =
      scale_table(spec, layer.shared_gate_up_scale, spec.shared * spec.gate_up_rows(), parts, spec.hidden, spec.shared);
  a.shared_down_scale = scale_table(spec, layer.shared_down_scale, spec.hidden, 1, width, 1);
}

WeightMaps maps_of(const gpu::KernelArgs& a) {
  return {a.gate_up, a.down, a.shared_gate_up, a.shared_down};
}

gpu::RouterRule rule_of(const Layer& layer) {
  const LayerSpec& spec = layer.spec;
  return {.sigmoid = spec.routing == Routing::kSigmoid ? 1u : 0u,
          .renormalize = spec.renormalize ? 1u : 0u,
          .rounds_logits = spec.round_logits ? 1u : 0u,
          .groups = spec.groups,
          .top_groups = spec.top_groups,
          .routed_scale = spec.routed_scale,
          .choice_bias = reinterpret_cast<const float*>(layer.choice_bias)};
}

// Encodes the map of the rows between the two GEMMs, which lie in the workspace.
void set_intermediate_rows(const Arch& arch, gpu::KernelArgs& a, const LayerSpec& spec, const Limits& limits) {
  const auto rows = reinterpret_cast<uint64_t>(a.call.intermediate_row(0, 0));
  const uint64_t tiles = limits.max_tiles() + limits.max_later_slices();
  if (spec.quantised()) {
    const uint64_t tile_bytes = reinterpret_cast<uint64_t>(a.call.intermediate_row(1, 0)) - rows;
    a.intermediate = encode(quantised_tiles_shape(arch, tile_bytes, spec.intermediate, tiles), rows,
                            spec.intermediate_type, "the intermediate rows");
    return;
  }
  const uint64_t pitch = reinterpret_cast<uint64_t>(a.call.intermediate_row(0, 1)) - rows;
  a.intermediate = encode(
      rows_shape(arch, pitch, element_bytes(spec.intermediate_type), spec.intermediate, tiles * limits.tile_rows), rows,
      spec.intermediate_type, "the intermediate rows");
}

}  // namespace

Placement::Placement(const Device& device, const host::PlacementTables& t, uint32_t rank)
    : local_experts(t.local_experts(rank)) {
  std::vector<uint32_t> words(t.owner);
  words.insert(words.end(), t.by_owner.begin(), t.by_owner.end());
  words.insert(words.end(), t.owner_base.begin(), t.owner_base.end());
  const uint64_t bytes = words.size() * sizeof(uint32_t);
  memory = DeviceMemory(device, bytes, "placement");
  memory.upload(words.data(), bytes);
  owner = memory.as<uint32_t>();
  by_owner = owner + t.owner.size();
  owner_base = by_owner + t.by_owner.size();
}

Plan::Plan(const Common& common, const Layer& layer, const Placement& where, const LoadedKernels& loaded,
           uint8_t* trace)
    : arch(common.arch),
      kernels(loaded),
      spec(layer.spec),
      pass(layer.pass),
      redispatch(layer.redispatch && common.limits.ranks != 1),
      few_in_group(layer.pass == Pass::kInference && cuda::few_in_group(common.limits, layer.spec)),
      placement(layer.placement) {
  args.call = call_of(common, layer, where);
  args.gated = spec.interleaved ? gpu::GatedRows{2, 1} : gpu::GatedRows{1, spec.intermediate};
  args.clamped = {spec.limit, spec.alpha, spec.up_offset};
  args.few_layout = gpu::make_few_layout(common.limits);
  args.few_choices = spec.top_k + spec.shared;
  args.weights_on_input = spec.weights_on_input ? 1 : 0;
  args.rule = rule_of(layer);
  set_weights(arch, args, layer, kMapPromotion256B);
  general_maps_ = few_maps_ = maps_of(args);
  if (few_in_16_bits(pass, spec)) {
    // With weights in 16 bits, the L2 loads no more for the kernel for a few tokens than the copy engine asks for. If
    // it fetched 256 bytes for each 128, most calls of 8 to 256 tokens would take 1 to 3 % longer (docs/measured.md).
    gpu::KernelArgs few = args;
    set_weights(arch, few, layer, kMapPromotionNone);
    few_maps_ = maps_of(few);
  }
  if (has_scales(spec.weight_type)) set_scales(args, layer);
  if (pass != Pass::kBackward) set_intermediate_rows(arch, args, spec, common.limits);  // otherwise see set_gradients()
  args.topk_ids_64 = layer.topk_ids_64;
  args.topk_weights_as_x = layer.topk_weights_as_x;
  args.host_fault = common.fault;
  args.reasons = common.reasons;
  args.strict = layer.strict ? 1 : 0;
  args.trace = trace;
  if (trains_in_group()) {
    const GradientLayout gradients = make_gradient_layout(common.limits);
    constexpr auto kWeights = static_cast<uint32_t>(GradientField::kWeights);
    args.group.weights_at = common.call.memory.heap_layout.bytes + gradients.offset[kWeights];
    args.group.weights_pitch = static_cast<uint32_t>(gradients.stride[kWeights][0]);
    args.group.x_behind = redispatch ? redispatched_behind(args.call, gradients) : 0;
  }
}

bool Plan::few() const {
  if (few_in_group) return true;
  return pass == Pass::kInference && is_few(args.call.shape, spec);
}
uint32_t Plan::most_few() const {
  return few_most(args.call.shape, spec);
}

void Plan::set_tokens(const Common& common, const TokenSpec& t) {
  Call& c = args.call;
  c.shape.tokens = t.tokens;
  const Shape shape = shape_of(common, c, spec, pass);
  c.policy.order = task_order(arch, shape, spec.return_mode, common.limits.processors, common.asked);
  // After the stop words, clusters of a backward pass compute gradients of weights. If clusters stopped early, they
  // would only begin these earlier.
  if (pass == Pass::kBackward) c.policy.order.link_clusters = 0;
  args.few_parts = few_parts(arch, c.shape, encoding_of(spec.weight_type).bits);
  const WeightMaps& maps = few() ? few_maps_ : general_maps_;
  args.gate_up = maps.gate_up, args.down = maps.down;
  args.shared_gate_up = maps.shared_gate_up, args.shared_down = maps.shared_down;
  c.policy.log2_block = static_cast<uint32_t>(
      std::countr_zero(token_block(arch, t.tokens, c.shape.experts, c.shape.top_k, common.limits.processors)));
  c.shape.capacity = expert_capacity(spec.capacity_factor, t.tokens, spec.top_k, spec.experts);
  c.policy.joined = pass != Pass::kBackward && joins_rows(arch, shape, t.tokens, c.shape.capacity) ? 1 : 0;
  args.x = reinterpret_cast<const uint8_t*>(t.x);
  args.x_row_bytes = t.x_row_bytes;
  args.x_scale = reinterpret_cast<const float*>(t.x_scale);
  args.out = reinterpret_cast<uint8_t*>(t.out);
  args.topk_ids = reinterpret_cast<const void*>(t.topk_ids);
  args.topk_weights = reinterpret_cast<const void*>(t.topk_weights);
  args.load = reinterpret_cast<uint64_t*>(t.load);
  args.router_logits = reinterpret_cast<float*>(t.router_logits);
  if (pass == Pass::kForward) set_kept(common, t);
  // Only the gate reads x by a tensor map, and the gate of the kernel for a few tokens does not.
  if (t.topk_ids == 0 && t.tokens != 0 && !few() && pass != Pass::kBackward) {
    args.tokens = encode(rows_shape(arch, t.x_row_bytes, element_bytes(spec.x_type), c.shape.hidden, t.tokens), t.x,
                         spec.x_type, "x");
  }
}

GroupKeptLayout Plan::kept_layout(uint64_t tokens, const gpu::KeptRoom& room) const {
  return {spec, tokens, args.call.shape.ranks, args.call.shape.local_experts, room};
}

RoutingLayout Plan::routing_layout(uint64_t tokens, const gpu::KeptRoom& room) const {
  return trains_in_group() ? kept_layout(tokens, room).routing : KeptLayout(spec, tokens);
}

bool Plan::suits(uint64_t tokens, const gpu::KeptRoom& room, const gpu::KeptRoom& needed) const {
  // Up to a fifth more than needed is accepted. The room stays allocated for as long as autograd's graph lives, but the
  // rows need not be moved once more.
  const auto bytes = [&](const gpu::KeptRoom& of) { return kept_layout(tokens, of).routing.logits; };
  return room.has(needed) && 5 * bytes(room) <= 6 * bytes(needed);
}

GroupCallLayout Plan::call_layout(const Common& common) const {
  return {spec, common.limits, args.call.shape.local_experts, redispatch};
}

PassLayout Plan::pass_layout(uint64_t tokens, const KeptRows& rows) const {
  const bool alone = !trains_in_group();
  return {arch,
          spec,
          tokens,
          alone ? tokens * rows_of_token(spec) : rows.rows,
          args.call.shape.local_experts,
          rows.received,
          redispatch,
          alone};
}

// Expects a sixteenth more than was needed, since the calls of a layer differ a little. The expected room stays the
// same as long as it suits the calls, so that all of them allocate memory of one size.
void Plan::expect(const gpu::KeptRoom& needed) {
  const auto more = [](uint32_t count) { return count + count / 16; };
  expected_room = {more(needed.rows), more(needed.received), more(needed.pitch)};
}

// Tells the kernel where a forward pass leaves what it keeps.
void Plan::set_kept(const Common& common, const TokenSpec& t) {
  if (!trains_in_group()) {
    const KeptLayout layout(spec, t.tokens);
    args.kept = {reinterpret_cast<uint8_t*>(t.kept), reinterpret_cast<int32_t*>(t.kept + layout.ids),
                 reinterpret_cast<float*>(t.kept + layout.weights)};
    return;
  }
  const GroupCallLayout layout = call_layout(common);
  const RoutingLayout routing(t.routing, spec, t.tokens);
  args.kept = {reinterpret_cast<uint8_t*>(t.kept), reinterpret_cast<int32_t*>(routing.ids),
               reinterpret_cast<float*>(routing.weights)};
  args.group.received = reinterpret_cast<uint8_t*>(t.kept + layout.received);
  args.group.pitch = common.limits.max_tokens;
  args.backward.z_columns = spec.gate_up_rows();
}

// Tells the kernel where the kept memory and the backward pass's own memory are. Returns the layout of the latter.
PassLayout Plan::set_rows(const GradientSpec& g) {
  const uint32_t tokens = args.call.shape.tokens;
  const PassLayout layout = pass_layout(tokens, g.rows);
  const auto at = [](uint64_t address) { return reinterpret_cast<uint8_t*>(address); };
  const RoutingLayout routing = routing_layout(tokens, g.rows.room);
  args.backward.kept = {at(g.kept), reinterpret_cast<int32_t*>(g.kept + routing.ids),
                        reinterpret_cast<float*>(g.kept + routing.weights)};
  args.backward.logits = reinterpret_cast<const float*>(g.kept + routing.logits);
  if (!trains_in_group()) return layout;
  const GroupKeptLayout kept = kept_layout(tokens, g.rows.room);
  gpu::GroupArgs& own = args.group;
  own.received = at(g.memory + layout.received);
  own.numbers = reinterpret_cast<const uint32_t*>(g.kept + kept.numbers);
  own.pitch = g.rows.room.pitch;
  own.rows = static_cast<uint32_t>(g.rows.rows);
  own.received_rows = static_cast<uint32_t>(g.rows.received);
  own.x = at(redispatch ? g.memory + layout.x : g.kept + kept.received);
  own.first_row = reinterpret_cast<const uint32_t*>(g.kept + kept.first_row);
  own.gather = reinterpret_cast<uint32_t*>(g.memory + layout.gather);
  args.call.config = host::make_config(args.call, spec, placement, arch.return_columns, g.rows.call, redispatch);
  return layout;
}

void Plan::set_gradients(const GradientSpec& g) {
  const PassLayout layout = set_rows(g);
  const uint64_t rows = layout.all_tiles * arch.tile_rows;
  const uint32_t bytes = element_bytes(spec.y_type), z_columns = spec.gate_up_rows();
  const Matrix z{g.memory, uint64_t{z_columns} * bytes, rows * z_columns * bytes};
  const Matrix weighted{g.memory + layout.weighted, uint64_t{spec.intermediate} * bytes,
                        rows * spec.intermediate * bytes};
  const auto at = [](uint64_t address) { return reinterpret_cast<uint8_t*>(address); };
  args.x_row_bytes = spec.hidden * bytes;
  gpu::BackwardArgs& b = args.backward;
  b.x = at(g.x);
  b.x_row_bytes = g.x_row_bytes;
  b.dz = at(z.data);
  b.weighted = at(weighted.data);
  b.z_columns = z_columns;
  args.call.memory.slice_tiles = static_cast<uint32_t>(layout.tiles);
  args.options.plain_behind = needs_plain(spec) ? layout.plain : 0;
  args.options.shared_gate_up_gradient = at(g.shared_gate_up);
  const uint64_t gates = uint64_t{spec.shared} * spec.intermediate * spec.hidden;
  args.shared_ups_gradient =
      at(g.shared_up == 0 ? g.shared_gate_up : g.shared_up - gates * (g.accumulates != 0 ? 4 : bytes));
  args.options.shared_down_gradient = at(g.shared_down);
  args.options.shared_logit_gradients = reinterpret_cast<float*>(g.shared_logits);
  b.weight_parts = reinterpret_cast<float*>(g.memory + layout.parts);
  b.combine_gradients = reinterpret_cast<float*>(g.weights);
  b.gate_up_gradient = at(g.gate_up);
  b.down_gradient = at(g.down);
  b.gate_up_bias_gradient = at(g.gate_up_bias);
  b.down_bias_gradient = at(g.down_bias);
  b.accumulates = g.accumulates != 0 ? 1 : 0;
  b.given_logit_gradients = reinterpret_cast<const float*>(g.given_logit_gradients);
  b.weights_by_bias = reinterpret_cast<const double*>(g.weights_by_bias);
  b.logit_gradients = at(g.logit_gradients);
  b.router_gradient = at(g.router);
  args.intermediate = encode(rows_shape(arch, z.row_bytes, bytes, z_columns, rows), z.data, spec.y_type, "rows of dZ");
  b.dz_columns = encode(transposed_shape(arch, z, bytes, z_columns, 1, 0, static_cast<uint32_t>(rows), 1), z.data,
                        spec.y_type, "columns of dZ");
  b.weighted_columns =
      encode(transposed_shape(arch, weighted, bytes, spec.intermediate, 1, 0, static_cast<uint32_t>(rows), 1),
             weighted.data, spec.y_type, "columns of activations");
  const uint32_t tokens = args.call.shape.tokens;
  if (g.logit_gradients == 0 || tokens == 0) return;  // a tensor map needs at least one row
  const uint64_t pitch = uint64_t{gpu::logit_pitch(spec.experts)} * bytes;
  args.tokens = encode(rows_shape(arch, pitch, bytes, spec.experts, tokens), g.logit_gradients, spec.y_type,
                       "rows of logits' gradients");
  b.logit_columns = encode(spans_shape(arch, pitch, bytes, spec.experts, tokens), g.logit_gradients, spec.y_type,
                           "columns of logits' gradients");
  b.x_columns = encode(spans_shape(arch, g.x_row_bytes, bytes, spec.hidden, tokens), g.x, spec.y_type, "columns of x");
}

}  // namespace flashmoe::cuda

#include "cpu/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cpu/activations.h"

namespace flashmoe::cpu {
namespace {

class Timed {
 public:
  Timed(ActorTrace& trace, Phase phase, uint32_t index, uint32_t column = 0, uint32_t expert = kNoExpert)
      : trace_(trace), phase_(phase), index_(index), column_(column), expert_(expert), start_(monotonic_ns()) {}
  ~Timed() { trace_.add(phase_, start_, monotonic_ns(), index_, column_, expert_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  ActorTrace& trace_;
  Phase phase_;
  uint32_t index_, column_, expert_;
  uint64_t start_;
};

}  // namespace

PacketScratch Engine::packet_scratch() {
  const size_t choices = size_t{c_.block_tokens()} * c_.shape.top_k;
  words_.resize(choices + c_.shape.ranks + 2);
  halves_.resize(3 * size_t{c_.shape.experts});
  return {.choices = words_.data(),
          .weights = room(weights_, choices),
          .place = halves_.data(),
          .count = halves_.data() + c_.shape.experts,
          .start = halves_.data() + 2 * size_t{c_.shape.experts},
          .entries = words_.data() + choices,
          .aborted = words_.data() + choices + c_.shape.ranks,
          .missing = words_.data() + choices + c_.shape.ranks + 1,
          .owner = c_.placement.owner};
}

bool Engine::dispatch(uint32_t b) {
  const PacketScratch s = packet_scratch();
  {
    const Timed timed(trace_, Phase::kGate, b);
    route(b, s);
    for (uint32_t t = 0; c_.shape.slices != 1 && t < c_.tokens_in_block(b); ++t) {
      choose_slices<CpuPlatform>(c_, (b << c_.policy.log2_block) + t, s.ids + t * c_.shape.top_k,
                                 s.weights + t * c_.shape.top_k);
    }
    add_shared(b, s);
  }
  const Timed timed(trace_, Phase::kDispatch, b);
  if (!build_packets<CpuPlatform>(c_, b, s, layer_.load)) return false;
  fill_missing<CpuPlatform>(c_, b, s, static_cast<uint8_t*>(layer_.out),
                            [&](uint8_t* row, bool bad) { fill_row(row, bad ? kNan : 0.0f); });
  if (spec().quantised()) quantise_rows(b);
  signal_own_packet<CpuPlatform>(c_, b, s);
  for (uint32_t q = 0; q < c_.shape.ranks; ++q) {
    if (q != c_.rank) trace_.entries_sent += s.entries[q];
  }
  return true;
}

// Fills in the choices of the token block's tokens, ids and weights: those that the caller gave, or those that the
// router makes.
void Engine::route(uint32_t b, const PacketScratch& s) {
  const uint32_t first = b << c_.policy.log2_block;
  const uint32_t tokens = c_.tokens_in_block(b);
  const uint32_t experts = spec().experts, top_k = spec().top_k;
  if (spec().routing == Routing::kGiven) {
    const DType type = layer_.topk_weight_type;
    for (uint32_t t = 0; t < tokens; ++t) {
      const uint64_t from = uint64_t{first + t} * top_k;
      std::transform(layer_.topk_ids + from, layer_.topk_ids + from + top_k, s.ids + t * c_.shape.top_k,
                     ExpertId::given);
      widen(s.weights + t * c_.shape.top_k, at(layer_.topk_weights, type, from), type, top_k);
    }
    return;
  }
  const uint32_t rows = padded_rows(tokens, experts, c_.shape.hidden);
  float* a = room(a_, size_t{rows} * c_.shape.hidden);
  widen(a, input_row(first), spec().x_type, uint64_t{tokens} * c_.shape.hidden);
  float* logits = room(out_, size_t{rows} * experts);
  gemm(logits, a, tokens, layer_.router, c_.shape.hidden, spec().y_type, experts, c_.shape.hidden, gemm_);
  add_bias(logits, tokens, layer_.router_bias, 0, experts);
  const uint64_t count = uint64_t{tokens} * experts;
  if (spec().round_logits) round_to(logits, spec().y_type, count);
  if (layer_.router_logits != nullptr) std::copy_n(logits, count, layer_.router_logits + uint64_t{first} * experts);
  for (uint32_t t = 0; t < tokens; ++t) {
    if (choose_experts(spec(), layer_.choice_bias, logits + size_t{t} * experts, s.ids + t * c_.shape.top_k,
                       s.weights + t * c_.shape.top_k, router_)) {
      continue;
    }
    note_row<CpuPlatform>(c_, RowFault::kLogits, first + t);
    std::fill_n(s.ids + t * c_.shape.top_k, top_k, ExpertId::kBad);
  }
}

// Sets all elements of a staged row, a return row or an output row to `value`.
void Engine::fill_row(uint8_t* row, float value) {
  float* const values = room(out_, c_.shape.hidden);
  std::fill_n(values, c_.shape.hidden, value);
  narrow(row, values, spec().return_type, c_.shape.hidden);
}

// Adds the shared expert to the choices of the token block's tokens.
void Engine::add_shared(uint32_t b, const PacketScratch& s) {
  if (c_.shape.shared == 0) return;
  const uint32_t first = b << c_.policy.log2_block, hidden = c_.shape.hidden;
  float* gate = room(bias_, hidden);
  if (spec().shared_gate) widen(gate, layer_.shared_gate, spec().y_type, hidden);
  float* x = room(a_, hidden);
  for (uint32_t t = 0; t < c_.tokens_in_block(b); ++t) {
    float weight = 1.0f;
    if (spec().shared_gate) {
      widen(x, input_row(first + t), spec().x_type, hidden);
      weight = 1.0f / (1.0f + std::exp(-std::inner_product(x, x + hidden, gate, 0.0f)));
    }
    choose_shared(c_, s.ids + t * c_.shape.top_k, s.weights + t * c_.shape.top_k, weight);
  }
}

void Engine::send_rows(uint32_t q, uint32_t token, uint32_t rows) {
  if (rows == 0) return;
  std::memcpy(c_.dispatched_row(q, c_.rank, token), token_row(c_.rank, token), c_.memory.token_row_bytes);
  ++trace_.rows_sent;
}

// Quantises the token block's rows, in the form in which they are sent and multiplied.
void Engine::quantise_rows(uint32_t b) {
  const uint32_t hidden = c_.shape.hidden, scales = scale_blocks(hidden);
  float* x = room(a_, hidden);
  for (uint32_t t = 0; t < c_.tokens_in_block(b); ++t) {
    const uint32_t token = (b << c_.policy.log2_block) + t;
    uint8_t* const row = c_.out_row(token);
    float* const to = reinterpret_cast<float*>(row + scales_offset(hidden));
    if (layer_.x_scale != nullptr) {
      std::memcpy(row, input_row(token), hidden);
      std::copy_n(layer_.x_scale + uint64_t{token} * scales, scales, to);
    } else {
      widen(x, input_row(token), spec().x_type, hidden);
      quantise(row, to, x, hidden);
    }
  }
}

const uint8_t* Engine::input_row(uint32_t token) const {
  return at(layer_.x, spec().x_type, uint64_t{token} * c_.shape.hidden);
}

const uint8_t* Engine::token_row(uint32_t source, uint32_t token) const {
  if (source != c_.rank) return c_.dispatched_row(c_.rank, source, token);
  return spec().quantised() ? c_.out_row(token) : input_row(token);
}

// rows[r, i] += bias[first + i * step], i < columns
void Engine::add_bias(float* rows, uint32_t count, const void* bias, uint64_t first, uint32_t columns, uint32_t step) {
  if (bias == nullptr) return;
  float* wide = room(bias_, columns);
  widen_every(wide, at(bias, spec().y_type, first), spec().y_type, columns, step);
  for (uint32_t r = 0; r < count; ++r) {
    for (uint32_t i = 0; i < columns; ++i) rows[uint64_t{r} * columns + i] += wide[i];
  }
}

void Engine::multiply(uint32_t n, TileIndex tile, uint32_t block) {
  const TaskRow& product = kProgram[n];
  const uint32_t expert = c_.tile(tile.number())->shape.expert;
  const Timed timed(trace_, phase_of(n), tile.bits, block, expert);
  const Columns at = columns(n, block, block + 1);
  switch (product.epilogue) {
    case Epilogue::kActivate: return activate_columns(product, tile, at);
    case Epilogue::kReturn: return return_columns(product, tile.whole(), at);
    case Epilogue::kDifferentiate:  // only in backward passes of a GPU; on a CPU BackwardEngine multiplies
    case Epilogue::kSend:
    case Epilogue::kOutput: break;  // no product has these
  }
}

// The address of intermediate row `row` of the tile; for the shared expert, of the part of the row that `slice` has.
uint8_t* Engine::intermediate_row(uint32_t tile, uint32_t slice, uint32_t row) const {
  return c_.intermediate_row(c_.inner_tile(tile, c_.tile_row(tile, 0)->token, slice), row);
}

// Loads the tile's rows of the product's left operand in fp32, with all slices over which the product contracts. Behind
// them there is room for the rows that gemm() reads in addition when it computes `columns` columns.
float* Engine::load_rows(const TaskRow& product, uint32_t tile, uint32_t columns) {
  if (spec().quantised()) return load_quantised_rows(product, tile, columns);
  const uint32_t width = c_.shape.extent(product.over), count = c_.tile(tile)->shape.rows;
  const uint32_t length = contracted(product, c_.tile(tile)->shape.expert);
  float* a = room(a_, size_t{padded_rows(count, columns, length)} * length);
  const Row* row_of = c_.tile_row(tile, 0);
  for (uint32_t r = 0; r < count; ++r) {
    float* to = a + size_t{r} * length;
    if (product.left != Operand::kTokens) {
      for (uint32_t s = 0; s < length / width; ++s) {
        widen(to + size_t{s} * width, intermediate_row(tile, s, r), spec().intermediate_type, width);
      }
      continue;
    }
    widen(to, token_row(row_of[r].source, row_of[r].token), spec().x_type, length);
    if (!spec().weights_on_input) continue;
    for (uint32_t i = 0; i < length; ++i) to[i] *= row_of[r].weight;
  }
  return a;
}

// The most rows that gemm() may read of a block of 128 columns of quantised rows. The last block may be narrower than
// 128.
uint32_t Engine::most_padded(uint32_t rows, uint32_t columns, uint32_t length) const {
  const uint32_t last = length - (scale_blocks(length) - 1) * kScaleBlock;
  return std::max(padded_rows(rows, columns, std::min(kScaleBlock, length)), padded_rows(rows, columns, last));
}

// Does what load_rows() does, for quantised rows. Stores one block of 128 columns after the other. In a block, the rows
// lie one behind the other, without their scales. The scales go to row_scales_, row by row.
float* Engine::load_quantised_rows(const TaskRow& product, uint32_t tile, uint32_t columns) {
  const uint32_t width = c_.shape.extent(product.over), count = c_.tile(tile)->shape.rows;
  const uint32_t length = contracted(product, c_.tile(tile)->shape.expert), each = scale_blocks(width);
  const uint32_t pitch = most_padded(count, columns, length);
  float* a = room(a_, size_t{pitch} * length);
  float* scale = room(row_scales_, size_t{count} * scale_blocks(length));
  const Row* row_of = c_.tile_row(tile, 0);
  for (uint32_t r = 0; r < count; ++r) {
    const bool of_token = product.left == Operand::kTokens;
    const float weight = of_token && spec().weights_on_input ? row_of[r].weight : 1.0f;
    for (uint32_t s = 0; s < length / width; ++s) {
      const uint8_t* row = of_token ? token_row(row_of[r].source, row_of[r].token) : intermediate_row(tile, s, r);
      const float* scales = reinterpret_cast<const float*>(row + scales_offset(width));
      for (uint32_t i = 0; i < each; ++i) {
        const uint32_t first = i * kScaleBlock, n = min_of(kScaleBlock, width - first);
        widen(a + size_t{pitch} * (s * width + first) + size_t{r} * n, row + first, DType::kFloat8E4M3, n);
        *scale++ = scales[i] * weight;
      }
    }
  }
  return a;
}

// The number of elements over which the product contracts: all of the shared expert's width, or the width of another
// expert.
uint32_t Engine::contracted(const TaskRow& product, uint32_t expert) const {
  const bool all = product.over == Axis::kIntermediate && c_.shape.is_shared(expert);
  return c_.shape.extent(product.over) * (all ? c_.shape.shared : 1);
}

Engine::Weights Engine::weights_of(const TaskRow& product, uint32_t expert, uint32_t slice) const {
  const LayerSpec& l = spec();
  const bool up = product.right == Operand::kGateUp, shared = c_.shape.is_shared(expert);
  const uint64_t width = uint64_t{l.intermediate} * (shared ? l.shared : 1), hidden = l.hidden;
  const uint64_t rows = up ? (l.gated() ? 2 : 1) * width : hidden, length = up ? hidden : width;  // of the matrix
  const uint64_t pitch = l.transposed ? rows : length;
  const uint32_t to_up = l.interleaved ? 1 : static_cast<uint32_t>(width);
  if (!shared) {
    return {at(up ? layer_.gate_up : layer_.down, l.weight_type, expert * rows * length), pitch, to_up, 0, nullptr};
  }
  // Where the slice begins: at this row of gate_up, or in transposed matrices at this column. (0 for down, which has
  // slice 0.)
  const uint64_t first = uint64_t{slice} * l.intermediate * (up && l.interleaved ? 2 : 1);
  return {at(up ? layer_.shared_gate_up : layer_.shared_down, l.weight_type, l.transposed ? first : first * pitch),
          pitch, to_up, first,
          up && layer_.shared_up != nullptr ? at(layer_.shared_up, l.weight_type, first * pitch) : nullptr};
}

Engine::RowScales Engine::scales_of(const TaskRow& product, uint32_t expert, uint64_t row) const {
  const LayerSpec& l = spec();
  const bool up = product.right == Operand::kGateUp, shared = c_.shape.is_shared(expert);
  const void* of_all = up ? layer_.gate_up_scale : layer_.down_scale;
  if (shared) of_all = up ? layer_.shared_gate_up_scale : layer_.shared_down_scale;
  const Encoding e = encoding_of(l.weight_type);
  const auto number = [&](uint64_t i) { return static_cast<const uint8_t*>(of_all) + i * e.scale_bytes; };
  const uint32_t width = l.intermediate * (shared ? l.shared : 1), halves = up && l.gated() ? 2 : 1;
  const uint32_t rows = up ? halves * width : l.hidden, length = up ? l.hidden : width;
  const uint64_t before = shared ? 0 : expert;
  if (l.weight_scales == WeightScales::kTensor) return {number(before), 0};
  if (l.weight_scales == WeightScales::kRow) return {number(before * rows + row), 0};
  // Gate and up have blocks of their own, unless their rows are interleaved.
  const uint32_t parts = l.interleaved ? 1 : halves, part_rows = rows / parts;
  const uint64_t part_blocks = ceil_div(part_rows, e.block_rows);
  const uint64_t block = row / part_rows * part_blocks + row % part_rows / e.block_rows;
  return {number((before * parts * part_blocks + block) * ceil_div(length, e.block_columns)), 1};
}

// rows * weights^T for the rows that load_quantised_rows() has loaded. This is the sum over the blocks of 128 columns,
// in ascending order, of (product of the block) * (scale of the row * scale of the weights).
float* Engine::multiply_quantised(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count,
                                  const Weights& from, Features of, uint32_t columns) {
  const uint32_t length = contracted(product, of.expert), blocks = scale_blocks(length);
  const uint32_t pitch = most_padded(count, columns, length);
  float* out = room(to, size_t{pitch} * columns);
  std::fill_n(out, size_t{count} * columns, 0.0f);
  float* part = room(block_, size_t{pitch} * columns);
  float* scales = room(features_, columns);
  for (uint32_t k = 0; k < blocks; ++k) {
    const uint32_t first = k * kScaleBlock, n = min_of(kScaleBlock, length - first);
    const void* weights = at(from.data, spec().weight_type, of.first * from.pitch + first);
    gemm(part, rows + size_t{pitch} * first, count, weights, of.step * from.pitch, spec().weight_type, columns, n,
         gemm_);
    for (uint32_t i = 0; i < columns; ++i) {
      const RowScales s = scales_of(product, of.expert, from.row + of.first + uint64_t{i} * of.step);
      scales[i] = reinterpret_cast<const float*>(s.data)[size_t{k} * s.step];
    }
    for (uint32_t r = 0; r < count; ++r) {
      const float scale = row_scales_[size_t{r} * blocks + k];
      float* const sum = out + size_t{r} * columns;
      const float* const products = part + size_t{r} * columns;
      for (uint32_t i = 0; i < columns; ++i) sum[i] += products[i] * (scale * scales[i]);
    }
  }
  return out;
}

// Converts `columns` rows of weights in mxfp4 to fp32, one row behind the other: exactly the numbers that they stand
// for.
const float* Engine::dequantised_rows(const TaskRow& product, const Weights& from, Features of, uint32_t columns) {
  const uint32_t length = contracted(product, of.expert), block = encoding_of(spec().weight_type).block_columns;
  float* const wide = room(features_, size_t{columns} * length);
  for (uint32_t i = 0; i < columns; ++i) {
    const uint64_t row = of.first + uint64_t{i} * of.step;
    float* const to = wide + size_t{i} * length;
    widen(to, at(from.data, spec().weight_type, row * from.pitch), spec().weight_type, length);
    const uint8_t* const scales = scales_of(product, of.expert, from.row + row).data;
    for (uint32_t first = 0; first < length; first += block) {
      const float scale = e8m0_to_float(scales[first / block]);
      for (uint32_t k = first; k < first + block; ++k) to[k] *= scale;
    }
  }
  return wide;
}

// If the shared expert's gates and ups are two matrices: all rows of the first, then all rows of the second, in fp32,
// as gemm() expects the rows of one matrix.
const float* Engine::rows_of_both(const Weights& from, uint32_t length) {
  float* const wide = room(features_, 2 * size_t{from.to_up} * length);
  float* to = wide;
  for (const void* matrix : {from.data, from.up}) {
    for (uint32_t i = 0; i < from.to_up; ++i, to += length) {
      widen(to, at(matrix, spec().weight_type, i * from.pitch), spec().weight_type, length);
    }
  }
  return wide;
}

// rows * weights^T, with `columns` rows of weights.
float* Engine::multiply_rows(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count,
                             const Weights& from, Features of, uint32_t columns) {
  const uint32_t length = contracted(product, of.expert);
  DType type = spec().weight_type;
  const void* weights = nullptr;
  uint64_t stride = of.step * from.pitch;
  if (has_scales(type)) {
    weights = dequantised_rows(product, from, of, columns), type = DType::kFloat32, stride = length;
  } else if (from.up != nullptr && of.first == 0 && columns == 2 * from.to_up) {
    weights = rows_of_both(from, length), type = DType::kFloat32, stride = length;
  } else if (from.up != nullptr && of.first >= from.to_up) {
    weights = at(from.up, type, (of.first - from.to_up) * from.pitch);
  } else if (!spec().transposed) {
    weights = at(from.data, type, of.first * from.pitch);
  } else {
    float* wide = room(features_, size_t{columns} * length);
    for (uint32_t i = 0; i < columns; ++i) {
      const void* feature = at(from.data, type, of.first + uint64_t{i} * of.step);
      widen_every(wide + size_t{i} * length, feature, type, length, from.pitch);
    }
    weights = wide, type = DType::kFloat32, stride = length;
  }
  float* out = room(to, size_t{padded_rows(count, columns, length)} * columns);
  gemm(out, rows, count, weights, stride, type, columns, length, gemm_);
  return out;
}

// rows * weights^T + bias, with `columns` rows of weights.
float* Engine::project(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count, Features of,
                       uint32_t columns) {
  const bool up = product.right == Operand::kGateUp;
  const uint64_t all = up ? spec().gate_up_rows() : c_.shape.hidden;  // rows of the expert's matrix
  const Weights from = weights_of(product, of.expert, of.slice);
  float* out = spec().quantised() ? multiply_quantised(to, product, rows, count, from, of, columns)
                                  : multiply_rows(to, product, rows, count, from, of, columns);
  const void* bias = up ? layer_.gate_up_bias : layer_.down_bias;
  add_bias(out, count, bias, of.expert * all + of.first, columns, of.step);
  return out;
}

void Engine::activate_columns(const TaskRow& product, TileIndex index, Columns of) {
  const uint32_t tile = index.number(), slice = index.slice();
  const Tile::Shape& t = c_.tile(tile)->shape;
  const bool gated = spec().gated();
  const uint32_t step = spec().interleaved ? 2 : 1, to_up = weights_of(product, t.expert, slice).to_up;
  // If one block of columns has all of I, the gate rows and the up rows are neighbours, so one GEMM is enough.
  const bool together = gated && of.count == to_up && !spec().interleaved;
  const uint32_t pitch = together ? 2 * of.count : of.count;
  const float* rows = load_rows(product, tile, pitch);
  float* gate = project(out_, product, rows, t.rows, {t.expert, slice, of.first * step, step}, pitch);
  const float* up = nullptr;
  if (together) up = gate + of.count;
  if (gated && !together) {
    up = project(up_, product, rows, t.rows, {t.expert, slice, of.first * step + to_up, step}, pitch);
  }
  if (layer_.kept != nullptr) keep_pre_activations(tile, slice, of, gate, up, pitch);
  for (uint32_t r = 0; r < t.rows; ++r) {
    float* row = gate + size_t{r} * pitch;
    activate(row, up == nullptr ? nullptr : up + size_t{r} * pitch, spec(), of.count);
    uint8_t* const to = intermediate_row(tile, slice, r);
    if (spec().quantised()) {
      float* const scales = reinterpret_cast<float*>(to + scales_offset(c_.shape.intermediate));
      quantise(to + of.first, scales + of.first / kScaleBlock, row, of.count);
    } else {
      narrow(at(to, spec().intermediate_type, of.first), row, spec().intermediate_type, of.count);
    }
  }
}

void Engine::keep_pre_activations(uint32_t tile, uint32_t slice, Columns of, const float* gate, const float* up,
                                  uint32_t pitch) {
  const Tile::Shape& t = c_.tile(tile)->shape;
  const uint32_t width = c_.shape.intermediate * (c_.shape.is_shared(t.expert) ? c_.shape.shared : 1);
  const uint64_t elements = kept_elements(spec(), width);
  const uint64_t first = uint64_t{slice} * c_.shape.intermediate + of.first;
  uint8_t* row = layer_.kept->pre_activations(c_, tile, elements);
  for (uint32_t r = 0; r < t.rows; ++r, row += elements * element_bytes(spec().y_type)) {
    layer_.kept->store(row, first, gate + size_t{r} * pitch, of.count);
    if (up != nullptr) layer_.kept->store(row, width + first, up + size_t{r} * pitch, of.count);
  }
  if (of.first == 0 && slice == 0) layer_.kept->copy_received(c_, tile);
}

void Engine::return_columns(const TaskRow& product, uint32_t tile, Columns of) {
  const Tile::Shape& t = c_.tile(tile)->shape;
  const float* rows = load_rows(product, tile, of.count);
  const float* out = project(out_, product, rows, t.rows, {t.expert, 0, of.first, 1}, of.count);
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row row = *c_.tile_row(tile, r);
    uint8_t* to =
        c_.reduced() ? c_.staged_row(row.source, row.token, row.ordinal) : c_.return_row(row.source, row.token, row.k);
    const float weight = spec().weights_on_input ? 1.0f : row.weight;
    narrow(at(to, spec().return_type, of.first), out + size_t{r} * of.count, spec().return_type, of.count, weight);
    if (c_.policy.joined != 0 && c_.shape.top_k == 1) combine(row.token, of);
  }
}

void Engine::reduce(const Piece& piece) {
  const uint32_t p = piece.source;
  const auto [first, count] =
      columns(kReturning, c_.policy.group_first[piece.group], c_.policy.group_first[piece.group + 1]);
  const Machines& m = c_.spread;
  const bool stays = m.sums && !m.together(p, c_.rank);  // the sum stays on this machine, in fp32
  for (uint32_t t = piece.first_token; t < piece.first_token + piece.tokens; ++t) {
    const uint32_t entries = *c_.packet_counts(c_.rank, p, t);
    if (entries == 0) continue;
    float* const sum =
        stays ? RelayPlace(c_, m, m.relay(p, m.of[c_.rank]), p).sum(m.place[c_.rank], t) + first : room(out_, count);
    std::fill_n(sum, count, 0.0f);
    for (uint32_t j = 0; j < entries; ++j) {
      accumulate(sum, at(c_.staged_row(p, t, j), spec().return_type, first), spec().return_type, count);
    }
    if (stays) continue;
    narrow(at(c_.return_row(p, t, c_.rank), spec().return_type, first), sum, spec().return_type, count);
  }
}

// Sums, for each of the piece's tokens, the sums that the ranks of this machine have left at this rank, in the order of
// the ranks' places.
void Engine::sum_machine(const Piece& piece) {
  const Machines& m = c_.spread;
  const RelayPlace from(c_, m, c_.rank, piece.source);
  const auto [first, count] =
      columns(kReturning, c_.policy.group_first[piece.group], c_.policy.group_first[piece.group + 1]);
  float* const sum = room(out_, count);
  uint64_t sums = 0;
  for (uint32_t t = piece.first_token; t < piece.first_token + piece.tokens; ++t) {
    if (!from.is_needed(t)) continue;
    ++sums;
    std::fill_n(sum, count, 0.0f);
    for (uint32_t i = 0; i < m.size(m.of[c_.rank]); ++i) {
      if (*from.counts(i, t) != 0) accumulate(sum, from.sum(i, t) + first, DType::kFloat32, count);
    }
    narrow(at(c_.return_row(piece.source, t, c_.rank), spec().return_type, first), sum, spec().return_type, count);
  }
  if (piece.group == 0) CpuPlatform::add(&m.counts[c_.parity()].sums_sent, sums);
}

void Engine::combine(const Piece& piece) {
  const Columns of = columns(kReturning, c_.policy.group_first[piece.group], c_.policy.group_first[piece.group + 1]);
  for (uint32_t t = piece.first_token; t < piece.first_token + piece.tokens; ++t) combine(t, of);
}

void Engine::combine(uint32_t token, Columns of) {
  float* sum = room(sum_, of.count);
  std::fill_n(sum, of.count, 0.0f);
  add_returned(sum, token, of.first, of.count);
  narrow(at(layer_.out, spec().y_type, uint64_t{token} * c_.shape.hidden + of.first), sum, spec().y_type, of.count);
}

void Engine::add_returned(float* sum, uint32_t token, uint32_t first, uint32_t count) const {
  const uint32_t slots = c_.reduced() ? c_.shape.ranks : c_.shape.top_k;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    if (!(c_.reduced() ? is_returned(c_, c_.spread, token, slot) : is_returned(c_, token, slot))) continue;
    accumulate(sum, at(c_.return_row(c_.rank, token, slot), spec().return_type, first), spec().return_type, count);
  }
}

void Engine::join(uint32_t row, uint32_t) {
  combine(LateRow::token(row), columns(kReturning, LateRow::column(row), LateRow::column(row) + 1));
}

}  // namespace flashmoe::cpu

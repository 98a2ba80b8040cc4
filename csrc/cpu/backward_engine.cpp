#include "cpu/backward_engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/activations.h"
#include "cpu/router_backward.h"

namespace flashmoe::cpu {
namespace {

// How many columns of the result multiply_rows() computes at once. For these columns it widens a part of the right
// operand to fp32: this many rows of the matrix with Rows::kResults, and this many columns with Rows::kContraction.
constexpr uint32_t kColumns = 256;

// How many rows the left operand needs room for, if n columns of the result are computed kColumns at a time. They are
// more than `rows`, because gemm() rounds the rows up to whole calls of the BLAS in which a row's bits do not depend on
// its place (gemm.h).
uint32_t padded_for(uint32_t rows, uint32_t n, uint32_t k, Rows of) {
  const uint32_t whole = n < kColumns ? 0 : padded_rows(rows, kColumns, k, of);
  return n % kColumns == 0 ? whole : std::max(whole, padded_rows(rows, n % kColumns, k, of));
}

double dot(const float* a, const float* b, uint32_t n) {
  double sum = 0.0;
  for (uint32_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

bool BackwardEngine::dispatch(uint32_t b) {
  const PacketScratch s = packet_scratch();
  const Kept& kept = pass_->kept;
  const uint32_t first = b << c_.policy.log2_block, choices = c_.tokens_in_block(b) * c_.shape.top_k;
  std::copy_n(kept.ids.data() + uint64_t{first} * c_.shape.top_k, choices, s.ids);
  std::copy_n(kept.weights.data() + uint64_t{first} * c_.shape.top_k, choices, s.weights);
  if (!build_known_packets<CpuPlatform>(c_, b, s)) return false;
  signal_own_packet<CpuPlatform>(c_, b, s);
  return true;
}

void BackwardEngine::send_rows(uint32_t q, uint32_t token, uint32_t rows) {
  Engine::send_rows(q, token, rows);
  if (rows == 0 || !pass_->kept.redispatch) return;
  const void* const x = at(pass_->gradients.layer.x, spec().x_type, uint64_t{token} * c_.shape.hidden);
  std::memcpy(c_.dispatched_row(q, c_.rank, token) + redispatched_behind(c_, *layout_), x, c_.memory.token_row_bytes);
}

const uint8_t* BackwardEngine::x_of(const Row& row, const Kept::Row& kept) const {
  if (kept.received == Kept::kOwn) {
    return at(pass_->gradients.layer.x, spec().x_type, uint64_t{row.token} * c_.shape.hidden);
  }
  if (!pass_->kept.redispatch) return pass_->kept.received_row(kept.received);
  return c_.dispatched_row(c_.rank, row.source, row.token) + redispatched_behind(c_, *layout_);
}

void BackwardEngine::multiply(uint32_t n, TileIndex tile) {
  if (n == kFirst) return hidden_gradients(tile.number(), tile.slice());
  return_gradients(tile.whole());
}

void BackwardEngine::find_rows(uint32_t tile) {
  const Tile::Shape& t = c_.tile(tile)->shape;
  numbers_.resize(t.rows);
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row& row = *c_.tile_row(tile, r);
    numbers_[r] = pass_->kept.find(t.expert, {row.source, row.token});
  }
}

void BackwardEngine::multiply_rows(float* out, const float* a, uint32_t rows, const Right& matrix, uint32_t n,
                                   uint32_t k) {
  float* part = room(part_, size_t{rows} * kColumns);
  for (uint32_t first = 0; first < n; first += kColumns) {
    const uint32_t count = min_of(kColumns, n - first);
    DType type = spec().weight_type;
    const void* from = at(matrix.data, type, matrix.of == Rows::kResults ? first * matrix.pitch : first);
    uint64_t pitch = matrix.pitch;
    if (matrix.up != nullptr) {  // both matrices' rows in fp32, one behind the other, as gemm() expects them
      float* to = room(features_, size_t{k} * count);
      from = to;
      for (const void* half : {matrix.data, matrix.up}) {
        for (uint32_t i = 0; i < k / 2; ++i, to += count) widen(to, at(half, type, i * pitch + first), type, count);
      }
      type = DType::kFloat32, pitch = count;
    }
    gemm(part, a, rows, from, pitch, type, count, k, gemm_, matrix.of);
    for (uint32_t r = 0; r < rows; ++r) std::copy_n(part + size_t{r} * count, count, out + size_t{r} * n + first);
  }
}

// Loads the tile's rows of dY, in fp32, to memory that has room for `padded` rows. Copies the rows of dY that came from
// other ranks, each token's once, and with redispatch the rows of x that came with them: the gradients of weights need
// these copies.
float* BackwardEngine::load_gradients(uint32_t tile, uint32_t padded) {
  const uint32_t rows = c_.tile(tile)->shape.rows, hidden = c_.shape.hidden;
  float* dy = room(a_, size_t{padded} * hidden);
  for (uint32_t r = 0; r < rows; ++r) {
    const Row& row = *c_.tile_row(tile, r);
    const Kept::Row& kept = pass_->kept.rows()[numbers_[r]];
    const uint8_t* from = token_row(row.source, row.token);
    widen(dy + size_t{r} * hidden, from, spec().y_type, hidden);
    if (!kept.first_of_token) continue;
    const uint32_t bytes = c_.memory.token_row_bytes;
    std::memcpy(pass_->received.data() + uint64_t{kept.received} * bytes, from, bytes);
    if (!pass_->kept.redispatch) continue;
    std::memcpy(pass_->redispatched.data() + uint64_t{kept.received} * bytes, x_of(row, kept), bytes);
  }
  return dy;
}

void BackwardEngine::hidden_gradients(uint32_t tile, uint32_t slice) {
  const uint64_t start = monotonic_ns();
  const Tile::Shape& t = c_.tile(tile)->shape;
  const uint32_t hidden = c_.shape.hidden, n = c_.shape.intermediate, width = pass_->width(t.expert);
  const Rows of = spec().transposed ? Rows::kResults : Rows::kContraction;
  find_rows(tile);
  const float* dy = load_gradients(tile, padded_for(t.rows, n, hidden, of));
  const uint64_t pitch = spec().transposed ? hidden : width, to_slice = uint64_t{slice} * n;
  const bool shared = pass_->is_shared(t.expert);
  const uint64_t first =
      (shared ? 0 : uint64_t{t.expert} * hidden * width) + to_slice * (spec().transposed ? pitch : 1);
  float* grad = room(out_, size_t{t.rows} * n);
  const void* down = at(shared ? layer_.shared_down : layer_.down, spec().weight_type, first);
  multiply_rows(grad, dy, t.rows, {down, pitch, of}, n, hidden);
  const uint32_t step = spec().interleaved ? 2 : 1;
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Kept::Row& row = pass_->kept.rows()[numbers_[r]];
    float* gate = room(gate_, n);
    pass_->kept.load(gate, row, to_slice, n);
    float* up = nullptr;
    if (spec().gated()) pass_->kept.load(up = room(up_, n), row, width + to_slice, n);
    float* to = pass_->pre_activations(t.expert, numbers_[r]) + to_slice * step;
    const float scale = spec().weights_on_input ? 1.0f : row.weight;
    activate_backward({to, to + (spec().interleaved ? 1 : width), step}, gate, up, grad + size_t{r} * n, spec(), scale,
                      n);
    activate(gate, up, spec(), n);
    double of_weight = dot(gate, grad + size_t{r} * n, n);
    if (slice == 0 && layer_.down_bias != nullptr) {
      float* bias = room(bias_, hidden);
      widen(bias, at(layer_.down_bias, spec().y_type, uint64_t{t.expert} * hidden), spec().y_type, hidden);
      of_weight += dot(bias, dy + size_t{r} * hidden, hidden);
    }
    pass_->weight(numbers_[r], slice) = static_cast<float>(of_weight);
  }
  trace_.add(phase_of(kFirst), start, monotonic_ns(), tile, slice, t.expert);
}

void BackwardEngine::return_gradients(uint32_t tile) {
  const uint64_t start = monotonic_ns();
  const Tile::Shape& t = c_.tile(tile)->shape;
  const uint32_t hidden = c_.shape.hidden, length = pass_->gate_up_rows(t.expert);
  const Rows of = spec().transposed ? Rows::kResults : Rows::kContraction;
  find_rows(tile);
  float* a = room(a_, size_t{padded_for(t.rows, hidden, length, of)} * length);
  for (uint32_t r = 0; r < t.rows; ++r) {
    std::copy_n(pass_->pre_activations(t.expert, numbers_[r]), length, a + size_t{r} * length);
  }
  const bool shared = pass_->is_shared(t.expert);
  const void* matrix =
      shared ? layer_.shared_gate_up : at(layer_.gate_up, spec().weight_type, uint64_t{t.expert} * length * hidden);
  float* grad = room(out_, size_t{t.rows} * hidden);
  const uint64_t pitch = spec().transposed ? length : hidden;
  multiply_rows(grad, a, t.rows, {matrix, pitch, of, shared ? layer_.shared_up : nullptr}, hidden, length);
  float* x = room(sum_, hidden);
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row& row = *c_.tile_row(tile, r);
    const float* of_row = grad + size_t{r} * hidden;
    const uint64_t number = numbers_[r];
    double of_weight = 0.0;
    if (spec().weights_on_input) {
      widen(x, x_of(row, pass_->kept.rows()[number]), spec().x_type, hidden);
      of_weight = dot(of_row, x, hidden);
    } else {
      for (uint32_t s = 0; s < (shared ? spec().shared : 1); ++s) of_weight += pass_->weight(number, s);
    }
    *weight_gradient(c_, *layout_, row.source, row.token, row.k) = static_cast<float>(of_weight);
    uint8_t* to =
        c_.reduced() ? c_.staged_row(row.source, row.token, row.ordinal) : c_.return_row(row.source, row.token, row.k);
    narrow(to, of_row, spec().return_type, hidden, spec().weights_on_input ? row.weight : 1.0f);
  }
  trace_.add(phase_of(kReturning), start, monotonic_ns(), tile, 0, t.expert);
}

// Whether the token's row is bad, so that no expert has had it.
bool BackwardEngine::is_bad(uint32_t token) const {
  return pass_->kept.ids[uint64_t{token} * c_.shape.top_k] == Choice::recorded(Choice::kBad);
}

// Finishes the gradients of a token's combine weights or router logits, and of the shared expert's gate.
void BackwardEngine::finish_weights(uint32_t token) {
  const Kept& kept = pass_->kept;
  const Gradients& to = pass_->gradients;
  const uint32_t top_k = spec().top_k, choices = c_.shape.top_k, experts = spec().experts;
  const int32_t* ids = kept.ids.data() + uint64_t{token} * choices;
  of_weights_.assign(top_k, 0.0);
  for (uint32_t k = 0; k < top_k * spec().slices; ++k) {
    if (ids[k] >= 0) of_weights_[k / spec().slices] += *weight_gradient(c_, *layout_, c_.rank, token, k);
  }
  if (spec().shared_gate) {
    pass_->shared_logits[token] = 0.0f;
  }
  if (spec().shared_gate && !is_bad(token)) {
    const float w = kept.weights[uint64_t{token} * choices + choices - 1];
    pass_->shared_logits[token] = *weight_gradient(c_, *layout_, c_.rank, token, choices - 1) * w * (1.0f - w);
  }
  if (spec().routing == Routing::kGiven) {
    if (to.topk_weights == nullptr) return;
    float* row = room(weights_, top_k);
    std::copy_n(of_weights_.data(), top_k, row);
    narrow(at(to.topk_weights, layer_.topk_weight_type, uint64_t{token} * top_k), row, layer_.topk_weight_type, top_k);
    return;
  }
  float* grad = pass_->logits.data() + uint64_t{token} * experts;
  if (is_bad(token)) {
    std::fill_n(grad, experts, kNan);
    return;
  }
  if (to.logits != nullptr) std::copy_n(to.logits + uint64_t{token} * experts, experts, grad);
  const float* logits = kept.logits.data() + uint64_t{token} * experts;
  ids_.resize(top_k);  // all experts are chosen again, because kept.ids lacks those of dropped choices
  choose_experts(kept.spec, layer_.choice_bias, logits, ids_.data(), room(weights_, top_k), router_);
  add_logit_gradients(kept.spec, logits, ids_.data(), of_weights_.data(), grad, scores_);
}

void BackwardEngine::combine(const Piece& piece) {
  const uint32_t hidden = c_.shape.hidden, experts = spec().experts, first = piece.first_token;
  float* sums = room(sum_, size_t{piece.tokens} * hidden);
  std::fill_n(sums, size_t{piece.tokens} * hidden, 0.0f);
  for (uint32_t t = 0; t < piece.tokens; ++t) {
    if (is_bad(first + t)) std::fill_n(sums + size_t{t} * hidden, hidden, kNan);
    add_returned(sums + size_t{t} * hidden, first + t, 0, hidden);
    finish_weights(first + t);
  }
  if (spec().routing != Routing::kGiven) {
    float* a = room(a_, size_t{padded_for(piece.tokens, hidden, experts, Rows::kContraction)} * experts);
    std::copy_n(pass_->logits.data() + uint64_t{first} * experts, size_t{piece.tokens} * experts, a);
    float* routed = room(out_, size_t{piece.tokens} * hidden);
    multiply_rows(routed, a, piece.tokens, {layer_.router, hidden, Rows::kContraction}, hidden, experts);
    for (size_t i = 0; i < size_t{piece.tokens} * hidden; ++i) sums[i] += routed[i];
  }
  if (spec().shared_gate) {
    float* gate = room(bias_, hidden);
    widen(gate, layer_.shared_gate, spec().y_type, hidden);
    for (uint32_t t = 0; t < piece.tokens; ++t) {
      for (uint32_t h = 0; h < hidden; ++h) sums[size_t{t} * hidden + h] += pass_->shared_logits[first + t] * gate[h];
    }
  }
  narrow(at(layer_.out, spec().x_type, uint64_t{first} * hidden), sums, spec().x_type, uint64_t{piece.tokens} * hidden);
}

}  // namespace flashmoe::cpu

#include "cpu/weight_gradients.h"

#include <algorithm>

#include "cpu/activations.h"
#include "cpu/engine.h"

namespace flashmoe::cpu {
namespace {

constexpr uint32_t kFeatures = 256;    // most features of a part
constexpr uint32_t kRowsAtOnce = 512;  // most rows that one call of the BLAS sums

// One matrix's gradient: a sum over rows of an outer product of `features` numbers and H numbers.
struct Matrix {
  enum class Of : uint32_t { kGateUp, kDown, kRouter, kSharedGate } of;
  uint32_t expert;    // local expert, for gate_up and down
  uint32_t features;  // gate_up's rows, down's columns, the router's experts
  void *to, *bias;    // null: not wanted
  DType type;         // of `to`
  bool by_feature;    // in `to`: true: a feature's H numbers are neighbours; false: the features are
  uint64_t first_row, rows;
  // Features from `gates` on have their results in `up`, another matrix with rows of H numbers; null: not wanted.
  uint32_t gates = ~0u;
  void* up = nullptr;

  bool wanted() const { return to != nullptr || up != nullptr; }
};

class Parts {
 public:
  Parts(Backward& pass, WeightBuffers& buffers)
      : pass_(pass), g_(pass.gradients), layer_(pass.gradients.layer), spec_(pass.kept.spec), b_(buffers) {}

  void take_all() {
    list();
    uint32_t before = 0;
    uint32_t part = pass_.next_part.fetch_add(1, std::memory_order_relaxed);
    for (const Matrix& m : matrices_) {
      const uint32_t parts = ceil_div(m.features, kFeatures);
      while (part - before < parts) {
        compute(m, (part - before) * kFeatures);
        part = pass_.next_part.fetch_add(1, std::memory_order_relaxed);
      }
      before += parts;
    }
  }

 private:
  // The type of the results for tensors of type t.
  DType of(DType t) const { return g_.accumulates ? DType::kFloat32 : t; }
  void list() {
    for (uint32_t l = 0; l < pass_.kept.local_experts(); ++l) list_expert(l);
    const uint32_t tokens = pass_.kept.tokens;
    if (spec_.routing != Routing::kGiven) {
      add({Matrix::Of::kRouter, 0, spec_.experts, g_.router, g_.router_bias, of(spec_.y_type), true, 0, tokens});
    }
    if (spec_.shared_gate) {
      add({Matrix::Of::kSharedGate, 0, 1, g_.shared_gate, nullptr, of(spec_.y_type), true, 0, tokens});
    }
  }
  void list_expert(uint32_t l) {
    const bool shared = pass_.is_shared(l);
    const uint32_t up = pass_.gate_up_rows(l), down = pass_.width(l);
    const uint64_t begin = pass_.kept.first_row(l), rows = pass_.kept.first_row(l + 1) - begin;
    const auto of_expert = [&](void* to, uint64_t each, DType type) -> void* {
      return to == nullptr ? nullptr : at(to, type, l * each);
    };
    const uint64_t h = spec_.hidden;
    const DType t = of(spec_.weight_type), of_bias = of(spec_.y_type);
    Matrix gate_up{Matrix::Of::kGateUp,
                   l,
                   up,
                   shared ? g_.shared_gate_up : of_expert(g_.gate_up, up * h, t),
                   shared ? nullptr : of_expert(g_.gate_up_bias, up, of_bias),
                   t,
                   !spec_.transposed,
                   begin,
                   rows};
    if (shared && layer_.shared_up != nullptr) gate_up.gates = down, gate_up.up = g_.shared_up;
    add(gate_up);
    add({Matrix::Of::kDown, l, down, shared ? g_.shared_down : of_expert(g_.down, down * h, t),
         shared ? nullptr : of_expert(g_.down_bias, h, of_bias), t, spec_.transposed, begin, rows});
  }
  void add(const Matrix& m) {
    if (m.wanted() || m.bias != nullptr) matrices_.push_back(m);
  }

  void compute(const Matrix& m, uint32_t first) {
    const uint32_t count = min_of(kFeatures, m.features - first), hidden = spec_.hidden;
    const bool bias_of_down = m.of == Matrix::Of::kDown && m.bias != nullptr && first == 0;
    float* sum = room(b_.sum, size_t{count} * hidden);
    std::fill_n(sum, size_t{count} * hidden, 0.0f);
    b_.bias.assign(bias_of_down ? hidden : count, 0.0);
    for (uint64_t r = 0; r < m.rows; r += kRowsAtOnce) {
      const auto rows = static_cast<uint32_t>(min_of<uint64_t>(kRowsAtOnce, m.rows - r));
      float* left = room(b_.left, size_t{rows} * count);
      float* right = room(b_.right, size_t{rows} * hidden);
      for (uint32_t i = 0; i < rows; ++i) {
        load(m, m.first_row + r + i, first, count, left + size_t{i} * count, right + size_t{i} * hidden);
      }
      if (m.wanted()) add_outer(sum, left, count, right, hidden, rows);
      const float* of_bias = bias_of_down ? right : left;
      for (uint32_t i = 0; m.bias != nullptr && i < rows; ++i) {
        for (double& b : b_.bias) b += *of_bias++;
      }
    }
    if (m.wanted()) store(m, first, count, sum);
    if (m.bias == nullptr || (m.of == Matrix::Of::kDown && !bias_of_down)) return;
    if (bias_of_down && !pass_.kept.has_down_bias(m.expert)) std::fill(b_.bias.begin(), b_.bias.end(), 0.0);
    float* row = room(b_.row, b_.bias.size());
    std::transform(b_.bias.begin(), b_.bias.end(), row, [](double v) { return static_cast<float>(v); });
    put(m.bias, of(spec_.y_type), bias_of_down ? 0 : first, row, b_.bias.size());
  }

  // Loads the two factors of row n: features [first, first + count), and H numbers.
  void load(const Matrix& m, uint64_t n, uint32_t first, uint32_t count, float* left, float* right) {
    const uint32_t hidden = spec_.hidden;
    if (m.of == Matrix::Of::kRouter || m.of == Matrix::Of::kSharedGate) {
      const bool shared = m.of == Matrix::Of::kSharedGate;
      std::copy_n(shared ? &pass_.shared_logits[n] : &pass_.logits[n * spec_.experts + first], count, left);
      widen(right, at(layer_.x, spec_.x_type, n * hidden), spec_.x_type, hidden);
      return;
    }
    const Kept::Row& row = pass_.kept.rows()[n];
    if (m.of == Matrix::Of::kGateUp) {
      std::copy_n(pass_.pre_activations(m.expert, n) + first, count, left);
    } else {
      float* up = nullptr;
      pass_.kept.load(left, row, first, count);
      if (spec_.gated()) pass_.kept.load(up = room(b_.row, count), row, pass_.width(m.expert) + first, count);
      activate(left, up, spec_, count);
    }
    const bool x = m.of == Matrix::Of::kGateUp;
    const void* from = at(x ? layer_.x : g_.y, spec_.x_type, uint64_t{row.token} * hidden);
    if (row.received != Kept::kOwn) {
      from = x ? pass_.x_row(row.received) : pass_.received.data() + uint64_t{row.received} * pass_.kept.row_bytes();
    }
    widen(right, from, spec_.x_type, hidden);
    if (x != spec_.weights_on_input) return;  // the weight is a factor of x, or else of dY, but not of both
    for (uint32_t h = 0; h < hidden; ++h) right[h] *= row.weight;
  }

  void store(const Matrix& m, uint32_t first, uint32_t count, const float* sum) {
    const uint32_t hidden = spec_.hidden;
    if (m.by_feature) {
      const uint32_t gates = first < m.gates ? min_of(count, m.gates - first) : 0;
      if (m.to != nullptr) put(m.to, m.type, uint64_t{first} * hidden, sum, uint64_t{gates} * hidden);
      if (gates == count || m.up == nullptr) return;
      const uint64_t before = first + gates - m.gates;
      return put(m.up, m.type, before * hidden, sum + uint64_t{gates} * hidden, uint64_t{count - gates} * hidden);
    }
    float* row = room(b_.row, count);
    for (uint32_t h = 0; h < hidden; ++h) {
      for (uint32_t i = 0; i < count; ++i) row[i] = sum[size_t{i} * hidden + h];
      put(m.to, m.type, uint64_t{h} * m.features + first, row, count);
    }
  }

  // Writes or adds n elements of a result, from element `first` on.
  void put(void* to, DType type, uint64_t first, const float* values, uint64_t n) const {
    if (!g_.accumulates) return narrow(at(to, type, first), values, type, n);
    accumulate(static_cast<float*>(to) + first, values, DType::kFloat32, n);
  }

  Backward& pass_;
  const Gradients& g_;
  const Layer& layer_;
  const LayerSpec& spec_;
  WeightBuffers& b_;
  std::vector<Matrix> matrices_;
};

}  // namespace

void weight_gradients(Backward& pass, WeightBuffers& buffers) {
  Parts(pass, buffers).take_all();
}

}  // namespace flashmoe::cpu

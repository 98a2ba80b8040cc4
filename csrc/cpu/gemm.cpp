#include "cpu/gemm.h"

#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "host/fork_lock.h"

namespace flashmoe::cpu {
namespace {

// out_t[n, rows] = (a[rows, k] * w[n, k]^T)^T, or with Rows::kContraction (a[rows, k] * w[k, n])^T. In this form the
// rows are the first dimension of the BLAS, whose matrices are column-major. Its kernels cut the first dimension into
// larger pieces than the second.
void sgemm(float* out_t, const float* a, uint32_t rows, const float* w, uint64_t w_stride, uint32_t n, uint32_t k,
           Rows of) {
  scipy_cblas_sgemm(CblasColMajor, CblasTrans, of == Rows::kResults ? CblasNoTrans : CblasTrans,
                    static_cast<blasint>(rows), static_cast<blasint>(n), static_cast<blasint>(k), 1.0f, a,
                    static_cast<blasint>(k), w, static_cast<blasint>(w_stride), 0.0f, out_t,
                    static_cast<blasint>(rows));
}

// Which numbers of rows a call of the BLAS may have: the multiples of `unit` up to `most`.
struct CallSizes {
  uint32_t unit, most;
};

// Whether a row has the same bits at every place of every call of these sizes. `a` has at least most + 1 rows. For each
// number of rows, one call computes rows 0, 1, ... of `a`, and another computes rows 1, 2, ...: each row but the first
// and the last is then at two neighbouring places. If it has the same bits at both, for all rows, then all places of
// these calls are alike. Row 0 is also compared with row 0 of the smallest call: if they agree, the number of rows
// makes no difference either.
bool places_are_alike(CallSizes sizes, const std::vector<float>& a, const std::vector<float>& w, uint32_t n, uint32_t k,
                      Rows of) {
  const uint64_t stride = of == Rows::kResults ? k : n;
  std::vector<float> unit(size_t{sizes.unit} * n), here(size_t{sizes.most} * n), next(here.size());
  sgemm(unit.data(), a.data(), sizes.unit, w.data(), stride, n, k, of);
  for (uint32_t rows = sizes.unit; rows <= sizes.most; rows += sizes.unit) {
    sgemm(here.data(), a.data(), rows, w.data(), stride, n, k, of);
    sgemm(next.data(), a.data() + k, rows, w.data(), stride, n, k, of);
    for (uint32_t j = 0; j < n; ++j) {
      const float* const column = here.data() + size_t{j} * rows;
      if (column[0] != unit[size_t{j} * sizes.unit]) return false;
      if (!std::equal(column + 1, column + rows, next.data() + size_t{j} * rows)) return false;
    }
  }
  return true;
}

CallSizes probe(uint32_t n, uint32_t k, Rows of) {
  constexpr CallSizes kCandidates[] = {{16, 128}, {16, 16}, {8, 8}, {4, 4}, {2, 2}};
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> a(size_t{2 * kCandidates[0].most} * k), w(size_t{n} * k);
  for (float& v : a) v = uniform(random);
  for (float& v : w) v = uniform(random);
  for (const CallSizes sizes : kCandidates) {
    if (places_are_alike(sizes, a, w, n, k, of)) return sizes;
  }
  return {1, 1};
}

// What the probes have found out about the BLAS.
struct Probes {
  bool one_thread = false;
  std::unordered_map<uint64_t, CallSizes> known[2];  // for each value of Rows
};

CallSizes call_sizes(uint32_t n, uint32_t k, Rows of) {
  static Probes probes;
  const std::lock_guard lock(host::ForkLock<Probes>::mutex());
  // The engine's actors are its threads. The BLAS must not start threads of its own for each of them.
  if (!std::exchange(probes.one_thread, true)) scipy_openblas_set_num_threads(1);
  const uint64_t shape = uint64_t{n} << 32 | k;
  auto& known = probes.known[static_cast<uint32_t>(of)];
  const auto found = known.find(shape);
  if (found != known.end()) return found->second;
  return known.emplace(shape, probe(n, k, of)).first->second;  // if there is no memory to probe, nothing is stored
}

// out[i, j] = in[j, i] for i < rows, j < n; rows of `in` are `stride` apart. Works on squares of four, which the
// compiler turns into shuffles.
void transpose(float* out, const float* in, uint32_t rows, uint32_t stride, uint32_t n) {
  constexpr uint32_t kSide = 4;
  uint32_t i = 0;
  for (; i + kSide <= rows; i += kSide) {
    uint32_t j = 0;
    for (; j + kSide <= n; j += kSide) {
      float square[kSide][kSide];
      for (uint32_t y = 0; y < kSide; ++y) std::memcpy(square[y], in + size_t{j + y} * stride + i, sizeof(square[y]));
      for (uint32_t x = 0; x < kSide; ++x) {
        const float column[kSide] = {square[0][x], square[1][x], square[2][x], square[3][x]};
        std::memcpy(out + size_t{i + x} * n + j, column, sizeof(column));
      }
    }
    for (; j < n; ++j) {
      for (uint32_t x = 0; x < kSide; ++x) out[size_t{i + x} * n + j] = in[size_t{j} * stride + i + x];
    }
  }
  for (; i < rows; ++i) {
    for (uint32_t j = 0; j < n; ++j) out[size_t{i} * n + j] = in[size_t{j} * stride + i];
  }
}

}  // namespace

uint32_t padded_rows(uint32_t rows, uint32_t n, uint32_t k, Rows of) {
  const uint32_t unit = call_sizes(n, k, of).unit;
  return (rows + unit - 1) / unit * unit;
}

void gemm(float* out, const float* a, uint32_t rows, const void* w, uint64_t w_stride, DType t, uint32_t n, uint32_t k,
          GemmBuffers& buffers, Rows of) {
  const float* weights = static_cast<const float*>(w);
  if (t != DType::kFloat32) {
    const uint32_t count = of == Rows::kResults ? n : k, length = of == Rows::kResults ? k : n;
    buffers.weights.resize(size_t{n} * k);
    for (uint32_t i = 0; i < count; ++i) {
      widen(buffers.weights.data() + size_t{i} * length,
            static_cast<const uint8_t*>(w) + i * w_stride * element_bytes(t), t, length);
    }
    weights = buffers.weights.data();
    w_stride = length;
  }
  const CallSizes sizes = call_sizes(n, k, of);
  buffers.piece.resize(size_t{sizes.most} * n);
  for (uint32_t r = 0; r < rows; r += sizes.most) {
    const uint32_t real = std::min(sizes.most, rows - r);
    const uint32_t count = (real + sizes.unit - 1) / sizes.unit * sizes.unit;
    sgemm(buffers.piece.data(), a + size_t{r} * k, count, weights, w_stride, n, k, of);
    transpose(out + size_t{r} * n, buffers.piece.data(), real, count, n);
  }
}

void add_outer(float* sum, const float* a, uint32_t n, const float* b, uint32_t columns, uint32_t rows) {
  if (rows == 0) return;
  scipy_cblas_sgemm(CblasColMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(columns), static_cast<blasint>(n),
                    static_cast<blasint>(rows), 1.0f, b, static_cast<blasint>(columns), a, static_cast<blasint>(n),
                    1.0f, sum, static_cast<blasint>(columns));
}

}  // namespace flashmoe::cpu

#include "cpu/gemm.h"

#include <cblas.h>

#include <cstring>
#include <mutex>
#include <random>
#include <unordered_map>

namespace flashmoe::cpu {
namespace {

// The engine's actors are its threads; the BLAS must not start its own behind each of them.
void use_one_blas_thread() {
  static const bool done = [] {
    scipy_openblas_set_num_threads(1);
    return true;
  }();
  (void)done;
}

void sgemm(float* out, const float* a, uint32_t rows, const float* w, uint64_t w_stride, uint32_t n, uint32_t k) {
  scipy_cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(rows), static_cast<blasint>(n),
                    static_cast<blasint>(k), 1.0f, a, static_cast<blasint>(k), w, static_cast<blasint>(w_stride), 0.0f,
                    out, static_cast<blasint>(n));
}

// The most rows a probe tries; a longer tile is computed in pieces of this many.
constexpr uint32_t kPiece = 128;

// Whether every multiple of g rows up to kPiece gives each row the bits it has among kPiece rows shifted by one place.
bool rows_are_independent(uint32_t g, const std::vector<float>& a, const std::vector<float>& w, uint32_t n, uint32_t k) {
  std::vector<float> whole(size_t{kPiece} * n), part(whole.size());
  sgemm(whole.data(), a.data(), kPiece, w.data(), k, n, k);
  for (uint32_t rows = g; rows <= kPiece; rows += g) {
    const uint32_t shift = kPiece - rows == 0 ? 0 : 1;
    sgemm(part.data(), a.data() + size_t{shift} * k, rows, w.data(), k, n, k);
    if (std::memcmp(part.data(), whole.data() + size_t{shift} * n, size_t{rows} * n * sizeof(float)) != 0) return false;
  }
  return true;
}

uint32_t probe(uint32_t n, uint32_t k) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> a(size_t{kPiece} * k), w(size_t{n} * k);
  for (float& v : a) v = uniform(random);
  for (float& v : w) v = uniform(random);
  for (const uint32_t g : {8u, 16u, 32u, 64u}) {
    if (rows_are_independent(g, a, w, n, k)) return g;
  }
  return 1;
}

uint32_t granularity(uint32_t n, uint32_t k) {
  static std::mutex mutex;
  static std::unordered_map<uint64_t, uint32_t> known;
  const std::lock_guard lock(mutex);
  const auto [it, fresh] = known.try_emplace(uint64_t{n} << 32 | k, 0);
  if (fresh) it->second = probe(n, k);
  return it->second;
}

}  // namespace

uint32_t padded_rows(uint32_t rows, uint32_t n, uint32_t k) {
  use_one_blas_thread();
  const uint32_t g = granularity(n, k);
  return (rows + g - 1) / g * g;
}

void gemm(float* out, const float* a, uint32_t rows, const void* w, uint64_t w_stride, DType t, uint32_t n, uint32_t k,
          std::vector<float>& wide) {
  const uint32_t padded = padded_rows(rows, n, k);
  const float* wf = static_cast<const float*>(w);
  if (t != DType::kFloat32) {
    wide.resize(size_t{n} * k);
    for (uint32_t i = 0; i < n; ++i) {
      widen(wide.data() + size_t{i} * k, static_cast<const uint16_t*>(w) + i * w_stride, t, k);
    }
    wf = wide.data();
    w_stride = k;
  }
  const uint32_t step = granularity(n, k) == 1 ? 1 : kPiece;
  for (uint32_t r = 0; r < padded; r += step) {
    sgemm(out + size_t{r} * n, a + size_t{r} * k, std::min(step, padded - r), wf, w_stride, n, k);
  }
}

}  // namespace flashmoe::cpu

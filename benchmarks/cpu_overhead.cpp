// What the protocol costs on the CPU engine: whole calls at R = 1 against the same GEMMs in a plain loop.
//
//   cpu_overhead FILE PROCESSORS REPEATS      (benchmarks/cpu_overhead.py writes FILE and reads the printed JSON)
#include <cblas.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <thread>

#include "cpu/context.h"

namespace flashmoe::cpu {
namespace {

struct Problem {
  uint32_t tokens, hidden, intermediate, experts, top_k;
  std::vector<float> x, router, gate_up, down;
};

Problem read_problem(const char* path) {
  std::ifstream in(path, std::ios::binary);
  Problem p{};
  in.read(reinterpret_cast<char*>(&p), 5 * sizeof(uint32_t));
  auto read = [&](std::vector<float>& v, size_t n) {
    v.resize(n);
    in.read(reinterpret_cast<char*>(v.data()), static_cast<std::streamsize>(n * sizeof(float)));
  };
  read(p.x, size_t{p.tokens} * p.hidden);
  read(p.router, size_t{p.experts} * p.hidden);
  read(p.gate_up, size_t{p.experts} * 2 * p.intermediate * p.hidden);
  read(p.down, size_t{p.experts} * p.hidden * p.intermediate);
  if (!in) {
    std::fprintf(stderr, "%s: too short\n", path);
    std::exit(1);
  }
  return p;
}

double milliseconds(const std::function<void()>& run) {
  const uint64_t start = monotonic_ns();
  run();
  return static_cast<double>(monotonic_ns() - start) * 1e-6;
}

double median(std::vector<double> v) {
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

// The layer's GEMMs alone, on ready inputs: all experts' rows are gathered before the clock starts. Threads take jobs
// of up to kTile rows in turn. Each BLAS call has up to `call_rows` rows, and its results stay as the BLAS writes them.
class PlainLoop {
 public:
  // ids: [T, K], the experts that the router chose.
  PlainLoop(const Problem& p, const std::vector<int32_t>& ids, uint32_t threads, uint32_t call_rows)
      : p_(p), threads_(threads), call_rows_(call_rows) {
    std::vector<uint32_t> rows(p.experts, 0);
    for (const int32_t expert : ids) ++rows[static_cast<uint32_t>(expert)];
    for (uint32_t t = 0; t < p.tokens; t += kTile) jobs_.push_back({p.experts, t, std::min(kTile, p.tokens - t)});
    size_t first = 0;
    for (uint32_t e = 0; e < p.experts; ++e) {
      for (uint32_t r = 0; r < rows[e]; r += kTile) jobs_.push_back({e, first + r, std::min(kTile, rows[e] - r)});
      first += rows[e];
    }
    gathered_.assign(first * p.hidden, 0.5f);
    gate_.resize(first * p.intermediate);
    up_.resize(first * p.intermediate);
    hidden_.assign(first * p.intermediate, 0.5f);
    out_.resize(first * p.hidden);
    logits_.resize(size_t{p.tokens} * p.experts);
  }

  void run() {
    std::atomic<size_t> next = 0;
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < threads_; ++i) threads.emplace_back([&] { work(next); });
    for (std::thread& t : threads) t.join();
  }

 private:
  static constexpr uint32_t kTile = 128;
  struct Job {
    uint32_t expert;  // the number of experts stands for the router
    size_t first;     // the job's first row
    uint32_t rows;
  };

  void work(std::atomic<size_t>& next) {
    const uint32_t h = p_.hidden, inner = p_.intermediate;
    for (size_t i = next++; i < jobs_.size(); i = next++) {
      const auto [e, first, rows] = jobs_[i];
      if (e == p_.experts) {
        multiply(&logits_[first * p_.experts], &p_.x[first * h], rows, p_.router.data(), p_.experts, h);
        continue;
      }
      const float* gate_up = &p_.gate_up[size_t{e} * 2 * inner * h];
      multiply(&gate_[first * inner], &gathered_[first * h], rows, gate_up, inner, h);
      multiply(&up_[first * inner], &gathered_[first * h], rows, gate_up + size_t{inner} * h, inner, h);
      multiply(&out_[first * h], &hidden_[first * inner], rows, &p_.down[size_t{e} * h * inner], h, inner);
    }
  }

  void multiply(float* out, const float* a, uint32_t rows, const float* w, uint32_t n, uint32_t k) const {
    for (uint32_t r = 0; r < rows; r += call_rows_) {
      const auto m = static_cast<blasint>(std::min(call_rows_, rows - r));
      scipy_cblas_sgemm(CblasColMajor, CblasTrans, CblasNoTrans, m, static_cast<blasint>(n), static_cast<blasint>(k),
                        1.0f, a + size_t{r} * k, static_cast<blasint>(k), w, static_cast<blasint>(k), 0.0f,
                        out + size_t{r} * n, m);
    }
  }

  const Problem& p_;
  const uint32_t threads_, call_rows_;
  std::vector<Job> jobs_;
  std::vector<float> gathered_, gate_, up_, hidden_, out_, logits_;
};

int run(const char* path, uint32_t processors, int repeats) {
  const Problem p = read_problem(path);
  Limits limits;
  limits.max_tokens = p.tokens;
  limits.hidden = p.hidden;
  limits.intermediate = p.intermediate;
  limits.experts = limits.max_local_experts = p.experts;
  limits.top_k = limits.return_slots = p.top_k;
  limits.x_bytes = limits.intermediate_bytes = limits.return_bytes = 4;
  limits.processors = processors;
  Context context(host::make_single_rank_group(make_heap_layout(limits).bytes), 0, limits, 30'000'000'000);

  std::vector<float> out(p.x.size());
  Layer layer;
  layer.spec.hidden = p.hidden;
  layer.spec.intermediate = p.intermediate;
  layer.spec.experts = p.experts;
  layer.spec.top_k = p.top_k;
  layer.spec.set_types(DType::kFloat32);
  layer.x = p.x.data();
  layer.router = p.router.data();
  layer.gate_up = p.gate_up.data();
  layer.down = p.down.data();
  layer.out = out.data();
  CallOptions options;
  options.tokens = p.tokens;
  for (uint32_t e = 0; e < p.experts; ++e) options.placement.expert(0);
  options.order = {.raster = 4, .window = 16 * processors};  // as python/flashmoe/engines/cpu.py has it

  // This call is not timed: the plain loops need the expert ids that it reports.
  std::vector<int32_t> ids(size_t{p.tokens} * p.top_k);
  std::vector<float> weights(ids.size());
  context.call(layer, options, {ids.data(), weights.data()});
  const uint32_t unit = padded_rows(1, p.intermediate, p.hidden);
  PlainLoop same(p, ids, processors, unit), free(p, ids, processors, 128);
  // The engine and both loops are timed in turn, so that other work of the machine slows all three alike.
  std::vector<double> engine_ms, same_ms, free_ms, over_same, over_free;
  for (int i = 0; i < repeats; ++i) {
    engine_ms.push_back(milliseconds([&] { context.call(layer, options); }));
    same_ms.push_back(milliseconds([&] { same.run(); }));
    free_ms.push_back(milliseconds([&] { free.run(); }));
    over_same.push_back(engine_ms.back() / same_ms.back() - 1);
    over_free.push_back(engine_ms.back() / free_ms.back() - 1);
  }
  std::printf(
      "{\"processors\": %u, \"repeats\": %d, \"blas_core\": \"%s\", \"blas_call_rows\": %u, \"engine_ms\": %.3f, "
      "\"same_gemms_ms\": %.3f, \"gemms_of_128_rows_ms\": %.3f, \"overhead_over_same_gemms\": %.4f, "
      "\"overhead_over_gemms_of_128_rows\": %.4f}\n",
      processors, repeats, scipy_openblas_get_corename(), unit, median(engine_ms), median(same_ms), median(free_ms),
      median(over_same), median(over_free));
  return 0;
}

}  // namespace
}  // namespace flashmoe::cpu

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: cpu_overhead FILE PROCESSORS REPEATS\n");
    return 2;
  }
  return flashmoe::cpu::run(argv[1], static_cast<uint32_t>(std::atoi(argv[2])), std::atoi(argv[3]));
}

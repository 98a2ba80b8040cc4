// What docs/extending.md says, done on a GPU: layers with the program kForwardAndOuter through the CUDA engine's host side, which
// is compiled with the same program. What kOuter keeps is compared with a reference in fp64, as is the layer's output; calls of
// the same tokens are to keep the same bits.
//
//   extending CUBIN bf16|fp16 [smoke]     smoke: on the tests' own driver, which computes nothing; compare nothing
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "cpu/types.h"
#include "cuda/context.h"

namespace flashmoe::cuda {
namespace {

static_assert(kExpertProducts == 1);

struct Shape {
  uint32_t tokens, hidden, intermediate, experts, top_k;
};
// Columns of H and I that fill no block, tiles and stages that rows do not fill, experts without rows, experts of several tiles.
constexpr Shape kShapes[] = {{700, 320, 384, 6, 2}, {5, 64, 8, 4, 1}, {300, 256, 256, 40, 4}, {1500, 520, 136, 3, 2}};
constexpr uint32_t kCalls = 10;

class Test {
 public:
  Test(const Shape& shape, const std::string& cubin, DType dtype, bool smoke)
      : s_(shape), cubin_(cubin), dtype_(dtype), smoke_(smoke) {
    const uint64_t row = s_.hidden, up = 2 * uint64_t{s_.intermediate} * s_.hidden;
    x_ = random(s_.tokens * row, 1.0f);
    gate_up_ = random(s_.experts * up, 2.0f / std::sqrt(static_cast<float>(s_.hidden)));
    down_ = random(s_.experts * up / 2, 1.0f / std::sqrt(static_cast<float>(s_.intermediate)));
    // The last expert has no rows; of the others, the first have more.
    for (uint32_t t = 0; t < s_.tokens; ++t) {
      for (uint32_t k = 0; k < s_.top_k; ++k) {
        int32_t expert = static_cast<int32_t>(std::min(random_() % (s_.experts - 1), random_() % (s_.experts - 1)));
        while (std::find(ids_.begin() + t * s_.top_k, ids_.end(), expert) != ids_.end()) {
          expert = (expert + 1) % static_cast<int32_t>(s_.experts - 1);
        }
        ids_.push_back(expert);
        weights_.push_back(0.25f * static_cast<float>(1 + random_() % 4));
      }
    }
  }

  void run() {
    Limits limits;
    limits.max_tokens = s_.tokens;
    limits.hidden = s_.hidden;
    limits.intermediate = s_.intermediate;
    limits.experts = limits.max_local_experts = s_.experts;
    limits.top_k = limits.return_slots = s_.top_k;
    limits.x_bytes = limits.intermediate_bytes = limits.return_bytes = 2;
    limits.processors = 0;
    const Device device(0);
    Context context(0, {}, limits, {.raster = 0, .gemm1_lists = 0, .own_first = 0}, 30'000'000'000);
    const DeviceMemory x = uploaded(device, packed(x_)), gate_up = uploaded(device, packed(gate_up_)),
                       down = uploaded(device, packed(down_)), ids = uploaded(device, ids_),
                       weights = uploaded(device, weights_);
    const std::vector<float> nan(uint64_t{s_.experts} * s_.intermediate * s_.hidden, NAN);
    const DeviceMemory kept = uploaded(device, nan), out(device, 2 * uint64_t{s_.tokens} * s_.hidden, "out");
    Layer layer;
    layer.spec = {{.hidden = s_.hidden, .intermediate = s_.intermediate, .experts = s_.experts, .top_k = s_.top_k}};
    layer.spec.set_types(dtype_);
    layer.spec.routing = Routing::kGiven;
    layer.placement.assign(s_.experts, 0);
    const uint64_t row_bytes = 2 * uint64_t{s_.hidden}, intermediate_bytes = 2 * uint64_t{s_.intermediate};
    layer.gate_up = {address(gate_up), row_bytes, 2 * s_.intermediate * row_bytes};
    layer.down = {address(down), intermediate_bytes, s_.hidden * intermediate_bytes};
    layer.kept = address(kept);
    layer.cubin = cubin_;
    const int64_t number = context.add_layer(layer, nullptr);
    std::vector<float> first(nan.size()), again(nan.size());
    for (uint32_t call = 0; call < kCalls; ++call) {
      kept.upload(nan.data(), kept.bytes());
      context.call(number,
                   {.tokens = s_.tokens,
                    .x = address(x),
                    .x_row_bytes = row_bytes,
                    .out = address(out),
                    .topk_ids = address(ids),
                    .topk_weights = address(weights)},
                   nullptr);
      context.synchronize(nullptr);
      kept.download(again.data(), kept.bytes());
      if (call == 0) first = again;
      if (!smoke_ && std::memcmp(first.data(), again.data(), kept.bytes()) != 0) fail("bits of call", call, 0, 0);
    }
    std::vector<uint16_t> results(out.bytes() / 2);
    out.download(results.data(), out.bytes());
    if (!smoke_) compare(first, unpacked(results));
  }

 private:
  [[noreturn]] void fail(const char* what, uint64_t at, double got, double expected) const {
    std::fprintf(stderr, "T=%u H=%u I=%u E=%u K=%u: %s %llu: got %g, expected %g\n", s_.tokens, s_.hidden,
                 s_.intermediate, s_.experts, s_.top_k, what, static_cast<unsigned long long>(at), got, expected);
    std::exit(1);
  }

  void compare(const std::vector<float>& kept, const std::vector<float>& out) const {
    const uint64_t h = s_.hidden, i = s_.intermediate;
    std::vector<double> sum(kept.size()), scale(kept.size());
    // A rounding of intermediate rows and, of the output, two more; sums in fp32.
    const double tolerance = dtype_ == DType::kBFloat16 ? 0.005 : 0.001;
    std::vector<double> hidden(i);
    for (uint32_t t = 0; t < s_.tokens; ++t) {
      std::vector<double> row(h), row_scale(h);
      for (uint32_t pair = t * s_.top_k; pair < (t + 1) * s_.top_k; ++pair) {
        const uint64_t expert = static_cast<uint64_t>(ids_[pair]);
        activate(&gate_up_[expert * 2 * i * h], &x_[t * h], hidden);
        for (uint64_t a = 0; a < i; ++a) {
          for (uint64_t b = 0; b < h; ++b) {
            const double product = hidden[a] * x_[t * h + b];
            sum[(expert * i + a) * h + b] += product;
            scale[(expert * i + a) * h + b] += std::fabs(product);
          }
        }
        for (uint64_t b = 0; b < h; ++b) {
          for (uint64_t a = 0; a < i; ++a) {
            const double product = weights_[pair] * double{down_[(expert * h + b) * i + a]} * hidden[a];
            row[b] += product;
            row_scale[b] += std::fabs(product);
          }
        }
      }
      for (uint64_t b = 0; b < h; ++b) {
        // Rounding a result depends on the result.
        if (!(std::fabs(out[t * h + b] - row[b]) <= tolerance * (row_scale[b] + std::fabs(row[b])) + 1e-6)) {
          fail("output", t * h + b, out[t * h + b], row[b]);
        }
      }
    }
    for (size_t n = 0; n < kept.size(); ++n) {
      if (!(std::fabs(kept[n] - sum[n]) <= tolerance * scale[n])) fail("kept", n, kept[n], sum[n]);
    }
  }

  void activate(const float* gates, const float* row, std::vector<double>& hidden) const {
    for (uint64_t a = 0; a < s_.intermediate; ++a) {
      double gate = 0, up = 0;
      for (uint64_t b = 0; b < s_.hidden; ++b) {
        gate += double{gates[a * s_.hidden + b]} * row[b];
        up += double{gates[(s_.intermediate + a) * s_.hidden + b]} * row[b];
      }
      hidden[a] = gate / (1 + std::exp(-gate)) * up;
    }
  }

  // Values that the type has.
  std::vector<float> random(uint64_t n, float scale) {
    std::uniform_real_distribution<float> uniform(-scale, scale);
    std::vector<float> values(n);
    for (float& v : values) v = uniform(random_);
    return unpacked(packed(values));
  }
  std::vector<uint16_t> packed(const std::vector<float>& values) const {
    std::vector<uint16_t> to(values.size());
    cpu::narrow(to.data(), values.data(), dtype_, values.size());
    return to;
  }
  std::vector<float> unpacked(const std::vector<uint16_t>& values) const {
    std::vector<float> to(values.size());
    cpu::widen(to.data(), values.data(), dtype_, values.size());
    return to;
  }
  template <class T>
  static DeviceMemory uploaded(const Device& device, const std::vector<T>& values) {
    DeviceMemory memory(device, values.size() * sizeof(T), "tensor");
    memory.upload(values.data(), memory.bytes());
    return memory;
  }
  static uint64_t address(const DeviceMemory& memory) { return reinterpret_cast<uint64_t>(memory.as<void>()); }

  const Shape s_;
  const std::string cubin_;
  const DType dtype_;
  const bool smoke_;
  std::mt19937 random_{11};
  std::vector<float> x_, gate_up_, down_, weights_;
  std::vector<int32_t> ids_;
};

}  // namespace
}  // namespace flashmoe::cuda

int main(int argc, char** argv) {
  using namespace flashmoe;
  if (argc < 3) return 2;
  const auto dtype = std::string(argv[2]) == "bf16" ? DType::kBFloat16 : DType::kFloat16;
  try {
    for (const cuda::Shape& shape : cuda::kShapes) {
      cuda::Test(shape, argv[1], dtype, argc > 3).run();
      std::printf("T=%u H=%u I=%u E=%u K=%u %s: %u calls\n", shape.tokens, shape.hidden, shape.intermediate,
                  shape.experts, shape.top_k, argv[2], cuda::kCalls);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

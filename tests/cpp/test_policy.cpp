// What the engines choose for a call: for the layers of docs/measured.md, and where one choice turns into another.
#include <algorithm>
#include <array>
#include <vector>

#include "check.h"
#include "cpu/policy.h"
#include "cuda/limits.h"
#include "cuda/policy.h"
#include "flashmoe/gpu/decode_memory.h"

namespace flashmoe::test {
namespace {

using cuda::kHopper;
using cuda::Shape;
using Starts = std::vector<uint32_t>;

constexpr uint32_t kBlocks = 132;  // thread blocks of an H100 or H200
constexpr uint32_t kHeld = 0xffffffff;
constexpr ReturnMode kDirect = ReturnMode::kDirect, kReduced = ReturnMode::kReduced;

// ---- CUDA: measured layers --------------------------------------------------------------------------------

struct Layer {
  uint32_t hidden, intermediate, experts, top_k;
  bool gated;

  Shape on(uint32_t ranks) const {
    return {.ranks = ranks,
            .local_experts = experts / ranks,
            .hidden = hidden,
            .intermediate = intermediate,
            .top_k = top_k,
            .tokens = 8192,
            .experts = experts,
            .first_columns = intermediate / (gated ? 128 : 256),
            .returning_k = intermediate};
  }
};
constexpr Layer kPaper64{2048, 2048, 64, 2, false}, kPaper8{2048, 2048, 8, 2, false},
    kPaper128{2048, 2048, 128, 2, false}, kQwen3{2048, 768, 128, 8, true}, kMixtral{4096, 14336, 8, 2, true},
    kQwen2{2048, 1408, 64, 4, true}, kPhi{4096, 6400, 16, 2, true}, kOlmoe{2048, 1024, 64, 8, true},
    kQwen3Next{2048, 512, 512, 10, true};

// How many blocks of columns each product has.
std::array<uint32_t, kProducts> gpu_columns(uint32_t hidden, uint32_t intermediate, bool gated) {
  Call c;
  c.shape.hidden = hidden;
  c.shape.intermediate = intermediate;
  c.cut_columns(kHopper.columns_per_task(gated));
  std::array<uint32_t, kProducts> columns;
  std::copy_n(c.policy.columns, kProducts, columns.begin());
  return columns;
}

Starts gpu_groups(uint32_t columns, ReturnMode mode, bool whole = false) {
  uint16_t first[kMaxGroups + 1] = {};
  const uint32_t groups = cuda::return_groups(columns, mode, whole, first);
  return {first, first + groups + 1};
}

LayerSpec spec_of(DType y, DType weights) {
  LayerSpec spec;
  spec.set_types(y);
  spec.weight_type = weights;
  if (weights == DType::kFloat8E4M3) spec.token_type = spec.intermediate_type = weights;
  return spec;
}

void check_one_gpu() {
  const struct {
    Layer layer;
    uint32_t tokens, block, gemm0, gemm1;
    bool few, joined;
  } expected[] = {
      {kPaper64, 16384, 128, 8, 8, false, true},  {kPaper8, 16384, 128, 8, 8, false, true},
      {kPaper128, 16384, 128, 8, 8, false, true}, {kQwen3, 8192, 64, 6, 8, false, false},
      {kQwen3, 1024, 8, 6, 8, false, false},      {kQwen3, 64, 8, 6, 8, true, false},
      {kQwen3, 8, 8, 6, 8, true, false},          {kQwen3, 1, 8, 6, 8, true, false},
      {kMixtral, 8192, 64, 112, 16, false, true}, {kQwen2, 8192, 64, 11, 8, false, false},
      {kPhi, 8192, 64, 50, 16, false, true},
  };
  for (const auto& e : expected) {
    const Layer& l = e.layer;
    const Shape shape = l.on(1);
    CHECK_EQ(cuda::token_block(kHopper, e.tokens, l.experts, l.top_k, kBlocks), e.block);
    const std::array<uint32_t, kProducts> columns = gpu_columns(l.hidden, l.intermediate, l.gated);
    CHECK_EQ(columns[kFirst], e.gemm0);
    CHECK_EQ(columns[kReturning], e.gemm1);
    const CallShape call{.ranks = 1, .tokens = e.tokens, .experts = l.experts, .top_k = l.top_k};
    CHECK_EQ(cuda::is_few(call, spec_of(DType::kBFloat16, DType::kBFloat16)), e.few);
    const bool joined = cuda::joins_rows(kHopper, shape, e.tokens, 0);
    CHECK_EQ(joined, e.joined);
    CHECK(!cuda::reduces(1, l.top_k, l.intermediate));
  }
}

struct Order {
  uint32_t lag, raster, window, lists, own_first, senders, link_clusters;
  bool operator==(const Order&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Order& o) {
    return out << "{" << o.lag << ", " << o.raster << ", " << o.window << ", " << o.lists << ", " << o.own_first << ", "
               << o.senders << ", " << o.link_clusters << "}";
  }
};

constexpr OrderPolicy kNothing = OrderPolicy::built_in();

Order order_of(const Shape& shape, ReturnMode mode, const OrderPolicy& asked = kNothing, uint32_t blocks = kBlocks) {
  const OrderPolicy o = cuda::task_order(kHopper, shape, mode, blocks, asked);
  return {o.gemm1_lag, o.raster, o.window, o.gemm1_lists, o.own_first, o.senders, o.link_clusters};
}

// For a rank alone, every layer has the same order. On 2 and on 4 GPUs with `direct`, GEMM1 begins the earlier, the
// slower the link is compared with GEMM1.
void check_orders() {
  const struct {
    Layer layer;
    Order two, four;
  } expected[] = {
      {kPaper64, {kHeld, 6, 66, 1, 1, 16, 0}, {kHeld, 6, 66, 1, 1, 16, 0}},
      {kPaper8, {kHeld, 6, 66, 1, 1, 16, 0}, {kHeld, 6, 66, 1, 1, 16, 0}},
      {kPaper128, {kHeld, 6, 66, 1, 1, 16, 0}, {kHeld, 6, 66, 1, 1, 16, 0}},
      // On two GPUs, the lag is 0.57 of GEMM0's tasks: 64 experts * (4 + 0.5) tiles * 6 columns.
      {kQwen3, {982, 6, 198, 1, 2, 16, 0}, {132, 6, 198, 2, 2, 16, 0}},
      {kMixtral, {kHeld, 6, 66, 1, 1, 16, 0}, {kHeld, 6, 66, 1, 1, 16, 0}},
      {kQwen2, {kHeld, 6, 132, 1, 1, 16, 0}, {1325, 6, 132, 1, 2, 16, 0}},
      {kOlmoe, {kHeld, 6, 132, 1, 2, 16, 0}, {740, 6, 132, 1, 2, 16, 0}},
      {kQwen3Next, {132, 6, 264, 2, 2, 16, 0}, {132, 6, 264, 2, 2, 16, 0}},
      {kPhi, {kHeld, 6, 66, 1, 1, 16, 0}, {kHeld, 6, 66, 1, 1, 16, 0}},
  };
  for (const auto& e : expected) {
    CHECK_EQ(order_of(e.layer.on(1), kDirect), (Order{kHeld, 8, 264, 1, 1, 0, 0}));
    CHECK_EQ(order_of(e.layer.on(2), kDirect), e.two);
    CHECK_EQ(order_of(e.layer.on(4), kDirect), e.four);
  }
  // With `reduced`, rows have to wait for their sums. So GEMM1 does not begin earlier, however slow the link is.
  CHECK_EQ(order_of(kQwen3.on(4), kReduced), (Order{kHeld, 6, 198, 1, 1, 16, 4}));
}

void check_asked_orders() {
  const OrderPolicy all{
      .gemm1_lag = 7, .raster = 3, .window = 9, .gemm1_lists = 2, .own_first = 3, .senders = 2, .link_clusters = 4};
  CHECK_EQ(order_of(kPaper64.on(2), kDirect, all), (Order{7, 3, 9, 2, 3, 2, 0}));
  CHECK_EQ(order_of(kPaper64.on(1), kDirect, all), (Order{7, 3, 9, 2, 3, 0, 0}));  // alone, a rank sends nothing
  OrderPolicy one = kNothing;
  one.window = 5;
  CHECK_EQ(order_of(kQwen3.on(4), kDirect, one), (Order{132, 6, 5, 2, 2, 16, 0}));
  // All blocks may send, except those that schedule (1) or form tiles (32 of 132 blocks, 2 of 4 blocks).
  one.senders = 200;
  CHECK_EQ(order_of(kQwen3.on(4), kDirect, one), (Order{132, 6, 5, 2, 2, 99, 0}));
  CHECK_EQ(order_of(kQwen3.on(4), kDirect, one, 4), (Order{4, 6, 5, 2, 2, 1, 0}));
  // At most all clusters but one stop early.
  CHECK_EQ(order_of(kPaper64.on(2), kReduced, all), (Order{7, 3, 9, 2, 3, 2, 4}));
  CHECK_EQ(order_of(kPaper64.on(2), kReduced, all, 8), (Order{7, 3, 9, 2, 3, 2, 3}));
}

// ---- CUDA: where one choice turns into another ------------------------------------------------------------

void check_token_blocks() {
  const struct {
    uint32_t tokens, experts, top_k, processors, block;
  } expected[] = {{0, 128, 8, 132, 8},       {1056, 128, 8, 132, 8},   {1057, 128, 8, 132, 16},
                  {8448, 128, 8, 132, 64},   {8449, 128, 8, 132, 128}, {65536, 128, 8, 132, 128},
                  {65536, 1024, 8, 132, 16},  // 16384 logits
                  {65536, 8, 32, 132, 64},    // 2048 choices
                  {65536, 1024, 32, 1, 16}};
  for (const auto& e : expected)
    CHECK_EQ(cuda::token_block(kHopper, e.tokens, e.experts, e.top_k, e.processors), e.block);
}

// In calls of few tokens with experts in FP8, intermediate rows are in fp32, in memory that is made for tiles of rows
// in e4m3 (sm90/decode/block.cuh). Checks that there is enough of it.
void check_few_rows_fit() {
  const LayerSpec fp8 = spec_of(DType::kBFloat16, DType::kFloat8E4M3);
  uint32_t checked = 0;
  for (const uint32_t experts : {1u, 2u, 3u, 8u, 60u, 128u, 1024u}) {
    for (const uint32_t top_k : {1u, 2u, 8u, 32u}) {
      for (const uint32_t tokens : {1u, 2u, 8u, 9u, 16u, 31u, 64u, 255u, 256u}) {
        for (const uint32_t shared : {0u, 1u, 4u}) {
          for (const uint32_t capacity : {0u, 1u, 3u}) {
            const uint32_t one = shared == 0 ? 0 : 1;
            const CallShape call{
                .ranks = 1, .tokens = tokens, .experts = experts + one, .top_k = top_k + one, .shared = shared};
            if (top_k > experts || !cuda::is_few(call, fp8)) continue;
            Limits l{.max_tokens = tokens, .hidden = 256, .experts = experts, .max_local_experts = experts};
            l.top_k = top_k, l.shared = shared, l.capacity = capacity;
            l.x_bytes = l.intermediate_bytes = 1, l.intermediate = 16, l.tile_rows = kHopper.tile_rows;
            const uint64_t rows =
                l.max_rows() + uint64_t{tokens} * (shared - one);  // a slice's rows are rows of their own
            const auto field = static_cast<uint32_t>(WorkField::kIntermediate);
            const WorkLayout layout = make_work_layout(l);
            CHECK(rows * l.intermediate * sizeof(float) <= layout.offset[field + 1] - layout.offset[field]);
            ++checked;
          }
        }
      }
    }
  }
  CHECK(checked > 500);
}

// The limits and the layer of four ranks, with 64 tokens each, and eight experts for each token.
struct Decoding {
  Limits limits;
  LayerSpec layer;
};
Decoding decoding(uint32_t hidden, uint32_t intermediate, uint32_t experts) {
  Decoding made;
  made.limits.ranks = 4;
  made.limits.max_tokens = 64;
  made.limits.tile_rows = kHopper.tile_rows;
  made.limits.max_local_experts = experts / 4;
  made.limits.hidden = made.layer.hidden = hidden;
  made.limits.intermediate = made.layer.intermediate = intermediate;
  made.limits.experts = made.layer.experts = experts;
  made.limits.top_k = made.layer.top_k = 8;
  return made;
}

// Whether a group uses the kernel for a few tokens is decided by what all ranks have agreed on, not by a call's
// number of tokens.
void check_few_in_group() {
  const auto [limits, layer] = decoding(2048, 768, 128);
  CHECK(cuda::few_in_group(limits, layer));
  // A unit has at most 32 rows, and at most one unit of an expert has fewer.
  CHECK_EQ(gpu::few_rows(limits), gpu::kFewGroupRows);
  CHECK(gpu::few_units(limits) >= gpu::few_rows(limits) / 32 + limits.max_local_experts);
  const auto field = static_cast<uint32_t>(gpu::FewField::kDone);
  const gpu::FewLayout layout = gpu::make_few_layout(limits);
  CHECK_EQ(layout.offset[0], work_bytes(limits));  // behind the workspace
  CHECK(layout.offset[field + 1] - layout.offset[field] >= gpu::few_units(limits) * sizeof(uint32_t));
  Limits larger = limits;  // with a promise, calls of this context may need as much
  larger.max_tokens = 8192;
  CHECK_EQ(gpu::few_units(larger), gpu::few_units(limits));
  auto refused = [](auto&& change) {
    auto [l, spec] = decoding(2048, 768, 128);
    change(l, spec);
    return !cuda::few_in_group(l, spec);
  };
  CHECK(refused([](Limits& l, LayerSpec&) { l.max_tokens = 65; }));  // 2080 rows may come to a rank
  CHECK(!refused([](Limits& l, LayerSpec& s) { l.max_tokens = 8192, s.most_tokens = 64; }));  // a promise
  CHECK(refused([](Limits& l, LayerSpec& s) { l.max_tokens = 8192, s.most_tokens = 65; }));
  CHECK(refused([](Limits& l, LayerSpec& s) { l.max_tokens = 65, s.most_tokens = 100; }));
  CHECK(refused([](Limits& l, LayerSpec&) { l.ranks = 1; }) && refused([](Limits& l, LayerSpec&) { l.rdma = 1; }));
  CHECK(refused([](Limits& l, LayerSpec&) { l.machine_ranks = 2; }));
  CHECK(refused([](Limits& l, LayerSpec&) { l.max_local_experts = 512; }));  // 32 packets of 513 offsets are too many
  CHECK(refused([](Limits&, LayerSpec& s) { s.experts = 127; }));            // more than 16 rows an expert
  CHECK(refused([](Limits&, LayerSpec& s) { s.return_mode = ReturnMode::kReduced; }));
  CHECK(refused([](Limits&, LayerSpec& s) { s.set_types(DType::kFloat32); }));
  CHECK(refused([](Limits&, LayerSpec& s) { s.weight_type = DType::kMxFp4; }));
  CHECK(refused([](Limits&, LayerSpec& s) { s.transposed = true; }) &&
        refused([](Limits&, LayerSpec& s) { s.shared = 1; }));
  CHECK(refused([](Limits&, LayerSpec& s) { s.slices = 2; }) &&
        refused([](Limits&, LayerSpec& s) { s.capacity_factor = 1.0; }));
}

// In FP8, with DeepSeek-V3's sizes. Intermediate rows are in fp32, in memory that is made for tiles of rows in e4m3.
void check_few_in_group_of_fp8() {
  auto [limits, layer] = decoding(7168, 2048, 256);
  layer.token_type = layer.weight_type = layer.intermediate_type = DType::kFloat8E4M3;
  limits.x_bytes = limits.intermediate_bytes = 1;
  CHECK(cuda::few_in_group(limits, layer));
  limits.max_tokens = 65;
  CHECK(!cuda::few_in_group(limits, layer));
  // For eight ranks with few experts each, this memory has no room for 16 rows of each expert.
  limits.ranks = 8;
  limits.max_local_experts = 4;
  limits.experts = layer.experts = 32;
  limits.top_k = layer.top_k = 4;
  uint32_t most = 0;
  for (limits.max_tokens = 1; limits.max_tokens <= 16; ++limits.max_tokens) {
    LayerSpec wide = layer;
    wide.token_type = wide.weight_type = wide.intermediate_type = DType::kBFloat16;
    CHECK(cuda::few_in_group(limits, wide));
    if (!cuda::few_in_group(limits, layer)) continue;
    most = limits.max_tokens;
    const auto field = static_cast<uint32_t>(WorkField::kIntermediate);
    const WorkLayout layout = make_work_layout(limits);
    CHECK(limits.max_rows() * limits.intermediate * sizeof(float) <= layout.offset[field + 1] - layout.offset[field]);
  }
  CHECK_EQ(most, 10u);  // 320 rows in fp32 fill five tiles of 256 rows in e4m3
}

void check_few_and_joined() {
  auto few = [](uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t shared = 0) {
    const uint32_t one = shared == 0 ? 0 : 1;
    return CallShape{.ranks = 1, .tokens = tokens, .experts = experts + one, .top_k = top_k + one, .shared = shared};
  };
  const LayerSpec bf16 = spec_of(DType::kBFloat16, DType::kBFloat16), fp32 = spec_of(DType::kFloat32, DType::kFloat32);
  const LayerSpec fp8 = spec_of(DType::kBFloat16, DType::kFloat8E4M3), fp4 = spec_of(DType::kBFloat16, DType::kMxFp4);
  const auto most = [&](const LayerSpec& spec, uint32_t experts, uint32_t top_k, uint32_t shared = 0) {
    const uint32_t n = cuda::few_most(few(1, experts, top_k, shared), spec);
    CHECK(cuda::is_few(few(0, experts, top_k, shared), spec) && cuda::is_few(few(n, experts, top_k, shared), spec));
    CHECK(!cuda::is_few(few(n + 1, experts, top_k, shared), spec));
    return n;
  };
  CHECK(most(bf16, 128, 8) == 512 && most(bf16, 128, 1) == 512);
  CHECK(most(bf16, 8, 2) == 192 && most(bf16, 64, 8) == 384);   // 48 rows an expert
  CHECK(most(bf16, 256, 8, 1) == 455);                          // 4096 choices
  CHECK(most(bf16, 64, 4, 4) == 8 && most(fp32, 128, 8) == 8);  // slices
  CHECK(most(fp8, 128, 8) == 256 && most(fp8, 256, 8, 1) == 227 && most(fp8, 8, 2) == 64);
  CHECK(most(fp4, 128, 4) == 256 && most(fp8, 128, 4) == 256 && most(fp4, 32, 4) == 128);
  // GEMM1 is cut into as many parts as give one token 256 tasks, but a task must have at least 16 stages. With weights in
  // 16 bits it is not.
  auto parts = [&](CallShape shape, uint32_t hidden, uint32_t intermediate, uint32_t weight_bits = 32) {
    shape.hidden = hidden;
    shape.intermediate = intermediate;
    return cuda::few_parts(kHopper, shape, weight_bits);
  };
  CHECK_EQ(parts(few(1, 128, 8), 2048, 768), 1u);
  CHECK_EQ(parts(few(1, 8, 2), 4096, 14336, 16), 1u);
  CHECK_EQ(parts(few(1, 8, 2), 4096, 14336), 4u);
  CHECK_EQ(parts(few(8, 8, 2), 4096, 14336), 4u);
  CHECK_EQ(parts(few(9, 8, 2), 4096, 14336), 1u);
  CHECK_EQ(parts(few(1, 8, 1), 128, 65536), gpu::kMostFewParts);
  CHECK_EQ(parts(few(1, 64, 8), 32768, 65536), 1u);
  CHECK(parts(few(1, 8, 1), 128, 8192) == 8 && parts(few(1, 8, 1), 128, 8192, 8) == 4);  // FP8: half as many stages
  CHECK(parts(few(1, 8, 1), 128, 8192, 4) == 8 && parts(few(1, 32, 4), 2880, 2880, 4) == 2);  // MXFP4: at least 4
  CallShape two_ranks = few(1, 128, 8);
  two_ranks.ranks = 2;
  LayerSpec transposed = bf16;
  transposed.transposed = true;
  CHECK(!cuda::is_few(two_ranks, bf16) && !cuda::is_few(few(1, 128, 8), transposed));
  CHECK_EQ(cuda::few_most(two_ranks, bf16), 0u);
  check_few_in_group();
  check_few_in_group_of_fp8();
  // If tokens have two rows, rows are joined if tiles are full on average; if tokens have one row, always.
  const Shape two = kPaper64.on(1);
  CHECK(cuda::joins_rows(kHopper, two, 8192, 0) && !cuda::joins_rows(kHopper, two, 8191, 0));
  CHECK(cuda::joins_rows(kHopper, two, 65536, 0) && !cuda::joins_rows(kHopper, two, 65537, 0));
  CHECK(!cuda::joins_rows(kHopper, two, 8192, 1));  // a capacity may leave a token with one row
  CHECK(!cuda::joins_rows(kHopper, kPaper64.on(2), 8192, 0));
  Shape other = two;
  other.top_k = 3;
  CHECK(!cuda::joins_rows(kHopper, other, 65536, 0));
  other.top_k = 1;
  CHECK(cuda::joins_rows(kHopper, other, 1, 0) && !cuda::joins_rows(kHopper, other, 1, 1));
}

void check_return_groups() {
  CHECK(gpu_groups(8, kDirect) == Starts({0, 4, 8}));
  CHECK(gpu_groups(8, kReduced) == Starts({0, 2, 4, 6, 7, 8}));
  CHECK(gpu_groups(28, kReduced) == Starts({0, 7, 14, 21, 25, 28}));
  for (const ReturnMode mode : {kDirect, kReduced}) CHECK(gpu_groups(8, mode, true) == Starts({0, 8}));
  // No group is without columns.
  CHECK(gpu_groups(1, kDirect) == Starts({0, 1}));
  CHECK(gpu_groups(1, kReduced) == Starts({0, 1}));
  CHECK(gpu_groups(3, kDirect) == Starts({0, 2, 3}));
  CHECK(gpu_groups(3, kReduced) == Starts({0, 1, 2, 3}));
}

void check_link() {
  CHECK_EQ(cuda::link_over_gemm1(kQwen3.on(1)), 0.0);  // nothing goes over the link
  CHECK(cuda::link_over_gemm1(kQwen3.on(2)) > 1 && cuda::link_over_gemm1(kQwen3.on(4)) > 1.85);
  CHECK(cuda::link_over_gemm1(kQwen2.on(2)) < 1 && cuda::link_over_gemm1(kQwen2.on(4)) > 1);
  CHECK(!cuda::reduces(4, 8, 768) && !cuda::reduces(8, 8, 768));
  CHECK(!cuda::reduces(4, 8, 512) && cuda::reduces(8, 8, 512));
  CHECK(!cuda::reduces(4, 10, 512) && cuda::reduces(8, 10, 512));  // Qwen3-Next
  CHECK(!cuda::reduces(32, 1, 64));                                // one row of a token goes home in either mode
}

void check_tasks() {
  // A task of GEMM0 has 256 rows of weights: with a gate, those of 128 columns.
  CHECK_EQ(gpu_columns(2048, 768, true)[kFirst], 6u);
  CHECK_EQ(gpu_columns(2048, 768, false)[kFirst], 3u);
  CHECK_EQ(gpu_columns(2056, 776, true)[kFirst], 7u);
  CHECK_EQ(gpu_columns(2056, 776, true)[kReturning], 9u);
  // The shorter tasks are, the more of them are published ahead.
  const auto ahead = [](uint32_t ranks, uint32_t inner) {
    return cuda::tasks_ahead(kHopper, {ranks, 8, 8192, inner, 2, 2});
  };
  CHECK_EQ(ahead(1, 8192), 4u);
  CHECK_EQ(ahead(2, 8192), 1u);
  CHECK_EQ(ahead(2, 1024), 2u);
  CHECK_EQ(ahead(2, 704), 3u);
  CHECK_EQ(ahead(2, 64), 4u);
}

void check_limits() {
  Limits l;
  l.max_tokens = 64;
  l.hidden = l.intermediate = 256;
  l.experts = l.max_local_experts = l.top_k = l.return_slots = 2;
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 2;
  l.processors = 0;
  const Limits alone = cuda::cuda_limits(kHopper, l, 133);  // blocks come in pairs
  CHECK_EQ(alone.processors, 132u);
  CHECK_EQ(alone.tile_rows, 256u);
  CHECK_EQ(alone.columns_per_task[kFirst], 128u);
  CHECK_EQ(alone.columns_per_task[kReturning], 256u);
  l.ranks = 2;
  l.processors = 4;
  CHECK_EQ(cuda::cuda_limits(kHopper, l, 132).processors, 4u);
}

// ---- CPU --------------------------------------------------------------------------------------------------

Starts cpu_groups(uint32_t columns, uint32_t wanted) {
  uint16_t first[kMaxGroups + 1] = {};
  const uint32_t groups = cpu::return_groups(columns, wanted, first);
  return {first, first + groups + 1};
}

void check_cpu() {
  const struct {
    uint32_t tokens, processors, entries, log2_block;
  } expected[] = {
      {0, 1, 8, 3},    {16, 1, 8, 3},    {17, 1, 8, 4},      {256, 1, 8, 7},    {100, 4, 8, 3},
      {4096, 4, 8, 7}, {4096, 64, 8, 5}, {65536, 1, 511, 7}, {65536, 1, 512, 6}};  // an offset in a packet has 16 bits
  for (const auto& e : expected) CHECK_EQ(cpu::log2_token_block(e.tokens, e.processors, e.entries), e.log2_block);
  CHECK(cpu_groups(8, 0) == Starts({0, 8}) && cpu_groups(8, 1) == Starts({0, 8}));
  CHECK(cpu_groups(8, 3) == Starts({0, 2, 5, 8}));
  CHECK(cpu_groups(2, 8) == Starts({0, 1, 2}));
  CHECK(cpu_groups(100, 20) == Starts({0, 12, 25, 37, 50, 62, 75, 87, 100}));
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  check_one_gpu();
  check_orders();
  check_asked_orders();
  check_token_blocks();
  check_few_and_joined();
  check_few_rows_fit();
  check_return_groups();
  check_link();
  check_tasks();
  check_limits();
  check_cpu();
  return 0;
}

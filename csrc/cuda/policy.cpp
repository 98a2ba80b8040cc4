#include "cuda/policy.h"

#include <algorithm>
#include <cmath>

#include "flashmoe/gpu/decode_memory.h"

namespace flashmoe::cuda {
namespace {

// Tiles of a band (OrderPolicy::raster). With several ranks, a band has room for all tiles of an expert of about a
// thousand rows: four full tiles and an open one (docs/decisions.md). A rank alone has kRaster; if its shorter tasks,
// like those of slices, have fewer than kShortStages stages, it has twice as many.
constexpr uint32_t kRaster = 8, kRasterOfSeveral = 6, kShortStages = 8;
constexpr uint32_t kSenders = 16;
// Clusters that stop early to reduce (OrderPolicy::link_clusters): on two H200s, 2, 4 and 8 are equally fast for three
// layers, within the noise (docs/measured.md).
constexpr uint32_t kLinkClusters = 4;
// Most rows of an expert, on average, in a call of few tokens: on a rank alone whose weights have no scales; otherwise.
// (The kernel multiplies 64 rows of an expert together in the first case, 32 or 16 in the other.)
constexpr uint32_t kMostFewRowsAlone = 48, kMostFewRows = 16;
// Most tokens and choices of such a call on a rank alone whose weights have scales: no larger call has been measured.
constexpr uint32_t kMostScaledTokens = 256, kMostScaledChoices = gpu::kFewChoicesInE4m3;
// The part of GEMM0 that goes before GEMM1 if the link does not keep up: all of it if link_over_gemm1 is kHeldUpTo or
// less, none of it from kSoonFrom on, and in proportion between. Two H200s are fastest with all of it at 1.05 (OLMoE),
// with three fifths or all of it at 1.4 (Qwen3), and with a tenth at 2.1 (Qwen3-Next); see docs/measured.md.
constexpr double kHeldUpTo = 1.05, kSoonFrom = 1.85;
// A lag of GEMM1 behind GEMM0 (OrderPolicy::gemm1_lag) that is larger than any call's number of tasks: GEMM1 waits for
// all of GEMM0.
constexpr uint32_t kAlwaysHeld = 0xffffffffu;
// Tasks published ahead for each cluster. A rank alone: kMostAhead, or kMostShortAhead if tasks are short. Several
// ranks: as many as together have kStagesAhead stages of the pipeline, at most kMostAhead and at least kLeastAhead.
constexpr uint32_t kMostAhead = 4, kMostShortAhead = 8, kLeastAhead = 1;
constexpr uint32_t kStagesAhead = 32;  // which take about 20 us

// Operations of the GEMMs per second, and bytes per second that leave a GPU over the link, as measured on H200.
constexpr double kGemmRate = 750e12, kLinkRate = 350e9;
// Bytes of rows per second that Reduce sums while it runs beside GEMMs and slows them down. The rate is computed from
// the time that `reduced` adds to calls of Qwen3-Next on two H200s and of Qwen2-MoE on four.
constexpr double kSumRate = 540e9;

}  // namespace

bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate) {
  constexpr double kElementBytes = 2, kOperations = 6;  // kOperations: per element of a row and gated column of I
  const double others = ranks - 1;
  const double sent = others * (1 - std::pow(1 - 1.0 / ranks, top_k)), rows = top_k * others / ranks;
  const double gemms = top_k * kOperations * intermediate / kGemmRate;
  const double direct = std::max(gemms, (sent + rows) * kElementBytes / kLinkRate);
  const double reduced = std::max(gemms + rows * kElementBytes / kSumRate, 2 * sent * kElementBytes / kLinkRate);
  return reduced < direct;
}

uint32_t token_block(const Arch& arch, uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors) {
  uint32_t block = kMinTokenBlock;
  auto fits = [&](uint32_t b) {
    return b <= kMaxTokenBlock && b * experts <= arch.max_gate_logits && b * top_k <= arch.max_choices;
  };
  while (ceil_div(tokens, block) > processors && fits(2 * block)) block *= 2;
  return block;
}

uint32_t few_most(const CallShape& s, const LayerSpec& spec) {
  if (spec.transposed || s.ranks != 1) return 0;
  const uint32_t top_k = s.routed_top_k();
  // In this kernel the slices of a shared expert are several choices; in the general kernel they are one choice, so the
  // bits may differ. If there are several slices, only calls of up to kFewExactTokens tokens may have other bits than
  // the general kernel gives.
  const bool scaled = has_scales(spec.weight_type), exact = element_bytes(spec.y_type) != 2 || s.shared > 1;
  const uint32_t most = exact ? gpu::kFewExactTokens : scaled ? kMostScaledTokens : gpu::kFewTokens;
  const uint32_t rows = scaled ? kMostFewRows : kMostFewRowsAlone;
  const uint32_t choices = scaled ? kMostScaledChoices : gpu::kFewChoices;
  return min_of(most, min_of(choices / (top_k + s.shared), rows * s.routed_experts() / top_k));
}

bool is_few(const CallShape& s, const LayerSpec& spec) {
  const uint32_t most = few_most(s, spec);
  return most != 0 && s.tokens <= most;
}

bool few_in_group(const Limits& limits, const LayerSpec& spec) {
  Limits promised = limits;
  if (spec.most_tokens != 0) promised.max_tokens = min_of(limits.max_tokens, uint32_t{spec.most_tokens});
  if (!gpu::has_few_in_group(promised) || limits.machine_ranks != 0) return false;
  if (spec.transposed) return false;
  if (element_bytes(spec.y_type) != 2 || spec.weight_type == DType::kMxFp4) return false;
  // That kernel stores intermediate rows in fp32, in the memory that the general kernel has for tiles of rows in e4m3.
  const uint64_t room = limits.max_tiles() * limits.tile_rows;
  if (spec.quantised() && gpu::few_rows(promised) * sizeof(float) > room) return false;
  if (spec.shared != 0 || spec.slices != 1 || spec.capacity_factor != 0) return false;
  const uint64_t rows = uint64_t{limits.ranks} * promised.max_tokens * spec.top_k;
  return spec.return_mode == ReturnMode::kDirect && rows <= uint64_t{kMostFewRows} * spec.experts;
}

KernelsOfLayer kernels_of(const Limits& limits, const LayerSpec& spec, Pass pass) {
  const bool alone = limits.ranks == 1;
  if (pass != Pass::kInference) return {.general = true, .few = false, .group = !alone};
  if (!alone) {
    const bool few = few_in_group(limits, spec);
    return {.general = !few, .few = few, .group = few};
  }
  Call call;
  call.set_layer(spec);
  const bool few = few_most(call.shape, spec) != 0;
  return {.general = !only_few(spec), .few = few, .group = false};
}

uint32_t few_parts(const Arch& arch, const CallShape& s, uint32_t weight_bits) {
  // One token should give tasks to all multiprocessors, and each task should be long enough to be worth its start.
  // Without parts, a single token of Mixtral has 64 tasks of 224 stages. A stage of 4-bit weights takes as long as four
  // stages of 16 bits, since it has four times as much to multiply. With weights in 16 bits the kernel halves
  // tasks by columns instead (decode/tasks.cuh), so that a sum goes along all of K in one order.
  if (weight_bits == 16) return 1;
  const uint32_t least_stages = weight_bits == 4 ? 4 : 16;
  if (s.ranks != 1 || s.tokens > gpu::kFewExactTokens) return 1;
  const uint32_t stages = ceil_div(s.intermediate * weight_bits / 8, arch.stage_bytes);
  const uint32_t columns = (s.routed_top_k() + s.shared) * align_up(s.hidden, arch.few_features);
  return std::clamp(min_of(gpu::kFewPartColumns / columns, stages / least_stages), 1u, gpu::kMostFewParts);
}

bool joins_rows(const Arch& arch, const Shape& s, uint32_t tokens, uint32_t capacity) {
  if (s.ranks != 1 || capacity != 0 || tokens > kMaxJoinedTokens) return false;
  return s.top_k == 1 || (s.top_k == 2 && tokens * 2 >= arch.tile_rows * s.local_experts);
}

uint32_t return_groups(uint32_t columns, ReturnMode mode, bool whole, uint16_t (&first)[kMaxGroups + 1]) {
  // Bit i: a group ends after i eighths of the columns. For each group GEMM1 reads the intermediate rows once more, and
  // writes a smaller part of a row at a time, which memory takes more slowly (docs/measured.md). With `direct`, rows go
  // as they are computed: more than two groups cost more than combining meanwhile wins. With `reduced`, rows go when
  // their group is computed. The link waits for the first group, and everything waits for the last group, so both are
  // small.
  constexpr uint32_t kOnce = 1u << 8, kHalves = 1u << 4 | 1u << 8;
  constexpr uint32_t kDescending = 1u << 2 | 1u << 4 | 1u << 6 | 1u << 7 | 1u << 8;
  const uint32_t ends = whole ? kOnce : mode == ReturnMode::kDirect ? kHalves : kDescending;
  uint32_t groups = 0;
  first[0] = 0;
  for (uint32_t eighths = 1; eighths <= 8; ++eighths) {
    const uint32_t end = ceil_div(columns * eighths, 8u);
    if ((ends >> eighths & 1u) != 0 && end > first[groups]) first[++groups] = static_cast<uint16_t>(end);
  }
  return groups;
}

double link_over_gemm1(const Shape& s) {
  return (s.return_bytes * (s.ranks - 1) / kLinkRate) / (s.ranks * 2.0 * s.returning_k / kGemmRate);
}

// GEMM1's lag behind GEMM0 (OrderPolicy::gemm1_lag) if the link takes `link` times as long as GEMM1. It is a part of
// the number of GEMM0 tasks that a rank has on average. (An expert's last tile is half full on average, so an expert
// has half a tile more than its rows fill.)
uint32_t lag_of(const Arch& arch, const Shape& s, double link, uint32_t clusters) {
  const double part = (kSoonFrom - link) / (kSoonFrom - kHeldUpTo);
  if (part >= 1) return kAlwaysHeld;
  const double rows = 1.0 * s.ranks * s.tokens * s.top_k / max_of(s.experts, 1u);  // of an expert
  const double tasks = s.local_experts * (rows / arch.tile_rows + 0.5) * s.first_columns;
  return max_of(2 * clusters, static_cast<uint32_t>(std::max(part, 0.0) * tasks));
}

// How many stages the shorter of GEMM0's and GEMM1's tasks has.
uint32_t short_stages(const Arch& arch, const Shape& s) {
  return ceil_div(min_of(s.hidden * s.x_bytes, s.intermediate * s.intermediate_bytes), arch.stage_bytes);
}

bool is_short(const Arch& arch, const Shape& s) {
  return s.ranks == 1 && short_stages(arch, s) < kShortStages;
}

uint32_t tasks_ahead(const Arch& arch, const Shape& s) {
  if (s.ranks == 1) return is_short(arch, s) ? kMostShortAhead : kMostAhead;
  return std::clamp(ceil_div(kStagesAhead, short_stages(arch, s)), kLeastAhead, kMostAhead);
}

OrderPolicy task_order(const Arch& arch, const Shape& s, ReturnMode mode, uint32_t blocks, const OrderPolicy& asked) {
  // If GEMM1 makes result rows faster than the link takes them, and each row goes as soon as it is computed, then the
  // link should carry rows for as long as possible. So GEMM1 begins before GEMM0 has ended: the slower the link, the
  // sooner. If the link is slowest, tiles with rows of other ranks also go first. In all other cases an early GEMM1
  // wins nothing.
  const double link = link_over_gemm1(s);
  const bool early = s.ranks > 1 && mode == ReturnMode::kDirect && link > 1;
  const uint32_t clusters = blocks / arch.cluster_blocks;
  OrderPolicy chosen{.gemm1_lag = early ? lag_of(arch, s, link, clusters) : kAlwaysHeld,
                     .raster = s.ranks > 1         ? kRasterOfSeveral
                               : is_short(arch, s) ? 2 * kRaster
                                                   : kRaster,
                     .window = tasks_ahead(arch, s) * clusters,
                     .gemm1_lists = early && link >= kSoonFrom ? 2u : 1u,
                     .own_first = early ? 2u : 1u,
                     .senders = kSenders,
                     .link_clusters = kLinkClusters};
  for (const auto field :
       {&OrderPolicy::gemm1_lag, &OrderPolicy::raster, &OrderPolicy::window, &OrderPolicy::gemm1_lists,
        &OrderPolicy::own_first, &OrderPolicy::senders, &OrderPolicy::link_clusters}) {
    if (asked.*field != OrderPolicy::kBuiltIn) chosen.*field = asked.*field;
  }
  const uint32_t service = 1 + arch.formers_of(s.ranks, s.local_experts, blocks, s.work_behind);
  chosen.senders = s.ranks == 1 ? 0 : min_of(chosen.senders, blocks - service);
  // With `direct` there is nothing to reduce, so no cluster stops early. With `reduced`, at least one cluster goes on
  // to the end, because the later groups must be computed.
  const bool reduced = s.ranks > 1 && mode == ReturnMode::kReduced;
  chosen.link_clusters = reduced ? min_of(chosen.link_clusters, clusters - 1) : 0;
  return chosen;
}

}  // namespace flashmoe::cuda

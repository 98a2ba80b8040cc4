#include "sim/simulation.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <mutex>
#include <random>

#include "cuda/policy.h"
#include "host/error.h"
#include "host/text.h"
#include "sim/rank.h"

namespace flashmoe::sim {
namespace {

using host::concat;
using host::Error;

// Draws a number below `below`; all are equally likely. The numbers are the same on every machine that compiles this.
uint32_t draw(std::mt19937& random, uint32_t below) {
  return static_cast<uint32_t>(uint64_t{random()} * below >> 32);
}

// Where a group's experts are. Each rank holds equally many experts, in order. If there are more ranks than experts,
// each rank holds one expert, so an expert has several copies. A machine sends to the copies that come first when
// ranks are counted from the machine's own first rank.
class Placed {
 public:
  explicit Placed(const Setup& s) : ranks_(s.machines * s.gpus), gpus_(s.gpus), experts_(s.layer.experts) {
    const bool even = ranks_ <= experts_ ? experts_ % ranks_ == 0 : ranks_ % experts_ == 0 && experts_ % gpus_ == 0;
    if (!even) {
      throw Error(Error::Kind::kInvalidArgument,
                  concat("machines x gpus: expected a divisor of the layer's ", experts_,
                         " experts, or a multiple of it if gpus is a divisor of it, got ", ranks_));
    }
    local_ = ranks_ <= experts_ ? experts_ / ranks_ : 1;
  }
  uint32_t local() const { return local_; }

  // The tables of a rank, and the choices of its tokens.
  RankProblem problem(const Setup& s, uint32_t rank) const {
    RankProblem p;
    const uint32_t machine = rank / gpus_;
    p.local_experts = local_;
    for (uint32_t e = 0; e < experts_; ++e) p.owner.push_back(owner(machine, e));
    p.owner_base.push_back(0);
    for (uint32_t q = 0; q < ranks_; ++q) {
      for (uint32_t i = 0; i < local_; ++i) {
        const uint32_t e = (q * local_ + i) % experts_;
        p.by_owner.push_back(p.owner[e] == q ? e : kElsewhere);
      }
      p.owner_base.push_back((q + 1) * local_);
    }
    // If all machines are alike, a rank's tokens choose as the tokens of the rank with the same place on the first
    // machine do, but all expert numbers are moved on by the number of experts that lie on the machines before.
    const uint32_t like = s.alike ? rank % gpus_ : rank, step = s.alike ? machine * gpus_ * local_ % experts_ : 0;
    std::seed_seq seed{s.seed, uint64_t{like}};
    std::mt19937 random(seed);
    std::vector<uint32_t> experts(experts_);
    for (uint32_t e = 0; e < experts_; ++e) experts[e] = e;
    for (uint32_t t = 0; t < s.tokens; ++t) {
      for (uint32_t k = 0; k < s.layer.top_k; ++k) {
        std::swap(experts[k], experts[k + draw(random, experts_ - k)]);
        p.ids.push_back(static_cast<int32_t>((experts[k] + step) % experts_));
      }
    }
    return p;
  }

 private:
  uint32_t owner(uint32_t machine, uint32_t expert) const {
    if (ranks_ <= experts_) return expert / local_;
    const uint32_t first = machine * gpus_;
    return (first + (expert + experts_ - first % experts_) % experts_) % ranks_;
  }

  const uint32_t ranks_, gpus_, experts_;
  uint32_t local_;
};

void check(const Setup& s) {
  if (s.machines == 0 || s.gpus == 0)
    throw Error(Error::Kind::kInvalidArgument, "machines, gpus: expected at least 1, got 0");
  if (s.folded && !s.alike) throw Error(Error::Kind::kInvalidArgument, "folded: expected machines that are alike");
  if (s.layer.top_k == 0 || s.layer.top_k > s.layer.experts) {
    throw Error(Error::Kind::kInvalidArgument,
                concat("top_k: expected 1 to ", s.layer.experts, ", got ", s.layer.top_k));
  }
  if (s.tokens == 0) throw Error(Error::Kind::kInvalidArgument, "tokens: expected at least 1, got 0");
  if (s.machines > 1 && s.return_mode == ReturnMode::kDirect)
    throw Error(Error::Kind::kInvalidArgument, "return_mode: expected reduced with several machines, got direct");
}

// On several machines, results are reduced: one sum returns from each machine. On one machine, the mode is what the
// CUDA engine would choose (csrc/cuda/policy.h).
ReturnMode mode_of(const Setup& s) {
  if (s.return_mode) return *s.return_mode;
  const bool reduces = s.machines > 1 || cuda::reduces(s.gpus, s.layer.top_k, s.layer.intermediate);
  return reduces ? ReturnMode::kReduced : ReturnMode::kDirect;
}

Limits limits_of(const Setup& s, uint32_t local_experts, bool reduced) {
  Limits l;
  l.ranks = s.machines * s.gpus;
  l.max_tokens = s.tokens;
  l.hidden = s.layer.hidden;
  l.experts = s.layer.experts;
  l.max_local_experts = local_experts;
  l.top_k = s.layer.top_k;
  l.x_bytes = l.return_bytes = l.intermediate_bytes = 2;
  l.return_slots = reduced ? l.ranks : l.top_k;
  l.intermediate = s.layer.intermediate;
  l.staging = reduced ? 1 : 0;
  l.tile_rows = kArch.tile_rows;
  l.columns_per_task = kArch.columns_per_task(s.layer.gated());
  l.processors = s.machine.blocks;
  if (s.machines > 1) {
    l.machine_ranks = s.gpus;
    l.relayed = relay_slots(s.machines, s.gpus, s.gpus);
  }
  return l;
}

// The call of every rank, as the CUDA engine plans it (csrc/cuda/plan.cpp).
Call call_of(const Setup& s, const Limits& limits, ReturnMode mode) {
  Call c;
  c.epoch = 1;
  c.set_layer(s.layer);
  c.shape.ranks = limits.ranks;
  c.shape.tokens = s.tokens;
  c.shape.return_mode = mode;
  c.memory = make_call_memory(limits);
  c.set_layer(s.layer);
  c.policy.clusters = limits.processors / kArch.cluster_blocks;
  c.policy.tile_rows = limits.tile_rows;
  c.cut_columns(limits.columns_per_task);
  const cuda::Shape shape{.ranks = limits.ranks,
                          .local_experts = limits.max_local_experts,
                          .hidden = s.layer.hidden,
                          .intermediate = s.layer.intermediate,
                          .top_k = s.layer.top_k,
                          .tokens = s.tokens,
                          .experts = s.layer.experts,
                          .first_columns = c.policy.columns[kFirst],
                          .returning_k = s.layer.intermediate,
                          .work_behind = s.machines > 1};
  c.policy.order = cuda::task_order(kArch, shape, mode, limits.processors, s.order);
  c.policy.groups = cuda::return_groups(c.policy.columns[kReturning], mode, limits.ranks == 1, c.policy.group_first);
  const uint32_t block = cuda::token_block(kArch, s.tokens, s.layer.experts, s.layer.top_k, limits.processors);
  c.policy.log2_block = static_cast<uint32_t>(std::countr_zero(block));
  c.policy.joined = cuda::joins_rows(kArch, shape, s.tokens, 0) ? 1 : 0;
  CallShape few = c.shape;
  few.local_experts = limits.max_local_experts;
  if (cuda::is_few(few, s.layer)) {
    throw Error(Error::Kind::kInvalidArgument,
                concat("tokens: expected a call of tiles, got ", s.tokens,
                       " tokens on one GPU, which the kernel for a few tokens computes"));
  }
  return c;
}

double us(Time t) {
  return static_cast<double>(t) / static_cast<double>(kMicrosecond);
}

template <template <uint32_t> class Platform>
Result run(const Setup& s, const Placed& placed, const Call& call, const Limits& limits, Group& group) {
  std::deque<Rank<Platform>> ranks;
  for (uint32_t r = 0; r < group.simulated(); ++r) ranks.emplace_back(group, call, limits, placed.problem(s, r), r);
  for (auto& rank : ranks) {
    if (s.spans) rank.keep_spans();
    rank.start();
  }
  group.world().run();
  Result result;
  for (const auto& rank : ranks) {
    const RankState& state = rank.state();
    const Links::Bytes& sent = group.links().sent(rank.call().rank);
    result.ends.push_back(us(state.end + s.machine.launch));
    result.first_task = std::max(result.first_task, us(state.first_task));
    result.last_task = std::max(result.last_task, us(state.last_task));
    result.busy += us(state.busy) / call.policy.clusters / group.simulated();
    result.tasks += state.tasks;
    result.spans.push_back(state.spans.all());
    result.sent.nvlink += sent.nvlink;
    result.sent.nic += sent.nic;
    result.sent.messages += sent.messages;
  }
  for (uint64_t* sum : {&result.sent.nvlink, &result.sent.nic, &result.sent.messages}) *sum /= group.simulated();
  result.call = *std::max_element(result.ends.begin(), result.ends.end());
  result.events = group.world().events();
  return result;
}

}  // namespace

Result simulate(const Setup& s) {
  static std::mutex one_world;
  const std::lock_guard lock(one_world);
  check(s);
  const Placed placed(s);
  const ReturnMode mode = mode_of(s);
  const Limits limits = limits_of(s, placed.local(), mode == ReturnMode::kReduced);
  Call call = call_of(s, limits, mode);
  Group group(s.machine, limits, s.machines, s.folded);
  call.memory.heap_layout = group.heap_layout();
  // The workspace ends where its rows would begin, because rows are never written.
  call.memory.work_layout.bytes = call.memory.work_layout.offset[static_cast<uint32_t>(WorkField::kIntermediate)];
  return s.machines > 1 ? run<SpreadLanes>(s, placed, call, limits, group)
                        : run<MappedPlatform>(s, placed, call, limits, group);
}

}  // namespace flashmoe::sim

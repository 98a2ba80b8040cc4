// Choices without an expert, and rows that are bad: what becomes of them as packets are built, what is noted, and what Combine
// finds in place of rows that nobody computes.
#include <map>

#include "flashmoe/actors/joiner.h"
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

using P = cpu::CpuPlatform;

constexpr uint32_t kExperts = 6, kTopK = 2, kTokens = 8;
constexpr int32_t kNone = Choice::recorded(Choice::kNone), kBad = Choice::recorded(Choice::kBad);

Limits limits_for(bool reduced) {
  Limits l = limits(1, 1);
  l.max_tokens = kTokens;
  l.experts = l.max_local_experts = kExperts;
  l.top_k = kTopK;
  l.return_slots = kTopK;
  l.staging = reduced ? 1 : 0;
  return l;
}

// A token block of such ids, each with the weight 1 + its place, whose packets are built, and whose missing rows are filled.
struct Built {
  Built(const std::vector<int32_t>& ids, bool reduced, bool joined)
      : group(limits_for(reduced)), memory(limits_for(reduced), 1) {
    Call& c = group.rank(0).call;
    c.epoch = 1;
    c.shape.tokens = kTokens;
    c.shape.experts = c.shape.gate_experts = c.shape.local_experts = kExperts;
    c.shape.top_k = c.shape.gate_top_k = kTopK;
    c.shape.return_mode = reduced ? ReturnMode::kReduced : ReturnMode::kDirect;
    c.policy.log2_block = 3;
    c.policy.joined = joined ? 1 : 0;
    c.policy.columns[kReturning] = 3;
    c.memory.return_row_bytes = 32;
    c.placement = {.owner = owner.data(), .by_owner = by_owner.data(), .owner_base = base.data()};
    const PacketScratch s = memory.of(c);
    for (uint32_t i = 0; i < ids.size(); ++i) s.ids[i] = ids[i], s.weights[i] = 1.0f + static_cast<float>(i);
    CHECK(build_packets<P>(c, 0, s, load.data()));
    fill_missing<P>(c, 0, s, out.data(), [&](uint8_t* row, bool bad) { CHECK(filled.emplace(row, bad).second); });
  }
  const Call& call() { return group.rank(0).call; }
  RowNote note() { return RowNote::unpack(call().control()->noted.value); }
  uint32_t entries() { return call().packet_offsets(0, 0, 0)[kExperts]; }

  std::vector<uint32_t> owner = std::vector<uint32_t>(kExperts, 0), by_owner{0, 1, 2, 3, 4, 5}, base{0, kExperts};
  AbstractGroup<P> group;
  PacketMemory memory;
  std::vector<uint64_t> load = std::vector<uint64_t>(kExperts, 0);
  std::vector<uint8_t> out = std::vector<uint8_t>(kTokens * 32);
  std::map<uint8_t*, bool> filled;
};

// The ids of eight tokens, two each. Token 1 has no expert, and token 2 has one. The gate has noted token 4's row as
// bad. Tokens 5 and 6 have wrong ids.
const std::vector<int32_t> kIds{0, 1, -1, -1, 5, -1, 3, 2, ExpertId::kBad, ExpertId::kBad, 4, 4, 6, 0, 1, 0};

void check_routing(Built& built, const std::vector<int32_t>& expected, uint32_t entries) {
  const Call& c = built.call();
  for (uint32_t i = 0; i < expected.size(); ++i) {
    CHECK_EQ(c.routing(i / kTopK)[i % kTopK], expected[i]);
    CHECK_EQ(c.weights(i / kTopK)[i % kTopK], expected[i] < 0 ? 0.0f : 1.0f + static_cast<float>(i));
  }
  CHECK_EQ(built.entries(), entries);
  uint64_t counted = 0;
  for (const uint64_t n : built.load) counted += n;
  CHECK_EQ(counted, uint64_t{entries});
}

void check_direct() {
  Built built(kIds, false, false);
  const Call& c = built.call();
  check_routing(built, {0, 1, kNone, kNone, 5, kNone, 3, 2, kBad, kBad, kBad, kBad, kBad, kBad, 1, 0}, 7);
  const RowNote note = built.note();
  CHECK(note.fault == RowFault::kDuplicateExpert && note.token == 5 && note.id == 4);
  CHECK_EQ(c.control()->abort.value, 0u);
  std::map<uint8_t*, bool> expected{
      {c.return_row(0, 1, 0), false}, {c.return_row(0, 1, 1), false}, {c.return_row(0, 2, 1), false}};
  for (uint32_t t = 4; t < 7; ++t) {
    for (uint32_t k = 0; k < kTopK; ++k) expected.emplace(c.return_row(0, t, k), true);
  }
  CHECK(built.filled == expected);
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t k = 0; k < kTopK; ++k) CHECK_EQ(is_returned(c, t, k), c.routing(t)[k] != kNone);
  }
}

// One row that is staged stands for a bad one; a token without experts gets nothing.
void check_reduced() {
  Built built(kIds, true, false);
  const Call& c = built.call();
  std::map<uint8_t*, bool> expected;
  for (uint32_t t = 4; t < 7; ++t) expected.emplace(c.staged_row(0, t, 0), true);
  CHECK(built.filled == expected);
  const std::vector<uint16_t> counts{2, 0, 1, 2, 1, 1, 1, 2};
  for (uint32_t t = 0; t < kTokens; ++t) {
    CHECK_EQ(*c.packet_counts(0, 0, t), counts[t]);
    CHECK_EQ(is_returned(c, t, 0), counts[t] != 0);
  }
}

// Results where no row comes; where one does, it is the later one.
void check_joined() {
  Built built(kIds, false, true);
  const Call& c = built.call();
  for (uint32_t t = 0; t < kTokens; ++t) {
    const auto found = built.filled.find(built.out.data() + uint64_t{t} * 32);
    const bool bad = t >= 4 && t < 7;
    CHECK_EQ(found != built.filled.end(), bad || t == 1);
    CHECK(found == built.filled.end() || found->second == bad);
    for (uint32_t column = 0; column < 3; ++column) CHECK_EQ(*c.joint_word(column, t), t == 2 ? 2u : 0u);
  }
}

// Nothing is filled, nor looked for, where all have experts.
void check_all_there() {
  Built built({0, 1, 1, 2, 5, 3, 3, 2, 0, 5, 4, 3, 1, 0, 1, 2}, false, true);
  CHECK(built.filled.empty() && built.note().fault == RowFault::kNone);
  CHECK_EQ(built.entries(), 16u);
}

void check_given_ids() {
  CHECK_EQ(ExpertId::given(int64_t{1} << 40), std::numeric_limits<int32_t>::max());
  CHECK_EQ(ExpertId::given(-(int64_t{1} << 40)), ExpertId::kBad + 1);
  CHECK_EQ(ExpertId::given(ExpertId::kBad), ExpertId::kBad + 1);
  for (const int32_t id : {-2, -1, 0, 7}) CHECK_EQ(ExpertId::given(id), id);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  flashmoe::test::check_direct();
  flashmoe::test::check_reduced();
  flashmoe::test::check_joined();
  flashmoe::test::check_all_there();
  flashmoe::test::check_given_ids();
}

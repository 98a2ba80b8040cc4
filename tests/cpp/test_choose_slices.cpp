// choose_slices(), which puts slices in place of the experts that a token has chosen: which slices, with which
// weights, and what is noted about an expert that does not exist. (What becomes of the slices is tested by every test
// that draws its calls from problem.h.)
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

using P = cpu::CpuPlatform;

constexpr uint32_t kGateExperts = 5;
constexpr int32_t kUntouched = -77;

// A rank whose token has chosen `gate_ids`, after choose_slices(). `ids` and `weights` begin with the slices. Behind
// these, `ids` has as many words again, which nobody may write.
struct Chosen {
  Chosen(const std::vector<int32_t>& gate_ids, uint32_t slices, uint32_t token = 3)
      : group(limits_of(static_cast<uint32_t>(gate_ids.size()) * slices, slices)),
        ids(2 * gate_ids.size() * slices, kUntouched),
        weights(ids.size(), 0.0f) {
    Call& c = group.rank(0).call;
    c.epoch = 1;
    c.shape.slices = slices;
    c.shape.gate_experts = kGateExperts;
    c.shape.gate_top_k = static_cast<uint32_t>(gate_ids.size());
    c.shape.experts = kGateExperts * slices;
    c.shape.top_k = c.shape.gate_top_k * slices;
    std::copy(gate_ids.begin(), gate_ids.end(), ids.begin());
    for (size_t k = 0; k < gate_ids.size(); ++k) weights[k] = 0.5f + static_cast<float>(k);
    choose_slices<P>(c, token, ids.data(), weights.data());
  }

  static Limits limits_of(uint32_t top_k, uint32_t slices) {
    Limits l = limits(1, 1);
    l.experts = l.max_local_experts = kGateExperts * slices;
    l.top_k = l.return_slots = top_k;
    return l;
  }
  RowNote note() { return RowNote::unpack(group.rank(0).call.control()->noted.value); }

  AbstractGroup<P> group;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

void check_order_and_weights() {
  for (const uint32_t slices : {1u, 2u, 3u, 7u}) {
    for (const std::vector<int32_t>& gate_ids : {std::vector{4}, {0, 4}, {3, 1, 2}, {4, 3, 2, 1, 0}}) {
      Chosen chosen(gate_ids, slices);
      CHECK(chosen.note().fault == RowFault::kNone);
      for (size_t k = 0; k < gate_ids.size(); ++k) {
        for (uint32_t n = 0; n < slices; ++n) {
          CHECK_EQ(chosen.ids[k * slices + n], gate_ids[k] * static_cast<int32_t>(slices) + static_cast<int32_t>(n));
          CHECK_EQ(chosen.weights[k * slices + n], 0.5f + static_cast<float>(k));
        }
      }
      for (size_t i = gate_ids.size() * slices; i < chosen.ids.size(); ++i) CHECK_EQ(chosen.ids[i], kUntouched);
    }
  }
}

// The largest ids are tested too: multiplied by the number of slices, they would overflow, or wrap around to the id of
// a slice that exists. The slices of a negative id all have this id: build_packets() tells negative ids apart, and
// notes them.
void check_experts_that_do_not_exist() {
  for (const int32_t id : {-1, -2, 5, 1 << 30, std::numeric_limits<int32_t>::max(), ExpertId::kBad}) {
    Chosen chosen({2, id, 1}, 4, 17);
    const RowNote note = chosen.note();
    CHECK(note.fault == (id < 0 ? RowFault::kNone : RowFault::kExpertRange));
    CHECK(id < 0 || (note.token == 17 && note.id == id));
    const int32_t none = id < 0 ? id : ExpertId::kBad;
    const std::vector<int32_t> expected{8, 9, 10, 11, none, none, none, none, 4, 5, 6, 7};
    CHECK(std::equal(expected.begin(), expected.end(), chosen.ids.begin()));
  }
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  flashmoe::test::check_order_and_weights();
  flashmoe::test::check_experts_that_do_not_exist();
}

// The message of every fault, which is a pure function of the fault's record; and which record a call of the CPU
// engine reports.
#include "check.h"
#include "cpu/fault.h"
#include "host/fault_message.h"
#include "host/group.h"

namespace flashmoe::test {
namespace {

using host::Error;
using Kind = Error::Kind;

// The fault was found by rank 1 in call 7, and rank 2 is the culprit. Rank `teller`, whose time limit is 1.5 s,
// reports it.
void check_message(Fault fault, Kind kind, const std::string& message, uint32_t teller = 1, uint64_t entered = 7,
                   const std::string& obituary = {}) {
  fault.rank = 1;
  fault.awaited = fault.culprit = 2;
  fault.epoch = 7;
  const Error e = host::fault_error({1, fault, entered, {}, {}}, {teller, 1'500'000'000, obituary});
  CHECK(e.kind == kind);
  CHECK_EQ(std::string(e.what()), message);
}

void check_expired_waits() {
  check_message(
      {.kind = FaultKind::kCallSignal, .expected = 7, .seen = 5}, Kind::kPeerTimeout,
      "rank 2 holds up call 7: it has not begun call 7 (it is at 5); rank 1 waited 1.5 s for the call signal of "
      "rank 2 (expected epoch 7, seen 5)",
      1, 5);
  check_message(
      {.kind = FaultKind::kPacket, .index = 3, .expected = 7, .seen = 5}, Kind::kPeerTimeout,
      "rank 2 holds up call 7: it has begun call 7 but makes no progress; rank 1 waited 1.5 s for packet 3 of "
      "rank 2 (expected epoch 7, seen 5)");
  // Reported by a rank that did not find the fault. It knows only its own time limit, so its message does not say how
  // long rank 1 has waited.
  check_message(
      {.kind = FaultKind::kReturn, .index = 4, .expected = 7, .seen = 6}, Kind::kPeerTimeout,
      "rank 2 holds up call 7: its process 12 is gone; rank 1 waited for the return signal of rank 2 for group 4 "
      "of the columns (expected epoch 7, seen 6)",
      0, 6, "its process 12 is gone");
  check_message(
      {.kind = FaultKind::kLocal, .actor = Actor::kOs}, Kind::kPeerTimeout,
      "rank 2 holds up call 7: it has begun call 7 but makes no progress; rank 1 waited 1.5 s for the processors "
      "of rank 2");
  check_message(
      {.kind = FaultKind::kLocal, .actor = Actor::kProcessor}, Kind::kPeerTimeout,
      "rank 2 holds up call 7: it has begun call 7 but makes no progress; rank 1 waited 1.5 s for the OS actor of "
      "rank 2");
}

void check_row(const RowNote& note, Kind kind, const std::string& message) {
  const Error e = host::row_error(RowNote::unpack(note.pack()), 3, 16);
  CHECK(e.kind == kind);
  CHECK_EQ(std::string(e.what()), message);
}

void check_bad_rows() {
  check_row(
      {RowFault::kLogits, 9}, Kind::kBadRow,
      "router: expected logits of which the largest is finite, with strict, got NaN or infinity for token 9 of rank 3");
  check_row({RowFault::kDuplicateExpert, 1048575, 3}, Kind::kBadRow,
            "topk_ids: expected distinct experts per token, got expert 3 twice for token 1048575 of rank 3");
  check_row({RowFault::kExpertRange, 0, -2}, Kind::kBadRow,
            "topk_ids: expected ids in [0, E=16), or -1 for none, got -2 for token 0 of rank 3");
  CHECK(RowNote::unpack(0).fault == RowFault::kNone);
  CHECK(!host::is_error({}, true) && !host::is_error({RowFault::kLogits, 9}, false));
  CHECK(host::is_error({RowFault::kLogits, 9}, true) && host::is_error({RowFault::kExpertRange, 9}, false));
  // The note of the first token is the largest. Of several notes of one token, always the same one is the largest.
  CHECK((RowNote{RowFault::kDuplicateExpert, 4, 7}.pack() > RowNote{RowFault::kExpertRange, 5, -9}.pack()));
  CHECK((RowNote{RowFault::kExpertRange, 4, -9}.pack() > RowNote{RowFault::kDuplicateExpert, 4, 0}.pack()));
}

// What a rank believes a call to be.
struct Believed : LayerSpec {
  uint32_t placement = 0, groups = 0;
};

CallConfig config_of(const Believed& b) {
  CallConfig config{};
  config.set_layer(b);
  config.placement = b.placement;
  config.groups = b.groups;
  return config;
}

void check_disagreement(const Believed& mine, const Believed& theirs, const std::string& message) {
  const Fault fault{.kind = FaultKind::kDisagree, .rank = 1, .awaited = 2, .culprit = 2, .epoch = 7};
  const Error e = host::fault_error({1, fault, 0, config_of(mine), config_of(theirs)}, {});
  CHECK(e.kind == Kind::kGroup);
  CHECK_EQ(std::string(e.what()), "ranks disagree on call 7: " + message);
}

void check_disagreements() {
  Believed a;
  a.x_type = DType::kFloat32;
  a.activation = Activation::kRelu;
  a.hidden = 64;
  a.intermediate = 32;
  a.experts = 8;
  a.top_k = 2;
  Believed b = a;
  b.hidden = 128;
  b.intermediate = 16;
  b.top_k = 4;
  b.capacity_factor = 1.5;
  check_disagreement(a, b,
                     "hidden size H: rank 1 has 64, rank 2 has 128; intermediate size I: rank 1 has 32, rank 2 has 16; "
                     "top_k K: rank 1 has 2, rank 2 has 4; capacity_factor: rank 1 has 0, rank 2 has 1.5");
  b = a;
  b.x_type = DType::kBFloat16;
  b.activation = Activation::kSwiGlu;
  b.return_mode = ReturnMode::kReduced;
  check_disagreement(a, b,
                     "dtype: rank 1 has float32, rank 2 has bfloat16; activation: rank 1 has relu, rank 2 has swiglu; "
                     "return_mode: rank 1 has direct, rank 2 has reduced");
  b.x_type = DType::kFloat16;
  b.activation = Activation::kGelu;
  a.x_type = static_cast<DType>(99);  // as a newer version may send it
  a.activation = Activation::kSilu;
  a.return_mode = ReturnMode::kReduced;
  check_disagreement(a, b, "dtype: rank 1 has ?, rank 2 has float16; activation: rank 1 has silu, rank 2 has gelu");
  b = a;
  b.placement = 1;
  b.groups = 1;  // other differences cause this one, so it is named only if there are none
  check_disagreement(a, b, "placement: rank 1 and rank 2 place the experts differently");
  b.experts = 9;  // the placement differs because the number of experts does
  check_disagreement(a, b, "experts E: rank 1 has 8, rank 2 has 9");
  b = a;
  b.groups = 1;
  check_disagreement(a, b, "return groups: rank 1 and rank 2 cut the columns differently");
}

// What rank 1 of three reports of call 4.
void check_posted_faults() {
  Limits limits;
  limits.ranks = 3;
  const auto groups = host::make_thread_groups(3, make_heap_layout(limits).bytes);
  Call c;
  c.epoch = 4;
  c.rank = 1;
  c.shape.ranks = 3;
  c.memory.heaps = groups[1]->heaps();
  c.memory.heap_layout = make_heap_layout(limits);
  CHECK(!cpu::posted_fault(c).has_value());

  c.status(2)->entered = 3;
  c.call_config(0, 0)->set_layer({.hidden = 8});
  c.call_config(0, 2)->set_layer({.hidden = 16});  // rank 2 has told rank 0, but not written its own heap yet
  *c.fault(1, 0) = {.posted = FaultRecord::kFailed,
                    .fault = {.kind = FaultKind::kDisagree, .rank = 0, .awaited = 2, .culprit = 2, .epoch = 4},
                    .left = 0};
  const auto disagreement = cpu::posted_fault(c);
  CHECK(disagreement.has_value() && disagreement->fault.kind == FaultKind::kDisagree);
  CHECK_EQ(disagreement->entered, 3u);
  CHECK_EQ(disagreement->mine.layer().hidden, 8u);
  CHECK_EQ(disagreement->theirs.layer().hidden, 16u);

  // If there are several records, a rank reports its own.
  *c.fault(1, 1) = {.posted = FaultRecord::kFailed,
                    .fault = {.kind = FaultKind::kReturn, .rank = 1, .awaited = 2, .culprit = 0, .epoch = 4},
                    .left = 0};
  const auto own = cpu::posted_fault(c);
  CHECK(own.has_value() && own->fault.kind == FaultKind::kReturn);
  CHECK_EQ(own->entered, 0u);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  check_expired_waits();
  check_bad_rows();
  check_disagreements();
  check_posted_faults();
  return 0;
}

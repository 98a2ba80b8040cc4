#include "host/fault_message.h"

#include "cpu/platform.h"
#include "host/text.h"

namespace flashmoe::cpu {
namespace {

using Kind = Error::Kind;

std::string awaited(const Fault& r) {
  switch (r.kind) {
    case FaultKind::kCallSignal:
      return concat("the call signal of rank ", r.awaited, " (expected epoch ", r.expected, ", seen ", r.seen, ")");
    case FaultKind::kPacket:
      return concat("packet ", r.index, " of rank ", r.awaited, " (expected epoch ", r.expected, ", seen ", r.seen,
                    ")");
    case FaultKind::kReturn:
      return concat("the return signal of rank ", r.awaited, " for group ", r.index, " of the columns (expected epoch ",
                    r.expected, ", seen ", r.seen, ")");
    default: return concat("the ", r.actor == Actor::kOs ? "processors" : "OS actor", " of rank ", r.awaited);
  }
}

Error timeout_error(const Call& c, const Group& group, const Fault& r) {
  const uint32_t guilty = r.culprit;
  const uint64_t entered = CpuPlatform::load_acquire(&c.status(guilty)->entered, kSystem);
  std::string state = group.obituary(guilty);
  if (state.empty()) {
    state = entered < r.epoch ? concat("it has not begun call ", r.epoch, " (it is at ", entered, ")")
                              : concat("it has begun call ", r.epoch, " but makes no progress");
  }
  // Another rank's time limit may be another.
  const std::string waited =
      r.rank == c.rank ? concat(" waited ", static_cast<double>(c.timeout_ns) * 1e-9, " s for ") : " waited for ";
  return {Kind::kPeerTimeout,
          concat("rank ", guilty, " holds up call ", r.epoch, ": ", state, "; rank ", r.rank, waited, awaited(r))};
}

Error disagreement_error(const Call& c, const Fault& r) {
  // Each rank's own copy of its configuration lies in its own heap.
  const uint32_t a = r.rank, b = r.awaited;
  const CallConfig& mine = *c.call_config(a, a);
  const CallConfig& theirs = *c.call_config(b, b);
  std::string what;
  auto number = [&](const char* name, auto x, auto y) {
    if (x != y) what += concat(what.empty() ? "" : "; ", name, ": rank ", a, " has ", x, ", rank ", b, " has ", y);
  };
  auto text = [&](const char* name, const std::string& x, const std::string& y) { number(name, x, y); };
  number("hidden size H", mine.hidden, theirs.hidden);
  number("intermediate size I", mine.intermediate, theirs.intermediate);
  number("experts E", mine.experts, theirs.experts);
  number("top_k K", mine.top_k, theirs.top_k);
  text("dtype", name_of(static_cast<DType>(mine.dtype)), name_of(static_cast<DType>(theirs.dtype)));
  text("activation", name_of(static_cast<Activation>(mine.activation)),
       name_of(static_cast<Activation>(theirs.activation)));
  text("return_mode", name_of(static_cast<ReturnMode>(mine.return_mode)),
       name_of(static_cast<ReturnMode>(theirs.return_mode)));
  number("capacity_factor", mine.capacity_factor, theirs.capacity_factor);
  if (mine.placement != theirs.placement && mine.experts == theirs.experts) {
    what += concat(what.empty() ? "" : "; ", "placement: rank ", a, " and rank ", b, " place the experts differently");
  }
  if (what.empty() && mine.groups != theirs.groups) {
    what = concat("return groups: rank ", a, " and rank ", b, " cut the columns differently");
  }
  return {Kind::kGroup, concat("ranks disagree on call ", r.epoch, ": ", what)};
}

Error describe(const Call& c, const Group& group, const Fault& r) {
  switch (r.kind) {
    case FaultKind::kDisagree: return disagreement_error(c, r);
    case FaultKind::kRouterValue:
      return {Kind::kInvalidArgument,
              concat("router: expected finite logits, got NaN or infinity for token ", r.index, " of rank ", r.rank)};
    case FaultKind::kDuplicateExpert:
      return {Kind::kInvalidArgument, concat("topk_ids: expected distinct experts per token, got expert ", r.seen,
                                             " twice for token ", r.index, " of rank ", r.rank)};
    case FaultKind::kExpertRange:
      return {Kind::kInvalidArgument,
              concat("topk_ids: expected ids in [0, E=", r.expected, "), got ", static_cast<int32_t>(r.seen),
                     " for token ", r.index, " of rank ", r.rank)};
    default: return timeout_error(c, group, r);
  }
}

}  // namespace

Error fault_error(const Call& c, const Group& group) {
  for (uint32_t i = 0; i < c.ranks; ++i) {
    const uint32_t p = (c.rank + i) % c.ranks;
    const FaultRecord* r = c.fault(c.rank, p);
    if (CpuPlatform::load_acquire(&r->posted, kSystem) != 0) return describe(c, group, r->fault);
  }
  return {Kind::kOther, "the call was aborted without a fault record"};
}

}  // namespace flashmoe::cpu

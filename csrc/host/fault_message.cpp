#include "host/fault_message.h"

#include <type_traits>
#include <utility>
#include <vector>

#include "host/text.h"

namespace flashmoe::host {
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
    case FaultKind::kLeft: return concat("rank ", r.awaited, " to leave call ", r.epoch, ", which was refused");
    default: return concat("the ", r.actor == Actor::kOs ? "processors" : "OS actor", " of rank ", r.awaited);
  }
}

Error timeout_error(const HostFault& record, const Teller& teller) {
  const Fault& r = record.fault;
  std::string state = teller.obituary;
  if (state.empty()) {
    state = record.entered < r.epoch ? concat("it has not begun call ", r.epoch, " (it is at ", record.entered, ")")
                                     : concat("it has begun call ", r.epoch, " but makes no progress");
  }
  // If another rank found the fault, this rank does not know that rank's time limit.
  const std::string waited = r.rank == teller.rank
                                 ? concat(" waited ", static_cast<double>(teller.timeout_ns) * 1e-9, " s for ")
                                 : " waited for ";
  return {Kind::kPeerTimeout,
          concat("rank ", r.culprit, " holds up call ", r.epoch, ": ", state, "; rank ", r.rank, waited, awaited(r))};
}

// The names and values of a layer's fields, without sizes and element types.
std::vector<std::pair<const char*, std::string>> options_of(AgreedLayer layer) {
  std::vector<std::pair<const char*, std::string>> options;
  for_each_agreed_field(layer, [&]<class T>(const char* name, T& field) {
    if constexpr (std::is_same_v<T, DType> || std::is_same_v<T, uint32_t>) {
      return;
    } else if constexpr (std::is_enum_v<T>) {
      options.emplace_back(name, std::string(name_of(field)));
    } else {
      options.emplace_back(name, concat(field));
    }
  });
  return options;
}

Error disagreement_error(const HostFault& record) {
  const AgreedLayer mine = record.mine.layer(), theirs = record.theirs.layer();
  const uint32_t a = record.fault.rank, b = record.fault.awaited;
  std::string what;
  auto compare = [&](const char* name, const auto& x, const auto& y) {
    if (x != y) what += concat(what.empty() ? "" : "; ", name, ": rank ", a, " has ", x, ", rank ", b, " has ", y);
  };
  auto compare_types = [&](const char* name, DType x, DType y) {
    compare(name, std::string(name_of(x)), std::string(name_of(y)));
  };
  compare("hidden size H", mine.hidden, theirs.hidden);
  compare("intermediate size I", mine.intermediate, theirs.intermediate);
  compare("experts E", mine.experts, theirs.experts);
  compare("top_k K", mine.top_k, theirs.top_k);
  compare_types("dtype", mine.x_type, theirs.x_type);
  if (mine.x_type == theirs.x_type) {  // otherwise the other types differ, too (differing_type)
    compare_types("dtype of weights", mine.weight_type, theirs.weight_type);
    compare_types("dtype of y", mine.y_type, theirs.y_type);
  }
  const auto my_options = options_of(mine), their_options = options_of(theirs);
  for (size_t i = 0; i < my_options.size(); ++i) {
    compare(my_options[i].first, my_options[i].second, their_options[i].second);
  }
  const CallConfig &my_call = record.mine, &their_call = record.theirs;
  if (my_call.placement != their_call.placement && mine.experts == theirs.experts) {
    what += concat(what.empty() ? "" : "; ", "placement: rank ", a, " and rank ", b, " place the experts differently");
  }
  const uint32_t mine_backward = my_call.groups & CallConfig::kBackward, differ = my_call.groups ^ their_call.groups;
  if ((differ & CallConfig::kBackward) != 0) {
    what += concat(what.empty() ? "" : "; ", "pass: rank ", mine_backward != 0 ? a : b, " is in a backward pass, rank ",
                   mine_backward != 0 ? b : a, " in a forward one");
  } else if ((differ & CallConfig::kRedispatch) != 0) {
    const bool mine_again = (my_call.groups & CallConfig::kRedispatch) != 0;
    what += concat(what.empty() ? "" : "; ", "redispatch: rank ", mine_again ? a : b, " sends its tokens again, rank ",
                   mine_again ? b : a, " does not");
  } else if (what.empty() && mine_backward != 0 && differ != 0) {
    what = concat("backward pass: rank ", a, " and rank ", b, " compute the gradients of different calls");
  } else if (what.empty() && differ != 0) {
    what = concat("return groups: rank ", a, " and rank ", b, " cut the columns differently");
  }
  return {Kind::kGroup, concat("ranks disagree on call ", record.fault.epoch, ": ", what)};
}

}  // namespace

Error fault_error(const HostFault& record, const Teller& teller) {
  return record.fault.kind == FaultKind::kDisagree ? disagreement_error(record) : timeout_error(record, teller);
}

Error refusal_error(uint32_t p, uint64_t epoch, const char* reason, uint64_t last) {
  const std::string more = last <= epoch ? "" : concat("; later calls were refused, too, up to call ", last);
  return {Kind::kGroup, concat("rank ", p, " refused call ", epoch, ": ", text_of_another(reason, kReasonBytes), more)};
}

bool is_error(const RowNote& note, bool strict) {
  return note.fault != RowFault::kNone && (strict || note.fault != RowFault::kLogits);
}

Error row_error(const RowNote& note, uint32_t rank, uint32_t experts) {
  const std::string where = concat(" for token ", note.token, " of rank ", rank);
  switch (note.fault) {
    case RowFault::kDuplicateExpert:
      return {Kind::kBadRow,
              concat("topk_ids: expected distinct experts per token, got expert ", note.id, " twice", where)};
    case RowFault::kExpertRange:
      return {Kind::kBadRow,
              concat("topk_ids: expected ids in [0, E=", experts, "), or -1 for none, got ", note.id, where)};
    default:
      return {Kind::kBadRow, concat("router: expected logits of which the largest is finite, with strict, got NaN or "
                                    "infinity",
                                    where)};
  }
}

}  // namespace flashmoe::host

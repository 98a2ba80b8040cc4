// A call that one rank cannot begin, because an argument of its own is wrong. The rank tells the others, the call is
// over on all ranks, and the group may call again. (This is not so where peers are reached by puts alone.)
//
// The rank that refuses takes no part in the call: it sends neither its call signal nor a packet. Without these, no
// rank completes the call. The others end it when they see the refusal (FaultRecord::posted). Each rank says when it
// has left the refused call (FaultRecord::left). No rank begins or refuses the next call before all ranks have left
// the refused one. By then, nothing that the refused call has left in heaps can be mistaken for data of a later call
// (docs/protocol.md, "Calls that a rank refuses").
#pragma once

#include "flashmoe/protocol/machines.h"

namespace flashmoe {

// Fields that lie behind the symmetric heap and behind all other fields there. They have a table of their own: see
// gradients.h.
enum class RefusalField : uint32_t { kReason, kCount };

inline constexpr FieldSpec<RefusalField> kRefusalTable[] = {
    {RefusalField::kReason, "refusal_reason", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks == 1 ? 0 : l.ranks, kReasonBytes, 1, 1}, 1}; },
     "[p] why rank p has refused the last call that it has: text, and a zero"},
};
static_assert(sizeof(kRefusalTable) / sizeof(kRefusalTable[0]) == static_cast<size_t>(RefusalField::kCount));

using RefusalLayout = Layout<RefusalField>;

inline RefusalLayout make_refusal_layout(const Limits& limits) {
  return make_layout(kRefusalTable, limits);
}

// Bytes of the heap and of all that may lie behind it on the CPU engine.
inline uint64_t member_heap_bytes(const Limits& limits) {
  return spread_heap_bytes(limits) + make_refusal_layout(limits).bytes;
}

// Where the reasons of refusals lie in a heap.
struct Reasons {
  RefusalLayout layout;
  uint64_t behind = 0;  // where in a heap the fields of `layout` begin

  char* of(uint8_t* heap, uint32_t p) const { return layout.at<char>(heap + behind, RefusalField::kReason, p); }
};

}  // namespace flashmoe

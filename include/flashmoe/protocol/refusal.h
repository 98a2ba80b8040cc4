// A call that one rank cannot begin (an argument of its own is wrong): the rank tells the others, the call is over on all of
// them, and the group lives on. (Not where peers are reached by puts alone.)
//
// The rank takes no part in the call: it sends neither its call signal nor a packet, without which no rank completes it.
// The others end it when they see the refusal (FaultRecord::posted). A rank whose call ended so, or that has refused it, says when it
// has left it (FaultRecord::left). Before a rank begins the next call, or refuses it, all have left this one: what ended calls
// leave in heaps is overwritten by then, or of an epoch that nobody looks for (docs/protocol.md, "Calls that a rank refuses").
#pragma once

#include "flashmoe/protocol/machines.h"

namespace flashmoe {

// Behind the symmetric heap and all else that lies there. In a table of its own: see gradients.h.
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

// Heap, and all that may lie behind it on the CPU engine.
inline uint64_t member_heap_bytes(const Limits& limits) {
  return spread_heap_bytes(limits) + make_refusal_layout(limits).bytes;
}

// Where reasons are in a heap.
struct Reasons {
  RefusalLayout layout;
  uint64_t behind = 0;  // where in a heap that layout begins

  char* of(uint8_t* heap, uint32_t p) const { return layout.at<char>(heap + behind, RefusalField::kReason, p); }
};

}  // namespace flashmoe

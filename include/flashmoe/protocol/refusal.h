// A call that one rank cannot begin (an argument of its own is wrong): the rank tells the others, the call is over on all of
// them, and the group lives on. On the CPU engine alone.
//
// The rank takes no part in the call: it sends neither its call signal nor a packet, without which no rank completes it.
// The others end it when they see the refusal. A rank whose call ended so, or that has refused it, says when it has left it.
// Before a rank begins the next call, or refuses it, all have left this one: what ended calls leave in heaps is overwritten
// by then, or of an epoch that nobody looks for (docs/protocol.md, "Calls that a rank refuses").
#pragma once

#include "flashmoe/protocol/machines.h"

namespace flashmoe {

inline constexpr uint32_t kReasonBytes = 512;  // with the zero behind it

// Behind the symmetric heap and all else that lies there (machines.h). In a table of its own: see gradients.h.
enum class RefusalField : uint32_t { kRefused, kLeft, kReason, kCount };

inline constexpr FieldSpec<RefusalField> kRefusalTable[] = {
    {RefusalField::kRefused, "refused", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks == 1 ? 0 : l.ranks, 1, 1, 1}, 8}; },
     "[p] epoch of the last call that rank p has refused"},
    {RefusalField::kLeft, "refusal_left", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks == 1 ? 0 : l.ranks, 1, 1, 1}, 8}; },
     "[p] epoch of the last call that some rank has refused and rank p has left"},
    {RefusalField::kReason, "refusal_reason", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks == 1 ? 0 : l.ranks, kReasonBytes, 1, 1}, 1}; },
     "[p] why rank p has refused it: text, and a zero"},
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

// Where refusals are in a heap.
struct Refusals {
  RefusalLayout layout;
  uint64_t behind = 0;  // where in a heap that layout begins

  uint64_t* refused(uint8_t* heap, uint32_t p) const { return at<uint64_t>(heap, RefusalField::kRefused, p); }
  uint64_t* left(uint8_t* heap, uint32_t p) const { return at<uint64_t>(heap, RefusalField::kLeft, p); }
  char* reason(uint8_t* heap, uint32_t p) const { return at<char>(heap, RefusalField::kReason, p); }

 private:
  template <class T>
  T* at(uint8_t* heap, RefusalField f, uint32_t p) const {
    return layout.at<T>(heap + behind, f, p);
  }
};

inline Refusals make_refusals(const Limits& limits) {
  return {make_refusal_layout(limits), spread_heap_bytes(limits)};
}

// A call of a group whose ranks may refuse calls.
struct MemberCall : SpreadCall {
  Refusals refusals;
};

// The lowest rank that has refused the call, as far as is known here; if none has, a number that is no rank's.
template <class P>
uint32_t refuser(const MemberCall& c) {
  uint32_t p = 0;
  while (p < c.shape.ranks && P::load_acquire(c.refusals.refused(c.memory.heaps[c.rank], p), kSystem) != c.epoch) ++p;
  return p;
}

template <class P>
struct MemberPlatform : SpreadPlatform<P> {
  static bool is_refused(const Call& c) {
    return c.shape.ranks != 1 && refuser<P>(static_cast<const MemberCall&>(c)) < c.shape.ranks;
  }
};

}  // namespace flashmoe

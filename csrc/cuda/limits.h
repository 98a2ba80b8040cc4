// The largest call that a context of the CUDA engine serves, and what lies in its heap for that.
#pragma once

#include "cuda/arch.h"
#include "flashmoe/protocol/refusal.h"

namespace flashmoe::cuda {

// The limits from which a context allocates, on a GPU of so many multiprocessors: `limits`, with the values added that
// the architecture decides. Throws Error if there cannot be limits.processors thread blocks, or if rows would lie
// further apart than the kernel's offsets reach.
Limits cuda_limits(const Arch& arch, Limits limits, uint32_t multiprocessors);

// Whether the heap of such a context has the fields by which layers train among several ranks. A rank alone trains
// without these fields, and ranks that reach one another by puts alone do not train. Ranks that are treated as being on
// several machines do not train either, but their heap has the fields, because the fields of relays lie behind them.
inline bool may_train_in_group(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0;
}
// Whether ranks of such a context can refuse a call to the others.
inline bool may_refuse(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0 && limits.relayed == 0;
}
// Where in a heap the reasons of refusals are. The layout is empty if ranks of such a context cannot refuse.
Reasons cuda_reasons(const Limits& limits);
// Bytes of a context's symmetric heap and of what lies behind the heap. Nothing lies behind it for a rank alone, or if
// peers are reached by puts alone. Else these lie behind it: the fields of backward passes (gradients.h); the fields of
// relays, if ranks are treated as being on several machines; and the reasons of refusals, if they are not.
uint64_t cuda_heap_bytes(const Limits& limits);

}  // namespace flashmoe::cuda

// The largest call that a context of the CUDA engine serves.
#pragma once

#include "cuda/arch.h"
#include "flashmoe/protocol/refusal.h"

namespace flashmoe::cuda {

// The limits from which a context allocates, on a GPU of so many multiprocessors: `limits` with what the architecture
// decides filled in. Throws Error if there cannot be limits.processors thread blocks, or if rows would lie further
// apart than the kernel's offsets reach.
Limits cuda_limits(const Arch& arch, Limits limits, uint32_t multiprocessors);

// Whether layers of such a context may train among several ranks. They may not if rows leave by puts, or if the rank is
// alone.
inline bool may_train_in_group(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0;
}
// Whether ranks of such a context can refuse a call to the others.
inline bool may_refuse(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0 && limits.relayed == 0;
}
// Where in a heap the reasons of refusals are. The layout is empty if ranks of such a context cannot refuse.
Reasons cuda_reasons(const Limits& limits);
// Bytes of a context's symmetric heap and of what lies behind it. If there are several ranks and memory is mapped, this
// is: what goes home besides rows in backward passes, the fields of relays, and the reasons of refusals.
uint64_t cuda_heap_bytes(const Limits& limits);

}  // namespace flashmoe::cuda

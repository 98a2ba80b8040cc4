// The largest call that a context of the CUDA engine serves.
#pragma once

#include "cuda/arch.h"
#include "flashmoe/protocol/refusal.h"

namespace flashmoe::cuda {

// `limits` as a context allocates from them on a GPU of so many multiprocessors, with what the architecture decides
// filled in. Throws Error where there cannot be limits.processors thread blocks, or where rows would lie
// further apart than the kernel's offsets reach.
Limits cuda_limits(const Arch& arch, Limits limits, uint32_t multiprocessors);

// Whether layers of such a context may train among several ranks: not where rows leave by puts, nor alone.
inline bool may_train_in_group(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0;
}
// Whether ranks of such a context can refuse a call to the others.
inline bool may_refuse(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0 && limits.relayed == 0;
}
// Where in a heap the reasons are; nowhere, of contexts whose ranks cannot.
Reasons cuda_reasons(const Limits& limits);
// Of its symmetric heap, and behind it, where memory is mapped among several ranks, what goes home besides rows in
// backward passes, what relays have, and reasons of refusals.
uint64_t cuda_heap_bytes(const Limits& limits);

}  // namespace flashmoe::cuda

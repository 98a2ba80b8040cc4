// The largest call that a context of the CUDA engine serves.
#pragma once

#include "flashmoe/protocol/heap_layout.h"

namespace flashmoe::cuda {

// `limits` as a context allocates from them on a GPU of so many multiprocessors, with what the kernel's geometry
// decides filled in. Throws Error where there cannot be limits.processors thread blocks, or where rows would lie
// further apart than the kernel's offsets reach.
Limits cuda_limits(Limits limits, uint32_t multiprocessors);

// Whether layers of such a context may train among several ranks: not where rows leave by puts, nor alone.
inline bool may_train_in_group(const Limits& limits) {
  return limits.ranks > 1 && limits.rdma == 0;
}
// Of its symmetric heap, and behind it, where memory is mapped among several ranks, what goes home besides rows in
// backward passes, and what relays have.
uint64_t cuda_heap_bytes(const Limits& limits);

}  // namespace flashmoe::cuda

// The largest call that a context of the CUDA engine serves.
#pragma once

#include "flashmoe/protocol/heap_layout.h"

namespace flashmoe::cuda {

// `limits` as a context allocates from them on a GPU of so many multiprocessors, with what the kernel's geometry
// decides filled in. Throws Error where there cannot be limits.processors thread blocks, or where rows would lie
// further apart than the kernel's offsets reach.
Limits cuda_limits(Limits limits, uint32_t multiprocessors);

}  // namespace flashmoe::cuda

// Limits of tests that compute layers on the CPU engine.
#pragma once

#include "flashmoe/protocol/heap_layout.h"

namespace flashmoe::test {

// The given sizes, and what calls in fp32 have in addition: element sizes, room for both return modes, and two
// processors for each rank.
inline Limits in_fp32(Limits sizes) {
  sizes.x_bytes = sizes.intermediate_bytes = sizes.return_bytes = 4;
  sizes.return_slots = max_of(sizes.choices_per_token(), sizes.ranks);
  sizes.staging = 1;
  sizes.processors = 2;
  return sizes;
}

}  // namespace flashmoe::test

// How many bytes go to another machine in the messages that a signal announces, as the courier of the CPU engine packs
// them (csrc/network/pickup.cpp): bytes of heaps, without headers.
#pragma once

#include "flashmoe/protocol/machines.h"

namespace flashmoe::sim {

// Bytes of the n-th batch of token blocks, which has been written to a relay.
uint64_t bytes_of_batch(const SpreadCall& c, uint32_t relay, uint32_t n);
// Bytes of return group g of the sums that this machine returns for rank p's tokens.
uint64_t bytes_of_returns(const SpreadCall& c, uint32_t p, uint32_t g);
// Bytes of return group g in one row.
uint32_t bytes_of_group(const Call& c, uint32_t g);

}  // namespace flashmoe::sim

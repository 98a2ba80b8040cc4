// How many bytes go to another machine together with a signal: the data that the signal announces, in bytes of the
// heap and without headers, as the courier of the CPU engine packs it (csrc/network/pickup.cpp).
#pragma once

#include "flashmoe/protocol/machines.h"

namespace flashmoe::sim {

// Bytes of the n-th batch of token blocks, which this rank has written for a relay.
uint64_t bytes_of_batch(const SpreadCall& c, uint32_t relay, uint32_t n);
// Bytes of return group g of the sums that this rank, as the relay of rank p, returns for p's tokens.
uint64_t bytes_of_returns(const SpreadCall& c, uint32_t p, uint32_t g);
// Bytes of return group g in one row.
uint32_t bytes_of_group(const Call& c, uint32_t g);

}  // namespace flashmoe::sim

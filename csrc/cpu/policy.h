// What the CPU engine chooses for a call. Pure functions of plain values.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// Of the tokens of a token block: small ones keep every processor busy, large ones make fewer packets; an offset within a packet
// has 16 bits.
uint32_t log2_token_block(uint32_t tokens, uint32_t processors, uint32_t entries_per_token);

// Whether a token's rows are joined as they come, so that there is no combine (actors/joiner.h).
bool joins_rows(const LayerSpec& layer, uint32_t ranks, uint32_t tokens);

// Return groups of GEMM1's columns, as many as `wanted` if there are so many: their number, and in first[0 .. number] where
// they begin. Columns are spread evenly; no group is without any.
uint32_t return_groups(uint32_t columns, uint32_t wanted, uint16_t (&first)[kMaxGroups + 1]);

}  // namespace flashmoe::cpu

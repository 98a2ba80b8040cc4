// What the CPU engine chooses for a call. These are pure functions of plain values.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/layer.h"

namespace flashmoe::cpu {

// log2 of a token block's number of tokens. Small token blocks keep every processor busy, large ones make fewer
// packets. A block is small enough that an offset within a packet fits 16 bits.
uint32_t log2_token_block(uint32_t tokens, uint32_t processors, uint32_t entries_per_token);

// The columns of each product's tasks: `most`. If a product's results are quantised, this is rounded up to a multiple
// of the columns that share a scale.
std::array<uint32_t, kProducts> task_columns(const LayerSpec& layer, std::array<uint32_t, kProducts> most);

// Whether a token's rows are joined as they come, so that there is no Combine (actors/joiner.h).
bool joins_rows(const LayerSpec& layer, uint32_t ranks, uint32_t tokens);

// Cuts GEMM1's blocks of columns evenly into `wanted` return groups, or fewer if there are fewer blocks, so that no
// group is empty. Returns the number n of groups. Group g has the blocks [first[g], first[g + 1]).
uint32_t return_groups(uint32_t columns, uint32_t wanted, uint16_t (&first)[kMaxGroups + 1]);

}  // namespace flashmoe::cpu

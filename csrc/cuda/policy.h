// What the CUDA engine chooses for a call: how it is cut into token blocks, tasks and return groups, in which order tasks run, and which of
// the ways there are its rows go. Pure functions of plain values; figures behind the choices are in docs/measured.md.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe::cuda {

// The part of a layer, and of the group that runs it, that choices depend on.
struct Shape {
  uint32_t ranks = 1;
  uint32_t local_experts = 0;
  uint32_t hidden = 0, intermediate = 0;
  uint32_t top_k = 0;
  uint32_t x_bytes = 2, intermediate_bytes = 2, return_bytes = 2;  // of an element of each kind of row
};

// Whether the return mode `auto` is `reduced`: where a token's rows, dispatched and returned as with `direct`, would take half
// as long again on the link as its rows' GEMMs, since reducing them is not free, and a fifth fewer would come back. Of R
// ranks and K experts, on average, (R - 1) (1 - (1 - 1 / R)^K) rows go, and as many come back if reduced, else K (R - 1) / R.
bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate);

// Tokens of a block: as few as make no more token blocks than `processors` thread blocks, as far as the gate's shared
// memory allows.
uint32_t token_block(uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors);

// Whether the kernel of a few tokens takes the call (gpu/few.cuh), which computes the forward and nothing else.
bool is_few(uint32_t ranks, uint32_t tokens);

// Whether a token's rows are joined as they come, so that there is no combine (actors/joiner.h). With two rows a token it pays
// where most tiles are full: small tasks leave no time to join their rows beside them.
bool joins_rows(const Shape& shape, uint32_t tokens, uint32_t capacity);

// Bytes whose return is worth being cut into groups, of a call of so many tokens. With several ranks it does not depend on
// the tokens, of which each rank has its own number: one rank's signal is another's columns, so all cut alike. `puts`: peers
// are reached by puts, each of a whole row.
uint64_t grouped_bytes(const Shape& shape, uint32_t tokens, bool joined, bool puts);

// Return groups of GEMM1's columns: their number, and in first[0 .. number] where they begin.
uint32_t return_groups(uint32_t columns, ReturnMode mode, uint64_t return_bytes, uint16_t (&first)[kMaxGroups + 1]);

// Whether the link takes rows for other ranks as fast as GEMM1 computes them.
bool link_keeps_up(const Shape& shape);

// Tasks published ahead for each processor. Several ranks' rows become ready one after the other, and what is ready waits
// behind what is published, however late that is computed; short tasks need more of it to hide the scheduler.
uint32_t tasks_ahead(const Shape& shape);

// The order in which tasks run on so many thread blocks, and how many of these send. What is 0 in `asked` is chosen.
OrderPolicy task_order(const Shape& shape, ReturnMode mode, uint32_t blocks, const OrderPolicy& asked);

}  // namespace flashmoe::cuda

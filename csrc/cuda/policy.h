// What the CUDA engine chooses for a call: how it is cut into token blocks, tasks and return groups, in which order
// tasks run, and in which way results come home. Pure functions of plain values; figures behind them are in
// docs/measured.md.
#pragma once

#include "cuda/arch.h"
#include "cuda/layer.h"

namespace flashmoe::cuda {

// The part of a layer, and of the group that runs it, on which these functions depend.
struct Shape {
  uint32_t ranks = 1;
  uint32_t local_experts = 0;
  uint32_t hidden = 0, intermediate = 0;
  uint32_t top_k = 0;
  uint32_t x_bytes = 2, intermediate_bytes = 2, return_bytes = 2;  // of an element of each kind of row
};

// Whether the return mode `auto` is `reduced`. It is where, with `direct`, a token's rows would take more than 1.5
// times as long on the link, dispatched and returned, as their GEMMs, since reducing is not free; and where `reduced`
// brings back less than 0.8 times as many. On average (R - 1) (1 - (1 - 1 / R)^K) rows of a token go to other ranks,
// and as many come back if reduced, else K (R - 1) / R: of 4 ranks and 8 experts, 2.7 go, and 2.7 or 6 come back.
bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate);

// Tokens of a token block: as few as make no more token blocks than thread blocks (`processors`), but no more than the
// gate's shared memory has room for.
uint32_t token_block(const Arch& arch, uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors);

// Whether the kernel of a few tokens takes the call (decode/alone.cuh), which computes the forward and nothing else, goes over
// weights along K, and has room for 2048 choices, those of the shared expert's slices too. Its time is that of reading the
// weights up to about 16 rows an expert. element_bytes: of y.
bool is_few(const CallShape& shape, uint32_t element_bytes, bool transposed);
// The most tokens of which it does, whatever the call's number is.
uint32_t few_most(const CallShape& shape, uint32_t element_bytes, bool transposed);
// Whether all calls of a layer in a context of so many ranks go through the kernel of a few tokens for a rank of a group
// (decode/group.cuh). No call's number of tokens says so, of which each rank has its own, but what all ranks have agreed on:
// with it a context is one of few tokens, or not.
bool few_in_group(const Limits& limits, const LayerSpec& spec);
// Of a call of few tokens, in how many parts GEMM1 sums the intermediate columns: the same for any number of tokens up to
// kFewExactTokens, and 1 beyond and in a group. weight_bits: of an element of weights.
uint32_t few_parts(const Arch& arch, const CallShape& shape, uint32_t weight_bits);
// Whether there is no kernel but that of few tokens.
constexpr bool only_few(const LayerSpec& spec) {
  return spec.weight_type == DType::kMxFp4;
}

// The kernels that calls of a layer go through, each of a cubin of its own: that for any number of tokens and that for a
// few, of which a call's number chooses one where there are both. group: they are those of a rank of a group, where these
// are others than of a rank alone.
struct KernelsOfLayer {
  bool general, few, group;
};
KernelsOfLayer kernels_of(const Limits& limits, const LayerSpec& spec, Pass pass);

// Whether a token's rows are joined as they come, so that there is no Combine (actors/joiner.h). With two rows a token
// it pays where most tiles are full: while small tasks run, there is no time to join their rows.
bool joins_rows(const Arch& arch, const Shape& shape, uint32_t tokens, uint32_t capacity);

// Return groups of GEMM1's columns: their number, and in first[0 .. number] where they begin. They must not depend on the
// number of tokens, of which each rank has its own: a group's signal means the same columns to all. `whole`: rows are
// not cut, as of a rank alone, whose combine wins less under GEMM1 than groups cost, and where peers are reached by puts.
uint32_t return_groups(uint32_t columns, ReturnMode mode, bool whole, uint16_t (&first)[kMaxGroups + 1]);

// Whether the link carries result rows to other ranks as fast as GEMM1 computes them.
bool link_keeps_up(const Shape& shape);

// The window's tasks for each cluster (OrderPolicy::window). With several ranks rows become ready one after the other,
// and what becomes ready waits behind what is published, so it should be little; short tasks need more to hide the
// scheduler's latency.
uint32_t tasks_ahead(const Arch& arch, const Shape& shape);

// The order in which tasks run on `blocks` thread blocks, and how many of these send. Fields that are not 0 in `asked`
// are taken as they are; the others are chosen.
OrderPolicy task_order(const Arch& arch, const Shape& shape, ReturnMode mode, uint32_t blocks,
                       const OrderPolicy& asked);

}  // namespace flashmoe::cuda

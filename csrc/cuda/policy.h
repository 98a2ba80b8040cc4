// What the CUDA engine chooses for a call: how the call is cut into token blocks, tasks and return groups, in which
// order tasks run, and in which way results come home. These are pure functions of plain values. The measurements
// behind them are in docs/measured.md.
#pragma once

#include "cuda/arch.h"
#include "cuda/layer.h"

namespace flashmoe::cuda {

// What joins_rows, link_over_gemm1, tasks_ahead and task_order need to know of the layer, the group and the call.
struct Shape {
  uint32_t ranks = 1;
  uint32_t local_experts = 0;
  uint32_t hidden = 0, intermediate = 0;
  uint32_t top_k = 0;
  uint32_t x_bytes = 2, intermediate_bytes = 2, return_bytes = 2;  // bytes of an element of each kind of row
  uint32_t tokens = 0;                                             // of this rank in this call
  uint32_t experts = 0;                                            // of all ranks
  uint32_t first_columns = 0;                                      // GEMM0 tasks of a tile
  uint32_t returning_k = 0;  // columns over which GEMM1 contracts, or in a backward pass the product that makes dX
  bool work_behind = false;  // warps of the thread blocks behind those with formers have a role (formers_of)
};

// Whether the return mode `auto` means `reduced`, which is if a token's rows take less time with it than with `direct`.
// The time of either mode is that of the link or that of the GPU, whichever is longer. Of a token,
// (R - 1) (1 - (1 - 1 / R)^K) rows go to other ranks on average. With `reduced` as many rows come back, but the GPU
// reads K (R - 1) / R rows once more to sum them, beside its GEMMs. With `direct` all of these K (R - 1) / R rows come
// back. (With 4 ranks and 8 experts per token 2.7 rows go, and 2.7 or 6 come back.)
bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate);

// How many tokens a token block has: as few as possible without making more token blocks than thread blocks
// (`processors`), but no more than the gate's shared memory has room for.
uint32_t token_block(const Arch& arch, uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors);

// Whether the kernel for a few tokens takes the call (decode/alone.cuh). That kernel computes the forward pass and
// nothing else, reads weights along the contracted axis, and has room for 4096 choices, where each slice of the shared
// expert is a choice. Its time is about that of reading the weights, if experts have at most 48 rows on average. If
// weights have scales, there are at most 16 rows on average, 256 tokens and 2048 choices.
bool is_few(const CallShape& shape, const LayerSpec& spec);
// The most tokens of a call that this kernel takes. Does not depend on shape.tokens.
uint32_t few_most(const CallShape& shape, const LayerSpec& spec);
// Whether all calls of a layer, in a context of these limits, go through the kernel for a few tokens for a rank of a
// group (decode/group.cuh). A call's number of tokens cannot decide this, because each rank has its own number. What all
// ranks agree on decides it: the limits, and the layer with its most_tokens.
bool few_in_group(const Limits& limits, const LayerSpec& spec);
// In how many parts GEMM1 sums the intermediate columns, in a call of few tokens. Calls of up to kFewExactTokens tokens
// all have the same number of parts. Beyond that, in a group, and with weights in 16 bits, it is 1. weight_bits: bits
// of an element of weights.
uint32_t few_parts(const Arch& arch, const CallShape& shape, uint32_t weight_bits);
// Whether the kernel for a few tokens is the only kernel for weights of this type.
constexpr bool only_few(const LayerSpec& spec) {
  return spec.weight_type == DType::kMxFp4;
}

// The kernels that calls of a layer go through: one for any number of tokens (general) and one for a few. Each has its
// own cubin. If there are both, a call's number of tokens chooses one. group: these are kernels for a rank of a group,
// which differ from those for a rank alone.
struct KernelsOfLayer {
  bool general, few, group;
};
KernelsOfLayer kernels_of(const Limits& limits, const LayerSpec& spec, Pass pass);

// Whether a token's rows are joined as they come, so that there is no Combine (actors/joiner.h). With two rows per
// token this pays if most tiles are full: while small tasks run, there is no time to join their rows.
bool joins_rows(const Arch& arch, const Shape& shape, uint32_t tokens, uint32_t capacity);

// Cuts GEMM1's columns into return groups: the result is their number, and first[0 .. number] says where they begin.
// Groups must not depend on the number of tokens, because each rank has its own number, and a group's signal must mean
// the same columns to all ranks. `whole`: rows are not cut. A rank alone does not cut rows, since what its Combine wins
// by running beside GEMM1 is less than what groups cost. Nor are rows cut if peers are reached by puts.
uint32_t return_groups(uint32_t columns, ReturnMode mode, bool whole, uint16_t (&first)[kMaxGroups + 1]);

// How long the link takes to carry result rows to other ranks, divided by how long GEMM1 (in a backward pass, the
// product of dX) takes to compute them. Up to 1 the link keeps up.
double link_over_gemm1(const Shape& shape);

// How many tasks of the window there are for each cluster (OrderPolicy::window). With several ranks, rows become ready
// one after the other. A task that becomes ready waits behind those that are published, so few should be published.
// Short tasks need more to hide the scheduler's latency.
uint32_t tasks_ahead(const Arch& arch, const Shape& shape);

// The order in which tasks run on `blocks` thread blocks, how many of these blocks send, and how many clusters stop
// early to reduce. Fields of `asked` that are not OrderPolicy::kBuiltIn are taken; this function chooses the others.
OrderPolicy task_order(const Arch& arch, const Shape& shape, ReturnMode mode, uint32_t blocks,
                       const OrderPolicy& asked);

}  // namespace flashmoe::cuda

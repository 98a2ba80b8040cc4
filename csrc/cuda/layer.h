// What a caller says about a layer, once, and about its tokens, at each call. All addresses are of the device's memory.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/arch.h"
#include "cuda/tensor_map.h"
#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/layer.h"
#include "host/placement.h"

namespace flashmoe::cuda {

// What a layer's calls compute. Passes that train (all but kInference) need a rank alone, or ranks whose memory is
// mapped, and weights without scales.
enum class Pass : uint32_t {
  kInference,
  kForward,   // the layer's result; what gradients need is kept
  kBackward,  // the gradients, from what was kept
};

// What all calls of a layer share: what the layer is, and where everything but its tokens lies.
struct Layer {
  LayerSpec spec;
  host::Holders placement;                                                     // which ranks hold each of the E experts
  Matrix gate_up, down, router;                                                // router.data 0: routing is given
  Matrix shared_gate_up, shared_down;                                          // one matrix each; data 0: none
  uint64_t gate_up_bias = 0, down_bias = 0, router_bias = 0, choice_bias = 0;  // 0: none
  uint64_t shared_gate = 0;                                                    // [H]; 0: none
  // The address of the ups, if shared_gate_up has the gates alone. It is larger than the gates' address, and rows are
  // as far apart as theirs. 0: shared_gate_up has both.
  uint64_t shared_up = 0;
  // Scales of the matrices, contiguous, as spec.weight_scales says; 0: none.
  uint64_t gate_up_scale = 0, down_scale = 0, shared_gate_up_scale = 0, shared_down_scale = 0;
  bool topk_ids_64 = false;        // given ids are int64
  bool topk_weights_as_x = false;  // given weights are of x's type, not float32
  bool traced = false;
  Pass pass = Pass::kInference;
  bool strict = false;  // a row whose router logits allow no choice is an error
  // Among several ranks: the forward pass does not keep x; the backward pass sends it again.
  bool redispatch = false;
  // Files of the kernels that are compiled for the spec's types and activation, and for `traced`: the kernel for any
  // number of tokens, and the kernel for a few. Empty: the layer does not need this kernel (kernels_of).
  std::string cubin, few_cubin;
};

// How many rows a call among several ranks has kept (`room` may be for more), and the number of the call in its
// context, which is the same on all ranks.
struct KeptRows {
  uint64_t rows = 0, received = 0;  // rows of experts; other ranks' tokens, even if dispatched again
  uint64_t call = 0;
  gpu::KeptRoom room{};
};

// Bytes of a row's pre-activations.
inline uint64_t kept_row_bytes(const LayerSpec& spec) {
  return uint64_t{spec.gate_up_rows()} * element_bytes(spec.intermediate_type);
}

// choices_of_token: a token's choices, of which the shared expert is one. rows_of_token: a token's rows of
// pre-activations; each slice of the shared expert has a row of its own.
inline uint64_t choices_of_token(const LayerSpec& spec) {
  return uint64_t{spec.top_k} * spec.slices + shared_experts(spec.shared);
}
inline uint64_t rows_of_token(const LayerSpec& spec) {
  return uint64_t{spec.top_k} * spec.slices + spec.shared;
}
// The slices of the shared expert behind its first (Call::inner_tile).
inline uint64_t later_slices(const LayerSpec& spec) {
  return max_of(spec.shared, 1u) - 1;
}

// Where the routing of the own tokens lies, from `at` on: choices, their weights and, with a router, logits. The
// routing is the last part of what a call keeps.
struct RoutingLayout {
  uint64_t ids, weights, logits, bytes;

  RoutingLayout(uint64_t at, const LayerSpec& spec, uint64_t tokens)
      : ids(at),
        weights(ids + tokens * choices_of_token(spec) * sizeof(int32_t)),
        logits(weights + tokens * choices_of_token(spec) * sizeof(float)),
        bytes(logits + (spec.routing == Routing::kGiven ? 0 : tokens * spec.experts * sizeof(float))) {}
};

// The memory of what a call keeps (KeptOutputs): pre-activations first, then the routing.
struct KeptLayout : RoutingLayout {
  KeptLayout(const LayerSpec& spec, uint64_t tokens)
      : RoutingLayout(tokens * rows_of_token(spec) * kept_row_bytes(spec), spec, tokens) {}
};

// What KeptLayout is for a rank alone, for a rank among several (MovedRows): pre-activations first. `room` decides the
// sizes.
struct GroupKeptLayout {
  static constexpr uint64_t kAlign = 16;
  uint64_t received, numbers, first_row;
  RoutingLayout routing;

  GroupKeptLayout(const LayerSpec& spec, uint64_t tokens, uint64_t ranks, uint64_t local_experts,
                  const gpu::KeptRoom& room)
      : received(room.rows * kept_row_bytes(spec)),
        numbers(received + room.received * spec.token_row_bytes()),
        first_row(align_up(numbers + ranks * room.pitch * sizeof(uint32_t), kAlign)),
        routing(align_up(first_row + (local_experts + later_slices(spec) + 1) * sizeof(uint32_t), kAlign), spec,
                tokens) {}
};

// The memory in which a call among several ranks leaves its rows until they are moved. Pre-activations come first, tile
// by tile. Received rows follow, as many as a context of these limits may receive, unless they are dispatched again.
// The counts and numbers of the rows come last (CountedRows).
struct GroupCallLayout {
  uint64_t received, ranks, rows, numbers, bytes;

  GroupCallLayout(const LayerSpec& spec, const Limits& limits, uint64_t local_experts, bool redispatch) {
    const uint64_t most = limits.max_tokens, word = sizeof(uint32_t);
    received = (limits.max_tiles() + limits.max_later_slices()) * limits.tile_rows * kept_row_bytes(spec);
    ranks = received + (redispatch ? 0 : (limits.ranks - 1) * most * spec.token_row_bytes());
    rows = ranks + limits.ranks * sizeof(gpu::RankRows);
    numbers = rows + limits.ranks * local_experts * word;
    bytes = numbers + limits.ranks * most * word;
  }
};

// Whether rows of dZ are also needed without the combine weight as a factor (BackwardOptions::plain_behind).
inline bool needs_plain(const LayerSpec& spec) {
  return spec.weights_on_input && spec.gate_up_bias;
}

// The memory of a backward pass that nobody reads after the pass (BackwardArgs): rows of tiles, dZ first. tokens: the
// rank's own. rows: rows of experts; a row of the shared expert counts once for each slice. received_rows: rows of
// other ranks' tokens (GroupArgs), of dY, and also of x if x is dispatched again.
struct PassLayout {
  uint64_t tiles;      // without the tiles of the shared expert's later slices
  uint64_t all_tiles;  // with them
  uint64_t weighted, plain, received, x, gather, parts, bytes;

  PassLayout(const Arch& arch, const LayerSpec& spec, uint64_t tokens, uint64_t rows, uint64_t local_experts,
             uint64_t received_rows, bool redispatch, bool alone) {
    const uint64_t element = element_bytes(spec.y_type), first_rows = rows - tokens * later_slices(spec);
    tiles = first_rows / arch.tile_rows + min_of(local_experts, first_rows);
    if (!alone) tiles = max_of(tiles, uint64_t{1});  // a tensor map needs at least one row
    all_tiles = tiles + later_slices(spec) * ceil_div(tokens, uint64_t{arch.tile_rows});
    weighted = all_tiles * arch.tile_rows * spec.gate_up_rows() * element;
    plain = weighted + all_tiles * arch.tile_rows * spec.intermediate * element;
    received = plain + (needs_plain(spec) ? weighted : 0);
    x = received + received_rows * spec.token_row_bytes();
    gather = x + (redispatch ? x - received : 0);
    parts = gather + (alone ? 0 : tiles * arch.tile_rows * sizeof(uint32_t));
    const uint64_t of_row = ceil_div(spec.intermediate, arch.task_features) * arch.cluster_blocks;
    bytes = parts + of_row * rows * sizeof(float);
  }
};

// What changes from call to call.
struct TokenSpec {
  uint32_t tokens = 0;
  uint64_t x = 0, x_row_bytes = 0;
  uint64_t x_scale = 0;  // scales of x in e4m3; 0: none
  uint64_t out = 0;
  uint64_t topk_ids = 0, topk_weights = 0;  // 0 with a router
  uint64_t load = 0, router_logits = 0;     // see KernelArgs; 0: not wanted
  uint64_t kept = 0;     // for Pass::kForward: memory of KeptLayout or GroupCallLayout, aligned to 16 bytes
  uint64_t routing = 0;  // likewise, among several ranks: memory that begins with the routing
};

// What a backward pass has in addition to its TokenSpec, in which dY stands for x and dX for out. Everything is
// contiguous but x. Memory is aligned to 16 bytes.
struct GradientSpec {
  uint64_t kept = 0;  // what the forward pass kept: memory of KeptLayout or GroupKeptLayout
  KeptRows rows;      // among several ranks
  uint64_t x = 0, x_row_bytes = 0;
  uint64_t memory = 0;   // memory of PassLayout
  uint64_t weights = 0;  // [T, K] fp32, written: gradients of the combine weights
  // Written, as in BackwardOptions; 0: not wanted.
  uint64_t shared_gate_up = 0, shared_down = 0, shared_logits = 0;
  uint64_t shared_up = 0;                    // if ups are a matrix of their own beside shared_gate_up; else 0
  uint64_t gate_up = 0, down = 0;            // written, shaped as the tensors; 0: not wanted
  uint64_t gate_up_bias = 0, down_bias = 0;  // likewise
  uint64_t accumulates = 0;                  // as in BackwardArgs
  // As in BackwardArgs; 0: none. Without logit_gradients none of these is read.
  uint64_t given_logit_gradients = 0, weights_by_bias = 0, logit_gradients = 0, router = 0;
};

}  // namespace flashmoe::cuda

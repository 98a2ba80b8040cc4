// What the host hands to the kernels, and what they have in common.
#pragma once

#include "flashmoe/gpu/decode_memory.h"
#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe::gpu {

inline constexpr uint32_t kMaxRanks = 32;  // of a group of GPUs: blocks have tables of them

inline constexpr uint32_t kNoTile = ~0u;    // of a task that is only rehearsed (sm90/roles/look_up.cuh)
inline constexpr uint32_t kNoExpert = ~0u;  // of a traced span that is no product

// The fused kernel's block.
inline constexpr uint32_t kWarps = 12;
inline constexpr uint32_t kThreads = kWarps * 32;
inline constexpr uint32_t kSharedBytes = 227 * 1024;  // the most a block may have

// Experts that a kernel has room for.
inline constexpr uint32_t kMaxExperts = 1024;

// CUtensorMap, which only the host's driver calls look into.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// One span of a warp's time, as the trace buffer holds it. Times of the global timer, in nanoseconds.
struct TraceEvent {
  uint64_t start_ns, end_ns;
  uint16_t kind;  // Phase
  uint16_t warp;
  uint32_t index, column;
  uint32_t expert;  // of a product: as TaskSlot has it; else kNoExpert
};
static_assert(sizeof(TraceEvent) == 32);

// Trace memory of one block: kTraceEvents events behind a header.
inline constexpr uint32_t kTraceEvents = 16383;
struct TraceHeader {
  uint64_t count;             // of all events, also those for which there was no room
  uint64_t start_ns, end_ns;  // the block's first instruction, and its end
  uint64_t multiprocessor;    // on which it ran
};
static_assert(sizeof(TraceHeader) == sizeof(TraceEvent));
inline constexpr uint64_t kTraceBytesPerBlock = sizeof(TraceHeader) + uint64_t{kTraceEvents} * sizeof(TraceEvent);

// Where host and device ask one another the time: a page of host memory that both have. See clock.cuh.
struct ClockPage {
  uint64_t asked, answered;  // how often
  uint64_t device_ns;        // the last answer
};

// Weights as loads see them: expert e's row r is at data + e * expert_bytes + r * row_bytes, multiples of 16 all three.
struct WeightRows {
  const uint8_t* data;
  uint64_t row_bytes, expert_bytes;

  FLASHMOE_HD const uint8_t* row(uint32_t e, uint32_t r) const { return data + e * expert_bytes + r * row_bytes; }
};

// How a router makes of logits a token's experts and their weights; see LayerSpec.
struct RouterRule {
  uint32_t sigmoid;  // 1: scores are sigmoids; 0: a softmax over all E
  uint32_t renormalize;
  DType rounded_to;  // logits, before all else; float32: not rounded
  uint32_t groups, top_groups;
  float routed_scale;
  const float* choice_bias;  // [E]; may be null

  // Whether experts are chosen by scores; else by logits, in the same order, of which float32 tells apart more.
  FLASHMOE_HD bool by_scores() const { return choice_bias != nullptr || groups > 1; }
  // A softmax and the largest of it, which most models have.
  FLASHMOE_HD bool plain() const {
    return sigmoid == 0 && rounded_to == DType::kFloat32 && !by_scores() && routed_scale == 1.0f;
  }
};

// Of the clamped SwiGLU: min(g, limit) sigmoid(alpha min(g, limit)) (clamp(u, -limit, limit) + up_offset)
struct ClampedShape {
  float limit, alpha, up_offset;
};

// Where an intermediate column's gate and up lie among an expert's 2I: `step` from column to column, `up` from gate to up.
struct GatedRows {
  uint32_t step, up;
};

// Scales of weights: fp32 of e4m3, e8m0 of mxfp4, a byte each. Of block b of rows (spec/encoding.h) and block k of K of
// expert e: data[e expert + b row + k step]; of e's row r, where each has one: data[e expert + r].
struct ScaleTable {
  const void* data;
  uint32_t expert, row, step;
  uint32_t blocks;  // of rows of an expert, or of a slice
  uint32_t up;      // from a gate's to its up's, where these lie behind all gates

  template <class Scale>
  FLASHMOE_HD const Scale* as() const {
    return static_cast<const Scale*>(data);
  }
};

// What a forward pass keeps for its gradients; C is the number of a token's choices, one for each slice of an expert and of
// the shared one. Among several ranks rows of pre-activations are the rows of tiles, 256 a tile, while the call runs
// (gpu/kept_rows.cuh moves them); in the backward pass, CanonicalRows.
struct KeptOutputs {
  uint8_t* pre_activations;  // [T C, I, 2], gate and up side by side, or [T C, I]; row token C + choice
  int32_t* ids;              // [T, top_k] chosen experts, ~expert where the choice was dropped
  float* weights;            // [T, top_k]
};

// Elements from one token's gradients of logits to the next one's: the copy engine takes rows 16 bytes apart.
FLASHMOE_HD constexpr uint32_t logit_pitch(uint32_t experts) {
  return align_up(experts, 8u);
}

// What a backward pass reads and writes besides; its dY and dX are where the call has x and out (KernelArgs::dy). Rows of tiles:
// 256 a tile, one behind the other, in the order of intermediate rows.
struct BackwardArgs {
  KeptOutputs kept;  // read
  const uint8_t* x;  // [T, H], rows x_row_bytes apart
  uint64_t x_row_bytes;
  uint8_t* dz;           // [tiles * 256, 2I or I] gradients of pre-activations, in the order of gate_up_proj's rows
  uint8_t* weighted;     // [tiles * 256, I] activations times the combine weight
  TensorMap dz_columns;  // both as operands whose rows are contracted: boxes of a span
  TensorMap weighted_columns;
  uint32_t z_columns;              // 2I or I
  float* weight_parts;             // [2 blocks of columns][T C] what each has of a combine weight's gradient
  float* combine_gradients;        // [T, top_k], written: the sums of these; null: not wanted
  uint8_t* gate_up_gradient;       // written, contiguous, of gate_up_proj; null: not wanted
  uint8_t* down_gradient;          // likewise, of down_proj,
  uint8_t* gate_up_bias_gradient;  // and of the biases
  uint8_t* down_bias_gradient;
  uint32_t accumulates;  // 1: these four are float32, and added to
  // Of a router (gpu/router_backward.cuh, sm90/gradients/router.cuh), whose matrix is KernelArgs::router.
  const float* logits;                 // [T, E], as they were scored
  const float* given_logit_gradients;  // [T, E]: what the caller has of theirs besides; may be null
  const double* weights_by_bias;       // [T, top_k]: what down_bias adds to the combine weights' gradients; may be null
  uint8_t* logit_gradients;            // [T, logit_pitch(E)], written, of x's type; null: no router
  TensorMap logit_columns;             // these and x as operands whose rows are contracted
  TensorMap x_columns;
  uint8_t* router_gradient;  // [E, H], written, or as `accumulates` says; null: not wanted
};

// A forward pass among several ranks keeps as much as it has received, which is known when it is over: two small kernels
// behind it (gpu/kept_rows.cuh) count its rows and, if these have room there, move them to what is kept. R is the number of ranks.
struct RankRows {
  uint32_t tokens;    // of a rank
  uint32_t received;  // how many of these have a row here
  uint32_t rows;      // of experts, for these tokens
};
struct CountedRows {
  RankRows* told;     // [R], in mapped host memory
  RankRows* ranks;    // [R], the same
  uint32_t* rows;     // [R, El] how many rows each expert has of theirs
  uint32_t* numbers;  // [R, max_tokens] which of its rank's received rows a token's is; kNone where it has none
};
// What is kept has room for so many rows, and is laid out by it; or needs as much.
struct KeptRoom {
  uint32_t rows;      // of experts
  uint32_t received;  // of other ranks' tokens; 0 where they are not kept, but dispatched again
  uint32_t pitch;     // tokens of a rank: the most that one has

  FLASHMOE_HD constexpr bool has(const KeptRoom& needed) const {
    return needed.rows <= rows && needed.received <= received && needed.pitch <= pitch;
  }
};
inline constexpr uint32_t kMoveThreads = 512;  // of a block of either kernel
struct MovedRows {
  CountedRows counted;
  uint8_t* pre_activations;  // [room.rows, 2I or I], by expert, source and token
  uint8_t* received;         // [room.received, H], by source and token; null: not kept, but dispatched again
  uint32_t* numbers;         // [R, room.pitch] which of all received rows a token's is; kNone where it has none
  uint32_t* first_row;       // [El + 1] number of each expert's first row; of the shared one, the last, each slice's
  KeptRoom room;             // of these; what needs more is not moved
  uint32_t blocks;           // the first so many thread blocks move received rows, the others tiles
};

// What passes that train have besides among several ranks. Rows of tokens of other ranks' are "received",
// once each, however many experts have them; rows of experts are numbered by expert, source and token (CanonicalRow).
struct GroupArgs {
  static constexpr uint32_t kNone = ~0u;
  // Where a received row goes: of rank p's token t, to row numbers[p pitch + t] of `received`; or, in forward passes, where
  // numbers is null, to row peer_slot(p) pitch + t.
  uint8_t* received;
  const uint32_t* numbers;
  uint32_t pitch;
  uint32_t rows, received_rows;  // in all, in a backward pass
  // Backward passes.
  uint8_t* x;  // [received_rows, H], beside received_dy(); written where x is dispatched again, else read
  const uint32_t* first_row;  // [El + 1] number of each expert's first row
  uint32_t*
      gather;  // [tiles * 256], written: a row's token, or of other ranks' its number among those received | kRemote
  uint64_t weights_at;     // where in a heap the gradients of its tokens' combine weights are, [T, K] floats,
  uint32_t weights_pitch;  // a token's so many bytes behind the one's before (protocol/gradients.h)
  uint64_t x_behind;       // where x is dispatched again: how far behind its row of dY; else 0 (redispatched_behind)

  FLASHMOE_HD const uint8_t* received_dy() const { return received; }
};

// What backward passes of layers with some options have besides. (Behind all other arguments: so kernels of layers without
// are the same.)
struct BackwardOptions {
  // With weights on the input dZ has the weight as a factor, and `weighted` has not. Where gate_up_bias has
  // a gradient, rows of dZ without it lie so many bytes behind; else 0.
  uint64_t plain_behind;
  // Of a shared expert, written: as gate_up_gradient and down_gradient of BackwardArgs, [2Is or Is, H] and [H, Is], or
  // transposed; and [T] float32, the gradients of the products of its gate with x. Null: not wanted.
  uint8_t *shared_gate_up_gradient, *shared_down_gradient;
  float* shared_logit_gradients;
};

struct KernelArgs {
  // Its epoch is ignored: the kernel counts calls itself (Control::calls), so that a captured graph can be replayed.
  Call call;
  FewLayout few_layout;  // what of the memory at call.memory.work only the kernel for a few tokens has

  // Weights as TMA sees them, all 128-byte swizzled, 128 bytes of K by 128 rows a box, zeros outside:
  //   gate_up  5D {H, 8, gated ? 2 : 1, I / 8, El}, box {., 8, gated ? 2 : 1, gated ? 8 : 16, 1}: with a gate, a box
  //            holds 8 gate rows, their 8 up rows, the next 8 gate rows, and so on, so that a thread's accumulators
  //            have both, whether features are down or across
  //   down     5D {I, 8, 1, H / 8, El},  box {., 8, 1, 16, 1}
  //   transposed weights: 64 features by 64 rows along K a box, of which a block loads two for 128 features (of fp32, in a
  //   backward pass, 32 by 32, of which it loads four: spans, sm90/geometry.h)
  //     gate_up  5D {I, H, 2, 1, El}; with gate and up in turn, or no gate, {2I or I, H, 1, 1, El};  box {64, 64, 1, 1, 1}
  //     down     5D {H, I, 1, 1, El},  box {64, 64, 1, 1, 1}
  //   router   5D {H, E, 1, 1, 1},       box {., gate_features(E), 1, 1, 1}; of a backward pass box {64, 64, 1, 1, 1}
  //   intermediate  2D {I, tiles * 256}, box {., 32}
  //   tokens   2D {H, T},                box {., 32}; x, for the router; of a backward pass 2D {E, T}, gradients of logits
  TensorMap gate_up, down, router, intermediate, tokens;
  // The shared expert's, slice by slice: as gate_up and down, of so many experts. Gates and ups may be two matrices: dimension 2
  // goes from one to the other. In a backward pass, too, dimension 2 goes from gates to ups, where these are not in turn.
  TensorMap shared_gate_up, shared_down;
  // The router without TMA: [1][E] rows of H.
  WeightRows router_rows;

  const uint8_t* x;  // [T, H], rows x_row_bytes apart (a multiple of 16)
  uint64_t x_row_bytes;
  uint8_t* out;                // [T, H] contiguous
  const void* gate_up_bias;    // [El, 2I], in the order of gate_up's rows, or [El, I] contiguous; may be null
  const void* down_bias;       // [El, H]; may be null
  const void* router_bias;     // [E]; may be null
  const void* shared_gate;     // [H]; null: the shared expert's weight is 1
  const void* topk_ids;        // [T, K] int32 or int64; null: the router decides
  const void* topk_weights;    // [T, K] float32, or of x's type
  uint64_t* load;              // [E], to which each expert's choices are added, of all tokens; may be null
  float* router_logits;        // [T, E], written: the logits as they are scored; may be null
  uint32_t topk_ids_64;        // 1: int64
  uint32_t topk_weights_as_x;  // 1: of x's type
  RouterRule rule;
  ClampedShape clamped;
  GatedRows gated, shared_gated;  // of gate_up and of shared_gate_up
  uint32_t few_choices;       // of a token in sm90/decode/alone.cuh: its K experts, and the slices of the shared one
  uint32_t few_parts;         // of the intermediate columns, that are tasks of their own in sm90/decode/alone.cuh
  uint32_t weights_on_input;  // 1: a row's weight scales its products with gate_up, and not its result
  HostFault* host_fault;      // in mapped host memory: written when the call failed, or a row of it is an error
  uint8_t* trace;             // [blocks] of kTraceBytesPerBlock; null: not traced

  // Of quantised experts: the scales of their matrices. In e4m3, the map `intermediate` has each tile's rows by itself:
  // 3D {I, 256, tiles}, box {128, 32, 1}. In mxfp4, gate_up and down are maps of bytes: a row of a matrix has H / 2 or
  // I / 2 bytes, and a row of a box has 128.
  ScaleTable gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale;
  uint32_t scales_by_row;  // 1: each row of weights has a scale
  const float* x_scale;    // [T, ceil(H / 128)], of x in e4m3; else null, and x is quantised

  KeptOutputs kept;       // written by passes that keep
  BackwardArgs backward;  // of backward passes (kBackward)
  GroupArgs group;        // of both, among several ranks
  BackwardOptions options;
  uint32_t strict;      // 1: a row for which no choice can be made is an error
  const char* reasons;  // [R][kReasonBytes] in the own heap (protocol/refusal.h); null: no rank can refuse a call
  // Of backward passes of a shared expert, beside `options`: where the matrix would begin in whose second half the ups' gradients
  // lie, which is options.shared_gate_up_gradient where gates and ups have one. (Last, so that other kernels are the same.)
  uint8_t* shared_ups_gradient;

  // What a backward pass has in the places of x, out, and the maps of intermediate rows and of tokens: dY, dX, the rows of dZ,
  // and those of the logits' gradients.
  FLASHMOE_HD const uint8_t* dy() const { return x; }
  FLASHMOE_HD uint64_t dy_row_bytes() const { return x_row_bytes; }
  FLASHMOE_HD uint8_t* dx() const { return out; }
  FLASHMOE_HD const TensorMap& logit_gradient_rows() const { return tokens; }
};
static_assert(sizeof(KernelArgs) <= 4096);

}  // namespace flashmoe::gpu

// What the host hands to the kernels, and what they have in common.
#pragma once

#include "flashmoe/gpu/decode_memory.h"
#include "flashmoe/protocol/call.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe::gpu {

inline constexpr uint32_t kMaxRanks = 32;  // of a group of GPUs: blocks have tables of them

inline constexpr uint32_t kNoTile = ~0u;    // of a task that is only rehearsed (sm90/roles/look_up.cuh)
inline constexpr uint32_t kNoExpert = ~0u;  // of a traced span that is no product

// The fused kernel's thread block.
inline constexpr uint32_t kWarps = 12;
inline constexpr uint32_t kThreads = kWarps * 32;
inline constexpr uint32_t kSharedBytes = 227 * 1024;  // the most a block may have

// The most experts for which a kernel has room.
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

// A page of host memory in which the host asks the device for its time. See answer_the_time() (gpu/tracer.cuh).
struct ClockPage {
  uint64_t asked, answered;  // how many times so far
  uint64_t device_ns;        // the last answer
};

// Weights for loads: expert e's row r is at data + e * expert_bytes + r * row_bytes. All three are multiples of 16.
struct WeightRows {
  const uint8_t* data;
  uint64_t row_bytes, expert_bytes;

  FLASHMOE_HD const uint8_t* row(uint32_t e, uint32_t r) const { return data + e * expert_bytes + r * row_bytes; }
};

// How a router computes a token's experts and their weights from logits; see LayerSpec.
struct RouterRule {
  uint32_t sigmoid;  // 1: scores are sigmoids; 0: a softmax over all E
  uint32_t renormalize;
  uint32_t rounds_logits;  // logits are rounded to the type of x before anything is computed from them
  uint32_t groups, top_groups;
  float routed_scale;
  const float* choice_bias;  // [E]; may be null

  // Whether experts are chosen by scores. Otherwise they are chosen by logits, which have the same order as the scores,
  // and of which float32 tells more apart.
  FLASHMOE_HD bool by_scores() const { return choice_bias != nullptr || groups > 1; }
  // Whether the rule is only a softmax and its K largest values, as in most models.
  FLASHMOE_HD bool plain() const { return sigmoid == 0 && !by_scores(); }
};

// The numbers of the clamped SwiGLU: min(g, limit) sigmoid(alpha min(g, limit)) (clamp(u, -limit, limit) + up_offset)
struct ClampedShape {
  float limit, alpha, up_offset;
};

// Where the gate and the up of an intermediate column lie among an expert's 2I. From one column's gate to the next
// column's it is `step`, and from a gate to its up `up`.
struct GatedRows {
  uint32_t step, up;
};

// Scales of weights: fp32 for e4m3; for mxfp4 e8m0, a byte each. The scale of expert e's block b of rows
// (spec/encoding.h) and block k of K is data[e * expert + b * row + k * step]. If each row has a scale, that of row r
// is data[e * expert + r].
struct ScaleTable {
  const void* data;
  uint32_t expert, row, step;
  uint32_t blocks;  // how many blocks of rows an expert, or a slice, has
  uint32_t up;      // from a gate's scale to its up's, if all ups lie behind all gates

  template <class Scale>
  FLASHMOE_HD const Scale* as() const {
    return static_cast<const Scale*>(data);
  }
};

// What a forward pass keeps for its gradients. C is the number of a token's choices, where each slice of an expert
// and each slice of the shared expert counts as one. Among several ranks, the rows of pre-activations are rows of
// tiles, 256 for each tile, while the call runs. gpu/kept_rows.cuh then moves them to the order in which the backward
// pass reads them: by expert, source and token (CanonicalRow).
struct KeptOutputs {
  uint8_t* pre_activations;  // [T C, I, 2], gate and up side by side, or [T C, I]; row number token * C + choice
  int32_t* ids;              // [T, top_k] chosen experts, ~expert where the choice was dropped
  float* weights;            // [T, top_k]
};

// Elements from one token's gradients of logits to the next token's. The copy engine needs rows at multiples of 16
// bytes.
FLASHMOE_HD constexpr uint32_t logit_pitch(uint32_t experts) {
  return align_up(experts, 8u);
}

// What a backward pass reads and writes in addition. Its dY and dX are in the places of x and out (KernelArgs::dy).
// Rows of tiles ([tiles * 256, ..]) are 256 rows for each tile, tile after tile, in the order of intermediate rows.
struct BackwardArgs {
  KeptOutputs kept;  // read
  const uint8_t* x;  // [T, H], rows x_row_bytes apart
  uint64_t x_row_bytes;
  uint8_t* dz;           // [tiles * 256, 2I or I] gradients of pre-activations, in the order of gate_up_proj's rows
  uint8_t* weighted;     // [tiles * 256, I] activations times the combine weight
  TensorMap dz_columns;  // maps of these two as operands whose rows are contracted; a box is a span
  TensorMap weighted_columns;
  uint32_t z_columns;              // 2I or I
  float* weight_parts;             // [2 * blocks of columns][T C] parts of the combine weights' gradients
  float* combine_gradients;        // [T, top_k], written: the sums of these parts; null: not wanted
  uint8_t* gate_up_gradient;       // written, contiguous, of gate_up_proj; null: not wanted
  uint8_t* down_gradient;          // likewise, of down_proj,
  uint8_t* gate_up_bias_gradient;  // and of the biases
  uint8_t* down_bias_gradient;
  uint32_t accumulates;  // 1: these four gradients are float32, and the pass adds to them
  // What the gradients of a router need (gpu/router_backward.cuh, sm90/gradients/router.cuh). The router's matrix is
  // KernelArgs::router.
  const float* logits;                 // [T, E], those from which scores were computed
  const float* given_logit_gradients;  // [T, E]: gradients of logits that the caller adds; may be null
  const double* weights_by_bias;       // [T, top_k]: what down_bias adds to the combine weights' gradients; may be null
  uint8_t* logit_gradients;            // [T, logit_pitch(E)], written, of x's type; null: no router
  TensorMap logit_columns;             // maps of these and of x as operands whose rows are contracted
  TensorMap x_columns;
  uint8_t* router_gradient;  // [E, H], written, or with `accumulates` added to; null: not wanted
};

// A forward pass among several ranks keeps as many rows as it has received, and this number is known only when the
// pass is over. So two small kernels after it (gpu/kept_rows.cuh) count the rows, and move them to the memory that is
// kept, if there is room for them. R is the number of ranks.
struct RankRows {
  uint32_t tokens;    // how many tokens a rank has
  uint32_t received;  // how many of these tokens have a row here
  uint32_t rows;      // how many rows of pre-activations there are here for these tokens
};
struct CountedRows {
  RankRows* told;     // [R], in mapped host memory
  RankRows* ranks;    // [R], the same in device memory
  uint32_t* rows;     // [R, El] how many rows each expert has of each rank's tokens
  uint32_t* numbers;  // [R, max_tokens] the number of a token's row among its rank's received rows; kNone: no row
};
// For how many rows the kept memory has room (its layout follows from this); or for how many a call needs room.
struct KeptRoom {
  uint32_t rows;      // of pre-activations
  uint32_t received;  // of other ranks' tokens; 0 if these rows are not kept, but dispatched again
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
  uint32_t* numbers;         // [R, room.pitch] the number of a token's row among all received rows; kNone: no row
  uint32_t* first_row;       // [El + 1] number of each expert's first row; [El + shared]: each slice is an expert
  KeptRoom room;             // of this memory; a call that needs more is not moved
  uint32_t blocks;           // this many thread blocks, the first ones, move received rows; the others move tiles
};

// What passes that train need in addition among several ranks. Rows of other ranks' tokens are "received", each once,
// however many experts have the token. Rows of experts are numbered by expert, source and token (CanonicalRow).
struct GroupArgs {
  static constexpr uint32_t kNone = ~0u;
  // Where the row of rank p's token t goes when it is received: to row numbers[p * pitch + t] of `received`. In
  // forward passes, numbers is null, and the row goes to row peer_slot(p) * pitch + t.
  uint8_t* received;
  const uint32_t* numbers;
  uint32_t pitch;
  uint32_t rows, received_rows;  // backward passes: how many rows of experts, and received rows, there are
  // Only backward passes use the rest.
  uint8_t* x;                 // [received_rows, H], beside received_dy(); written if x is dispatched again, else read
  const uint32_t* first_row;  // [El + 1] number of each expert's first row
  // [tiles * 256], written: for an own row its token; for a row of another rank its number among received rows |
  // kRemote.
  uint32_t* gather;
  uint64_t weights_at;     // where in a heap the gradients of its tokens' combine weights are, [T, K] floats
  uint32_t weights_pitch;  // bytes from one token's gradients to the next token's (protocol/gradients.h)
  uint64_t x_behind;       // if x is dispatched again: bytes from a row of dY to its row of x, else 0

  FLASHMOE_HD const uint8_t* received_dy() const { return received; }
};

// What backward passes of layers with some options need in addition. (It lies apart from BackwardArgs, behind what
// other layers need, so that kernels of other layers are the same as without it.)
struct BackwardOptions {
  // With weights_on_input, dZ has the combine weight as a factor, and `weighted` does not. If the layer then has
  // gate_up_bias, rows of dZ without the weight lie this many bytes behind dZ; else 0.
  uint64_t plain_behind;
  // Written for a shared expert of width Is. The first two are as gate_up_gradient and down_gradient of BackwardArgs,
  // of shape [2 Is or Is, H] and [H, Is], or transposed. shared_logit_gradients: [T] float32, the gradients of the
  // products of the expert's gate with x. Null: not wanted.
  uint8_t *shared_gate_up_gradient, *shared_down_gradient;
  float* shared_logit_gradients;
};

struct KernelArgs {
  // Its epoch is ignored: the kernel counts calls itself (Control::calls), so that a captured graph can be replayed.
  Call call;
  FewLayout few_layout;  // of the memory, behind the workspace, that only the kernel for a few tokens has

  // Weights as TMA sees them, all 128-byte swizzled, 128 bytes of K by 128 rows a box, zeros outside:
  //   gate_up  5D {H, 8, gated ? 2 : 1, I / 8, El}, box {., 8, gated ? 2 : 1, gated ? 8 : 16, 1}: with a gate, a box
  //            holds 8 gate rows, their 8 up rows, the next 8 gate rows, and so on, so that a thread's accumulators
  //            have both, whether features are down or across
  //   down     5D {I, 8, 1, H / 8, El},  box {., 8, 1, 16, 1}
  //   transposed weights: a box has 64 features by 64 rows along K, and a block loads two boxes for 128 features (fp32,
  //   in a backward pass: boxes of 32 by 32, of which it loads four). Such a box is a span (sm90/geometry.h).
  //     gate_up  5D {I, H, 2, 1, El}; gate and up in turn, or no gate: {2I or I, H, 1, 1, El}; box {64, 64, 1, 1, 1}
  //     down     5D {H, I, 1, 1, El},  box {64, 64, 1, 1, 1}
  //   router   5D {H, E, 1, 1, 1},       box {., gate_features(E), 1, 1, 1}; of a backward pass box {64, 64, 1, 1, 1}
  //   intermediate  2D {I, tiles * 256}, box {., 32}
  //   tokens   2D {H, T},                box {., 32}; x, for the router; backward pass: 2D {E, T}, gradients of logits
  TensorMap gate_up, down, router, intermediate, tokens;
  // The same maps as gate_up and down for the shared expert, with its slices in place of experts. If gates and ups
  // are two matrices, dimension 2 goes from one matrix to the other. In a backward pass, it also goes from gates to
  // ups if these are not in turn.
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
  float* router_logits;        // [T, E], written: the logits from which scores are computed; may be null
  uint32_t topk_ids_64;        // 1: topk_ids are int64
  uint32_t topk_weights_as_x;  // 1: topk_weights are of x's type
  RouterRule rule;
  ClampedShape clamped;
  GatedRows gated, shared_gated;  // of gate_up and of shared_gate_up
  uint32_t few_choices;       // of a token in sm90/decode/alone.cuh: its K experts, and the slices of the shared one
  uint32_t few_parts;         // in sm90/decode/alone.cuh: parts of the intermediate columns, each a task of GEMM1
  uint32_t weights_on_input;  // 1: a row's weight scales its products with gate_up, and not its result
  HostFault* host_fault;      // in mapped host memory: written when the call failed, or a row of it is an error
  uint8_t* trace;             // [blocks] of kTraceBytesPerBlock; null: not traced

  // The scales of the matrices of quantised experts. (In e4m3, the map `intermediate` has a dimension for tiles:
  // 3D {I, 256, tiles}, box {128, 32, 1}. In mxfp4, gate_up and down are maps of bytes: a row of a matrix has
  // H / 2 or I / 2 bytes, and a row of a box has 128.)
  ScaleTable gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale;
  uint32_t scales_by_row;  // 1: each row of weights has a scale
  const float* x_scale;    // [T, ceil(H / 128)], of x in e4m3; else null, and x is quantised

  KeptOutputs kept;  // written by passes that keep
  union {
    BackwardArgs backward;  // of backward passes (kBackward)
    // For sm90/decode/alone.cuh: these maps once more, with boxes of half the rows. (They are here because kernels'
    // arguments have at most 4096 bytes.)
    struct {
      TensorMap gate_up, down, shared_gate_up, shared_down;
    } halved;
  };
  GroupArgs group;  // of passes that keep and of backward passes, among several ranks
  BackwardOptions options;
  uint32_t strict;      // 1: a row for which no choice can be made is an error
  const char* reasons;  // [R][kReasonBytes] in the own heap (protocol/refusal.h); null: no rank can refuse a call
  // Backward passes of a shared expert: the kernel stores the ups' gradients as the second half of a matrix of gates
  // and ups that begins here. If gates and ups are one matrix, this is options.shared_gate_up_gradient. Otherwise no
  // matrix begins here, and only its second half, the ups' matrix, exists. (It comes last, so that other kernels are
  // the same.)
  uint8_t* shared_ups_gradient;

  // What a backward pass has in the places of other passes: dY in that of x, dX in that of out, and the rows of the
  // logits' gradients in that of the map `tokens`. (The map `intermediate` is then of the rows of dZ.)
  FLASHMOE_HD const uint8_t* dy() const { return x; }
  FLASHMOE_HD uint64_t dy_row_bytes() const { return x_row_bytes; }
  FLASHMOE_HD uint8_t* dx() const { return out; }
  FLASHMOE_HD const TensorMap& logit_gradient_rows() const { return tokens; }
};
static_assert(sizeof(KernelArgs) <= 4096);

}  // namespace flashmoe::gpu

// One call of the operator on one rank, as every actor sees it: sizes, placement, memory. Passed to the kernel by
// value. Other code gets the addresses of heap and workspace fields from the accessors of Call.
#pragma once

#include <algorithm>
#include <cmath>

#include "flashmoe/protocol/heap_layout.h"
#include "flashmoe/protocol/order.h"
#include "flashmoe/protocol/platform.h"
#include "flashmoe/spec/enums.h"
#include "flashmoe/spec/layer.h"

namespace flashmoe {

// GShard's capacity, per source rank: ceil(factor * (T * K) / E), computed in this order, which rounds least. If factor
// and tokens are positive, it is at least 1, even if the factor is so small that the computed quotient is 0. (0 would
// mean dropless.)
inline uint32_t expert_capacity(double factor, uint32_t tokens, uint32_t top_k, uint32_t experts) {
  const double capacity = std::ceil(factor * (static_cast<double>(tokens) * top_k) / experts);
  return static_cast<uint32_t>(min_of(factor > 0 && tokens > 0 && capacity < 1 ? 1.0 : capacity, 0x1p31));
}

// The most tokens of a joined call: a late row's word has 16 bits for the token, 16 for the block of columns (LateRow).
inline constexpr uint32_t kMaxJoinedTokens = 1u << 16;

// What is computed.
struct CallShape {
  uint32_t ranks = 1;
  uint32_t tokens = 0, hidden = 0, intermediate = 0;
  // These three numbers count the shared expert, if there is one. Every token of this rank has it as one more choice,
  // behind its K experts. It is the last of all experts, with number E, and the last local expert.
  uint32_t experts = 0, top_k = 0, local_experts = 0;
  // The number of slices of the shared expert, of I columns each; 0: there is no shared expert. GEMM0 computes each
  // slice of a tile like a tile of an expert. GEMM1 sums over all slices at once.
  uint32_t shared = 0;
  // E and K as the gate has them, and the number of slices of each expert. All code after the gate treats a slice as
  // an expert: choice k of expert e becomes choices k * slices + i of experts e * slices + i, with i from 0 to slices
  // - 1 (choose_slices).
  uint32_t gate_experts = 0, gate_top_k = 0, slices = 1;
  uint32_t capacity = 0;  // per expert and source rank; 0: dropless
  ReturnMode return_mode = ReturnMode::kDirect;

  // The three numbers without the shared expert, to which no capacity applies and no other rank sends tokens.
  FLASHMOE_HD uint32_t routed_experts() const { return experts - shared_experts(shared); }
  FLASHMOE_HD uint32_t routed_top_k() const { return top_k - shared_experts(shared); }
  FLASHMOE_HD uint32_t routed_local_experts() const { return local_experts - shared_experts(shared); }
  FLASHMOE_HD bool is_shared(uint32_t local_expert) const { return local_expert >= routed_local_experts(); }
  // The number of elements along an axis of matrices, which is kHidden or kIntermediate.
  uint32_t extent(Axis axis) const { return axis == Axis::kHidden ? hidden : intermediate; }
};

// How the call is cut into token blocks, tiles, tasks and return groups, and in which order tasks are taken.
struct CallPolicy {
  uint32_t log2_block = 7;  // a token block has 2^log2_block tokens
  uint32_t tile_rows = 128;
  uint32_t columns[kProducts] = {};  // how many blocks of columns each product has
  // Return group g has blocks of columns [group_first[g], group_first[g + 1]) of the product whose results return.
  uint32_t groups = 1;
  uint16_t group_first[kMaxGroups + 1] = {0, 1};
  // The number of keepers (actors/keeper.h); 0 unless passes train among several GPUs.
  uint16_t keepers = 0;
  // The number of clusters. Two thread blocks of a GPU, or one thread of a CPU, are a cluster, and take tasks together.
  uint32_t clusters = 1;
  // 1: a joined call. A token's rows are added as they are computed, and there is no Combine (actors/joiner.h). Only
  // for a rank alone, with kDirect, without a capacity, and with at most two choices for each token.
  uint32_t joined = 0;
  OrderPolicy order;
  uint64_t timeout_ns = 0;  // 0: none
};

// In CallPlacement::by_owner: an expert of another rank of which this rank sends that rank no tokens, because it
// sends them to another copy of the expert.
inline constexpr uint32_t kElsewhere = 0xffffffffu;

// Where the experts are, as this rank looks it up. This rank sends all its tokens of an expert to one rank, the
// owner, even if other ranks have copies of the expert too. Other ranks may have another owner for it. This rank's
// shared expert is among the experts. (Every rank has a shared expert of its own. The shared experts of other ranks
// are in no table.)
struct CallPlacement {
  const uint32_t* owner = nullptr;  // [experts] rank to which this one sends the expert's tokens
  const uint32_t* by_owner =
      nullptr;  // [owner_base[R]] rank by rank, its local experts ascending: the expert's number, or kElsewhere
  const uint32_t* owner_base = nullptr;  // [R + 1] where each rank's experts begin in by_owner
};

// Where everything lies; Call's accessors add the coordinates.
struct CallMemory {
  uint8_t* const* heaps = nullptr;  // [R] every rank's symmetric heap, as mapped here
  uint8_t* work = nullptr;
  HeapLayout heap_layout;
  WorkLayout work_layout;
  uint64_t put_offset[static_cast<uint32_t>(PutField::kCount)] = {};  // behind the workspace
  uint32_t max_blocks = 0;
  uint32_t slice_tiles = 0;  // see Call::inner_tile
  // Bytes of a token's row, of an intermediate row, and of a staged row or return row (spec/rows.h).
  uint32_t token_row_bytes = 0, intermediate_row_bytes = 0, return_row_bytes = 0;
  uint64_t queue_mask = 0, list_mask = 0;
};

// The CallMemory of a rank whose memory is made for these limits. Leaves unset the addresses and the bytes of a
// layer's rows.
inline CallMemory make_call_memory(const Limits& limits) {
  CallMemory m;
  m.heap_layout = make_heap_layout(limits);
  m.work_layout = make_work_layout(limits);
  const PutLayout puts = make_put_layout(limits);
  std::copy(std::begin(puts.offset), std::end(puts.offset), m.put_offset);
  m.max_blocks = limits.max_blocks();
  m.slice_tiles = static_cast<uint32_t>(limits.max_tiles());
  m.queue_mask = limits.queue_capacity() - 1;
  m.list_mask = limits.list_capacity() - 1;
  return m;
}

struct Machines;  // protocol/machines.h

struct Call {
  Epoch epoch = 0;
  uint32_t rank = 0;
  CallShape shape;
  CallPolicy policy;
  CallConfig config;  // what the ranks must agree on
  CallPlacement placement;
  CallMemory memory;
  const Machines* machines = nullptr;  // null unless ranks may be on several machines (SpansMachines)

  // Sets the sizes of the layer and of its rows. The caller sets what depends on return mode, placement and tokens.
  void set_layer(const LayerSpec& layer) {
    shape.hidden = layer.hidden;
    shape.intermediate = layer.intermediate;
    shape.gate_experts = layer.experts;
    shape.gate_top_k = layer.top_k;
    shape.slices = layer.slices;
    shape.shared = layer.shared;
    shape.experts = layer.experts * layer.slices + shared_experts(layer.shared);
    shape.top_k = layer.top_k * layer.slices + shared_experts(layer.shared);
    memory.token_row_bytes = layer.token_row_bytes();
    memory.intermediate_row_bytes = layer.intermediate_row_bytes();
    memory.return_row_bytes = layer.return_row_bytes();
  }
  // Cuts the results of product n into blocks of each[n] columns, for every n.
  void cut_columns(const std::array<uint32_t, kProducts>& each) {
    for (uint32_t n = 0; n < kProducts; ++n) policy.columns[n] = ceil_div(shape.extent(kProgram[n].columns), each[n]);
  }

  FLASHMOE_HD uint32_t block_tokens() const { return 1u << policy.log2_block; }
  FLASHMOE_HD uint32_t blocks() const { return (shape.tokens + block_tokens() - 1) >> policy.log2_block; }
  FLASHMOE_HD uint32_t tokens_in_block(uint32_t b) const {
    return min_of(block_tokens(), shape.tokens - (b << policy.log2_block));
  }
  FLASHMOE_HD uint32_t parity() const { return static_cast<uint32_t>(epoch & 1); }
  FLASHMOE_HD uint32_t group_columns(uint32_t g) const { return policy.group_first[g + 1] - policy.group_first[g]; }
  FLASHMOE_HD uint32_t group_of(uint32_t column) const {
    uint32_t g = 0;
    while (column >= policy.group_first[g + 1]) ++g;
    return g;
  }
  FLASHMOE_HD bool reduced() const { return shape.return_mode == ReturnMode::kReduced; }
  FLASHMOE_HD uint32_t owned(uint32_t q) const { return placement.owner_base[q + 1] - placement.owner_base[q]; }
  // The number of token blocks of rank p, whose call signal must be here. (For this rank itself: blocks().)
  FLASHMOE_HD uint32_t blocks_of(uint32_t p) const {
    const uint32_t payload = Signal::payload(*call_signal(rank, p));
    return ceil_div(CallPayload::tokens(payload), 1u << CallPayload::log2_block(payload));
  }
  FLASHMOE_HD uint32_t tokens_of(uint32_t p) const {
    return CallPayload::tokens(Signal::payload(*call_signal(rank, p)));
  }
  // The first token of packet (p, b), which must be here, and how many tokens its token block has.
  FLASHMOE_HD uint32_t packet_first_token(uint32_t p, uint32_t b) const {
    return b << CallPayload::log2_block(Signal::payload(*call_signal(rank, p)));
  }
  FLASHMOE_HD uint32_t packet_tokens(uint32_t p, uint32_t b) const {
    const uint32_t payload = Signal::payload(*call_signal(rank, p));
    const uint32_t first = b << CallPayload::log2_block(payload);
    return min_of(1u << CallPayload::log2_block(payload), CallPayload::tokens(payload) - first);
  }
  // The number of entries of packet (p, b), which must be here.
  FLASHMOE_HD uint32_t packet_size(uint32_t p, uint32_t b) const { return Signal::payload(*packet_signal(rank, p, b)); }

  // ---- symmetric heap; `at` is the rank in whose heap the field lies -------------------------------------------
  template <class T>
  FLASHMOE_HD T* heap(uint32_t at, HeapField f, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0, uint64_t m = 0) const {
    return memory.heap_layout.at<T>(memory.heaps[at], f, i, j, k, m);
  }
  FLASHMOE_HD Status* status(uint32_t at) const { return heap<Status>(at, HeapField::kStatus); }
  FLASHMOE_HD FaultRecord* fault(uint32_t at, uint32_t by) const {
    return heap<FaultRecord>(at, HeapField::kFault, by);
  }
  FLASHMOE_HD CallConfig* call_config(uint32_t at, uint32_t p) const {
    return heap<CallConfig>(at, HeapField::kCallConfig, parity(), p);
  }
  FLASHMOE_HD uint64_t* call_signal(uint32_t at, uint32_t p) const {
    return heap<uint64_t>(at, HeapField::kCallSignal, parity(), p);
  }
  FLASHMOE_HD uint64_t* packet_signal(uint32_t at, uint32_t p, uint32_t b) const {
    return heap<uint64_t>(at, HeapField::kPacketSignal, parity(), p, b);
  }
  FLASHMOE_HD uint16_t* packet_offsets(uint32_t at, uint32_t p, uint32_t b) const {
    return heap<uint16_t>(at, HeapField::kPacketOffsets, parity(), p, b);
  }
  FLASHMOE_HD uint16_t* packet_counts(uint32_t at, uint32_t p, uint32_t first_token) const {
    return heap<uint16_t>(at, HeapField::kPacketCounts, parity(), p, first_token);
  }
  FLASHMOE_HD Entry* packet_entries(uint32_t at, uint32_t p, uint32_t first_token) const {
    return heap<Entry>(at, HeapField::kPacketEntries, parity(), p, first_token);
  }
  // Where this rank builds its packets for rank q: the own packet in its own heap, where formers read it, packets for
  // other ranks in the outbox.
  FLASHMOE_HD uint16_t* out_offsets(uint32_t q, uint32_t b) const {
    if (q == rank) return packet_offsets(q, rank, b);
    return workspace<uint16_t>(WorkField::kOutOffsets, q, b);
  }
  FLASHMOE_HD Entry* out_entries(uint32_t q, uint32_t first_token) const {
    if (q == rank) return packet_entries(q, rank, first_token);
    return workspace<Entry>(WorkField::kOutEntries, q, first_token);
  }
  FLASHMOE_HD uint16_t* out_counts(uint32_t q, uint32_t first_token) const {
    if (q == rank) return packet_counts(q, rank, first_token);
    return workspace<uint16_t>(WorkField::kOutCounts, q, first_token);
  }
  FLASHMOE_HD uint32_t* out_sent(uint32_t q, uint32_t b) const {
    return workspace<uint32_t>(WorkField::kOutSent, q, b);
  }
  FLASHMOE_HD uint64_t* return_signal(uint32_t at, uint32_t q, uint32_t g) const {
    return heap<uint64_t>(at, HeapField::kReturnSignal, q, g);
  }
  // Row of `token` of rank p as dispatched to rank `at` (p != at).
  FLASHMOE_HD uint8_t* dispatched_row(uint32_t at, uint32_t p, uint32_t token) const {
    return heap<uint8_t>(at, HeapField::kRows, peer_slot(p, at, shape.ranks), token);
  }
  FLASHMOE_HD uint8_t* return_row(uint32_t home, uint32_t token, uint32_t slot) const {
    return heap<uint8_t>(home, HeapField::kReturnRows, token, slot);
  }

  // ---- workspace -------------------------------------------------------------------------------------------------
  template <class T>
  FLASHMOE_HD T* workspace(WorkField f, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0) const {
    return memory.work_layout.at<T>(memory.work, f, i, j, k);
  }
  FLASHMOE_HD Control* control() const { return workspace<Control>(WorkField::kControl); }
  FLASHMOE_HD uint64_t* queue_slot(uint64_t ticket) const {
    return workspace<uint64_t>(WorkField::kQueue, ticket & memory.queue_mask);
  }
  FLASHMOE_HD uint64_t* list_slot(uint64_t item) const {
    return workspace<uint64_t>(WorkField::kReadyList, item & memory.list_mask);
  }
  FLASHMOE_HD Tile* tile(uint32_t t) const { return workspace<Tile>(WorkField::kTiles, t); }
  FLASHMOE_HD Row* tile_row(uint32_t t, uint32_t row) const { return workspace<Row>(WorkField::kTileRows, t, row); }
  FLASHMOE_HD Segment* segments(uint32_t t) const { return workspace<Segment>(WorkField::kSegments, t); }
  // How many tiles a local expert has, once all are formed, and the numbers of these tiles. (The count is written
  // only in backward passes, and where passes train among several ranks.)
  FLASHMOE_HD uint32_t* expert_tile_count(uint32_t l) const {
    return workspace<uint32_t>(WorkField::kExpertTileCounts, l);
  }
  FLASHMOE_HD uint32_t* expert_tiles(uint32_t l) const { return workspace<uint32_t>(WorkField::kExpertTiles, l); }
  FLASHMOE_HD uint64_t* pending(uint32_t p, uint32_t slot) const {
    return workspace<uint64_t>(WorkField::kPending, p, slot);
  }
  FLASHMOE_HD uint32_t* reduce_done(uint32_t p, uint32_t g) const {
    return workspace<uint32_t>(WorkField::kReduceDone, p, g);
  }
  FLASHMOE_HD uint64_t* reduce_signal(uint32_t p, uint32_t g) const {
    return workspace<uint64_t>(WorkField::kReduceSignal, p, g);
  }
  FLASHMOE_HD int32_t* routing(uint32_t token) const { return workspace<int32_t>(WorkField::kRouting, token); }
  FLASHMOE_HD float* weights(uint32_t token) const { return workspace<float>(WorkField::kWeights, token); }
  FLASHMOE_HD uint32_t* capacity_prefix(uint32_t b) const { return workspace<uint32_t>(WorkField::kPrefix, b); }
  FLASHMOE_HD uint64_t* capacity_signal(uint32_t b) const { return workspace<uint64_t>(WorkField::kPrefixSignal, b); }
  FLASHMOE_HD uint32_t* joint_word(uint32_t column, uint32_t token) const {
    return workspace<uint32_t>(WorkField::kJoints, column, token);
  }
  // The number under which intermediate_row() has the rows of a slice of tile t: t itself for slice 0, so for all
  // tiles of other experts than the shared one. The rows of later slices lie behind those of all tiles: first the
  // later slices of the shared expert's tile 0, then those of its tile 1, and so on. Its tiles have this rank's
  // tokens in order, so the first token of a tile gives the number of the tile among them.
  FLASHMOE_HD uint32_t inner_tile(uint32_t t, uint32_t first_token, uint32_t slice) const {
    if (slice == 0) return t;
    return memory.slice_tiles + first_token / policy.tile_rows * (shape.shared - 1) + slice - 1;
  }
  FLASHMOE_HD uint8_t* intermediate_row(uint32_t t, uint32_t row) const {
    return workspace<uint8_t>(WorkField::kIntermediate, t, row);
  }
  FLASHMOE_HD uint8_t* staged_row(uint32_t p, uint32_t token, uint32_t ordinal) const {
    return workspace<uint8_t>(WorkField::kStaging, p, token, ordinal);
  }

  // ---- behind the workspace, where peers are not mapped or rows are quantised (PutField) -------------------------
  template <class T>
  FLASHMOE_HD T* for_puts(PutField f) const {
    return reinterpret_cast<T*>(memory.work + memory.work_layout.bytes + memory.put_offset[static_cast<uint32_t>(f)]);
  }
  FLASHMOE_HD uint64_t* returns_ready(uint32_t p) const { return for_puts<uint64_t>(PutField::kReturnsReady) + p; }
  FLASHMOE_HD uint32_t* returns_sent(uint32_t p) const { return for_puts<uint32_t>(PutField::kReturnsSent) + p; }
  // The row of an own token as other ranks get it. These rows are as far apart as dispatched rows.
  FLASHMOE_HD uint8_t* out_row(uint32_t token) const {
    return for_puts<uint8_t>(PutField::kRows) +
           token * memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kRows)][1];
  }
};

// The word of this rank's call signal.
FLASHMOE_HD uint64_t call_word(const Call& c) {
  return Signal::make(c.epoch, CallPayload::make(c.shape.tokens, c.policy.log2_block));
}

}  // namespace flashmoe

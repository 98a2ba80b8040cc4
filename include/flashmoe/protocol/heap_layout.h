// Where everything lies in a rank's memory. There is one table for each region of memory. From it the host takes sizes
// and allocates, the device takes addresses, the memory planner takes its lines, and the test of conflict-freedom takes
// coordinates.
#pragma once

#include <array>

#include "flashmoe/protocol/base.h"
#include "flashmoe/protocol/signal.h"
#include "flashmoe/protocol/status.h"
#include "flashmoe/protocol/task.h"
#include "flashmoe/spec/layer.h"
#include "flashmoe/spec/rows.h"

namespace flashmoe {

inline constexpr uint32_t kMinTokenBlock = 8;
inline constexpr uint32_t kMaxTokenBlock = 128;
// The columns of results are returned in at most this many groups, each with a signal of its own.
inline constexpr uint32_t kMaxGroups = 8;

// How many lists of ready tiles the scheduler keeps for product n. The product whose results go home has two; tiles
// of the first list go before those of the second (OrderPolicy::gemm1_lists). Other products have one list.
inline constexpr uint32_t kMaxGemm1Lists = 2;
FLASHMOE_HD constexpr uint32_t ready_lists(uint32_t n) {
  return n == kReturning ? kMaxGemm1Lists : 1;
}
// The number of product n's first list. Its second list, if it has one, has the next number.
FLASHMOE_HD constexpr uint32_t first_list(uint32_t n) {
  uint32_t lists = 0;
  for (uint32_t m = 0; m < n; ++m) lists += ready_lists(m);
  return lists;
}
inline constexpr uint32_t kReadyLists = first_list(kProducts);

// An array that has the value v for every product.
constexpr std::array<uint32_t, kProducts> each_product(uint32_t v) {
  std::array<uint32_t, kProducts> all{};
  for (uint32_t& x : all) x = v;
  return all;
}

// The largest call that a context serves. Equal on every rank of a group, except where noted.
struct Limits {
  uint32_t ranks = 1;
  uint32_t max_tokens = 0;         // per rank
  uint32_t hidden = 0;             // H
  uint32_t experts = 0;            // E
  uint32_t max_local_experts = 0;  // the most experts that any rank holds
  uint32_t top_k = 0;              // K
  uint32_t shared = 0;        // slices of a rank's shared expert, which is for its own tokens only; 0: there is none
  uint32_t x_bytes = 0;       // of an element of a dispatched row; 1: rows are quantised (spec/rows.h)
  uint32_t return_bytes = 0;  // of an element of a row on its way home
  uint32_t return_slots = 0;  // return rows per token: K (direct), R (reduced), the larger where both may occur
  uint32_t capacity = 0;      // the most rows of one rank that an expert keeps; more are dropped. 0: dropless
  uint32_t redispatch = 0;    // 1: room for rows of x that backward passes send again (gradients.h)
  // For groups on several machines (machines.h): the most ranks of a machine, the most sources for which one rank is
  // the relay, and a hash of which rank is on which machine. All three are 0 if all ranks are on one machine.
  uint32_t machine_ranks = 0, relayed = 0, spread = 0;
  // These may differ from rank to rank, because they size only the workspace, which no peer addresses. There are two
  // exceptions: rdma is equal on every rank, and so is staging where there are relays, because it sizes their fields.
  uint32_t intermediate = 0;        // I
  uint32_t intermediate_bytes = 0;  // of an element of an intermediate row
  uint32_t staging = 0;             // 1 if `reduced` may occur
  uint32_t rdma = 0;                // 1 if peers are reached only by puts (GPU; equal on every rank)
  uint32_t tile_rows = 128;
  std::array<uint32_t, kProducts> columns_per_task = each_product(256);
  uint32_t processors = 1;

  FLASHMOE_HD constexpr uint32_t max_blocks() const { return ceil_div(max_of(max_tokens, 1u), kMinTokenBlock); }
  // These three counts include the shared expert.
  FLASHMOE_HD constexpr uint32_t all_experts() const { return experts + shared_experts(shared); }
  FLASHMOE_HD constexpr uint32_t all_local_experts() const { return max_local_experts + shared_experts(shared); }
  FLASHMOE_HD constexpr uint32_t choices_per_token() const { return top_k + shared_experts(shared); }
  // The most entries that a token has on one rank. (No two choices of a token are of the same expert.)
  FLASHMOE_HD constexpr uint32_t entries_per_token() const {
    return min_of(top_k, max_local_experts) + shared_experts(shared);
  }
  // The most entries that a token of another machine has on all ranks of one machine together. The shared expert does
  // not count, because each rank computes it only for its own tokens.
  FLASHMOE_HD constexpr uint32_t entries_on_machine() const {
    return static_cast<uint32_t>(min_of<uint64_t>(top_k, uint64_t{machine_ranks} * max_local_experts));
  }
  // The most rows that one rank's tokens have with the experts of one rank, without the shared expert. With a
  // capacity C they are at most El * C. A call with other sizes than these limits may have a larger C; Python refuses
  // it if it may have more rows than this function says (calls/arguments.py).
  FLASHMOE_HD constexpr uint64_t rows_of_rank() const {
    const uint64_t dropless = uint64_t{max_tokens} * min_of(top_k, max_local_experts);
    return capacity == 0 ? dropless : min_of(dropless, uint64_t{max_local_experts} * capacity);
  }
  FLASHMOE_HD constexpr uint64_t max_rows() const {
    return ranks * rows_of_rank() + uint64_t{max_tokens} * shared_experts(shared);
  }
  // At most one tile of an expert is not full.
  FLASHMOE_HD constexpr uint64_t max_tiles() const {
    return max_rows() / tile_rows + min_of<uint64_t>(all_local_experts(), max_rows());
  }
  // The number of slices of all tiles of the shared expert together, without the first slice of each tile.
  FLASHMOE_HD constexpr uint64_t max_later_slices() const {
    return shared == 0 ? 0 : uint64_t{shared - 1} * ceil_div(max_tokens, tile_rows);
  }
  // An expert has at most one row for each token.
  FLASHMOE_HD constexpr uint64_t max_tiles_per_expert() const {
    return min_of(uint64_t{ranks} * max_tokens, max_rows()) / tile_rows + 1;
  }
  // The number of blocks of columns of product n.
  constexpr uint32_t columns(uint32_t n) const {
    const uint32_t all = kProgram[n].columns == Axis::kHidden ? hidden : intermediate;
    return ceil_div(max_of(all, 1u), columns_per_task[n]);
  }
  constexpr uint64_t tasks_of_tile() const {
    uint64_t tasks = 0;
    for (uint32_t n = 0; n < kProducts; ++n) tasks += columns(n);
    return tasks;
  }
  // The most tiles that a product's list of ready tiles may have; each slice of a tile counts as a tile.
  constexpr uint64_t max_ready() const { return max_tiles() + max_later_slices(); }
  // The number of ranks for which the outbox has room for packets.
  FLASHMOE_HD constexpr uint64_t outboxes() const { return ranks > 1 ? ranks : 0; }
  // The size of the ready list. A call pushes an item for each product of each tile, and for each later slice of a
  // tile; and with kFormed at most one item for each local expert.
  constexpr uint64_t list_capacity() const {
    return next_power_of_two(kProducts * max_tiles() + max_later_slices() + uint64_t{all_local_experts()} + 1);
  }
  constexpr uint64_t queue_capacity() const {
    return next_power_of_two(max_tiles() * tasks_of_tile() + max_later_slices() * columns(kFirst) + processors + 1);
  }
};

// Which rank writes an element of a heap's field. The element's coordinates tell it.
enum class Writer : uint32_t {
  kSelf,    // only the rank whose heap it is
  kRank0,   // the rank that the first coordinate names
  kRank1,   // the rank that the second coordinate names
  kPeer0,   // first coordinate is peer_slot(writer, home)
  kReturn,  // coordinate (token, slot): `reduced`: rank slot; `direct`: owner of the expert of (token, k = slot)
};

struct FieldShape {
  uint64_t dim[4];
  uint32_t elem_bytes;
};

enum class HeapField : uint32_t {
  kStatus,
  kFault,
  kCallConfig,
  kCallSignal,
  kPacketSignal,
  kPacketOffsets,
  kPacketCounts,
  kPacketEntries,
  kReturnSignal,
  kRows,
  kReturnRows,
  kCount
};

enum class WorkField : uint32_t {
  kControl,
  kQueue,
  kReadyList,
  kTiles,
  kTileRows,
  kSegments,
  kPending,
  kReduceDone,
  kReduceSignal,
  kRouting,
  kWeights,
  kPrefix,
  kPrefixSignal,
  kExpertTiles,
  kExpertTileCounts,
  kReadyTiles,
  kJoints,
  kOutOffsets,
  kOutCounts,
  kOutEntries,
  kOutSent,
  kIntermediate,
  kStaging,
  kCount
};

// Fields that lie behind the workspace if peers are reached only by puts, or if rows are quantised. They have a table
// of their own, because the layouts of the two enums above are in every kernel's arguments.
enum class PutField : uint32_t { kReturnsReady, kReturnsSent, kRows, kCount };

template <class Field>
struct FieldSpec {
  Field field;
  const char* name;
  Writer writer;
  FieldShape (*shape)(const Limits&);
  const char* why;
};

// Bytes from one row to the next. Each row begins at a multiple of 16 bytes, as bulk copies need.
FLASHMOE_HD constexpr uint64_t row_pitch(uint32_t elements, uint32_t elem_bytes) {
  return align_up<uint64_t>(row_bytes(elements, elem_bytes), kRowAlign);
}

inline constexpr FieldSpec<HeapField> kHeapTable[] = {
    {HeapField::kStatus, "status", Writer::kSelf,
     [](const Limits&) { return FieldShape{{1, 1, 1, 1}, sizeof(Status)}; },
     "epoch entered, heartbeat and progress, which peers read when a wait is about to expire"},
    {HeapField::kFault, "fault", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks, 1, 1, 1}, sizeof(FaultRecord)}; }, "what rank p found wrong"},
    {HeapField::kCallConfig, "call_config", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, 1, 1}, sizeof(CallConfig)}; },
     "[parity][p] what rank p believes the call to be"},
    {HeapField::kCallSignal, "call_signal", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, 1, 1}, 8}; },
     "[parity][p] rank p has begun the call, with so many tokens"},
    {HeapField::kPacketSignal, "packet_signal", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, l.max_blocks(), 1}, 8}; },
     "[parity][p][b] the packet of token block b is complete, with so many entries"},
    {HeapField::kPacketOffsets, "packet_offsets", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, l.max_blocks(), l.all_local_experts() + 1}, 2}; },
     "[parity][p][b][El+1] which entries belong to which local expert"},
    {HeapField::kPacketCounts, "packet_counts", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, l.max_tokens, 1}, 2}; },
     "[parity][p][token] entries of the token here (0: none), for Reduce"},
    {HeapField::kPacketEntries, "packet_entries", Writer::kRank1,
     [](const Limits& l) { return FieldShape{{2, l.ranks, l.max_tokens, l.entries_per_token()}, sizeof(Entry)}; },
     "[parity][p][first token of b ...] the entries of packet (p, b), dense from its first token's place"},
    {HeapField::kReturnSignal, "return_signal", Writer::kRank0,
     [](const Limits& l) { return FieldShape{{l.ranks, kMaxGroups, 1, 1}, 8}; },
     "[q][g] rank q has returned the columns of group g of all it owes"},
    {HeapField::kRows, "rows", Writer::kPeer0,
     [](const Limits& l) { return FieldShape{{l.ranks - 1, l.max_tokens, row_pitch(l.hidden, l.x_bytes), 1}, 1}; },
     "[peer][token][H] dispatched token rows; each crosses once, own rows are read from the input"},
    {HeapField::kReturnRows, "return_rows", Writer::kReturn,
     [](const Limits& l) {
       return FieldShape{{l.max_tokens, l.return_slots, row_pitch(l.hidden, l.return_bytes), 1}, 1};
     },
     "[token][slot][H] weighted expert rows (direct, slot = k) or per-rank sums (reduced, slot = q)"},
};

inline constexpr FieldSpec<WorkField> kWorkTable[] = {
    {WorkField::kControl, "control", Writer::kSelf,
     [](const Limits&) { return FieldShape{{1, 1, 1, 1}, sizeof(Control)}; }, "queue ends, abort word, fault claim"},
    {WorkField::kQueue, "queue", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.queue_capacity(), 1, 1, 1}, 8}; },
     "ready queue: a slot for every task a call can have, and for a stop word per cluster"},
    {WorkField::kReadyList, "ready_list", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.list_capacity(), 1, 1, 1}, 8}; },
     "tiles that formers and retiring processors made ready"},
    {WorkField::kTiles, "tiles", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_tiles(), 1, 1, 1}, sizeof(Tile)}; }, "tile descriptors"},
    {WorkField::kTileRows, "tile_rows", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_tiles(), l.tile_rows, 1, 1}, sizeof(Row)}; },
     "[tile][row] whose row it is"},
    {WorkField::kSegments, "segments", Writer::kSelf,
     [](const Limits& l) {
       return FieldShape{{l.max_tiles(), min_of<uint64_t>(l.tile_rows, uint64_t{l.ranks} * l.max_blocks()), 1, 1},
                         sizeof(Segment)};
     },
     "[tile][i] which ranks a tile's rows came from"},
    {WorkField::kPending, "pending", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.ranks, kMaxGroups, 1, 1}, 8}; },
     "[p][g] rows of rank p still to compute, see Pending"},
    {WorkField::kReduceDone, "reduce_done", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.staging * l.ranks, kMaxGroups, 1, 1}, 4}; },
     "[p][g] pieces of group g reduced and returned"},
    {WorkField::kReduceSignal, "reduce_signal", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{uint64_t{l.staging} * l.ranks, kMaxGroups, 1, 1}, 8}; },
     "[p][g] the rows of rank p are computed, as far as group g's columns go"},
    {WorkField::kRouting, "routing", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_tokens, l.choices_per_token(), 1, 1}, 4}; },
     "[token][k] chosen expert, -1 where dropped"},
    {WorkField::kWeights, "weights", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_tokens, l.choices_per_token(), 1, 1}, 4}; },
     "[token][k] combine weights"},
    {WorkField::kPrefix, "capacity_prefix", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_blocks(), l.experts, 1, 1}, 4}; },
     "[b][expert] choices routed to the expert by the tokens up to token block b (capacity factor only)"},
    {WorkField::kPrefixSignal, "capacity_signal", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_blocks(), 1, 1, 1}, 8}; },
     "[b] the prefix of token block b is written"},
    {WorkField::kExpertTiles, "expert_tiles", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.all_local_experts(), l.max_tiles_per_expert(), 1, 1}, 4}; },
     "[expert][i] the expert's i-th tile, in the order in which they closed"},
    {WorkField::kExpertTileCounts, "expert_tile_counts", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.all_local_experts(), 1, 1, 1}, 4}; },
     "[expert] how many tiles it has, once all are formed (passes that train)"},
    {WorkField::kReadyTiles, "ready_tiles", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{kReadyLists, l.max_ready(), 1, 1}, 8}; },
     "[list] tiles ready for a product; what the next band leaves moves back (OS warp only)"},
    {WorkField::kJoints, "joints", Writer::kSelf,
     [](const Limits& l) {
       return FieldShape{{l.ranks == 1 && l.choices_per_token() > 1 ? l.columns(kReturning) : 0, l.max_tokens, 1, 1},
                         4};
     },
     "[column of tasks][token] of joined calls: what is written of the token's two rows; zero between calls"},
    {WorkField::kOutOffsets, "out_offsets", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.outboxes(), l.max_blocks(), l.all_local_experts() + 1, 1}, 2}; },
     "[q][b][El+1] packet_offsets of the packets for rank q, before they are sent"},
    {WorkField::kOutCounts, "out_counts", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.outboxes(), l.max_tokens, 1, 1}, 2}; },
     "[q][token] entries of the token on rank q"},
    {WorkField::kOutEntries, "out_entries", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.outboxes(), l.max_tokens, l.entries_per_token(), 1}, sizeof(Entry)}; },
     "[q][first token of b ...] the entries of the packets for rank q, before they are sent"},
    {WorkField::kOutSent, "out_sent", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.outboxes(), l.max_blocks(), 1, 1}, 4}; },
     "[q][b] parts of packet b's rows that have gone to rank q; zero between calls"},
    {WorkField::kIntermediate, "intermediate", Writer::kSelf,
     [](const Limits& l) {
       return FieldShape{
           {l.max_tiles() + l.max_later_slices(), l.tile_rows, row_pitch(l.intermediate, l.intermediate_bytes), 1}, 1};
     },
     "[tile][row][I] activations between the products; behind them those of the shared expert's later slices"},
    {WorkField::kStaging, "staging", Writer::kSelf,
     [](const Limits& l) {
       return FieldShape{
           {uint64_t{l.staging} * l.ranks, l.max_tokens, l.entries_per_token(), row_pitch(l.hidden, l.return_bytes)},
           1};
     },
     "[p][token][ordinal][H] weighted expert rows that Reduce sums (reduced return only)"},
};

inline constexpr FieldSpec<PutField> kPutTable[] = {
    {PutField::kReturnsReady, "returns_ready", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.rdma * l.ranks, 1, 1, 1}, 8}; },
     "[p] the rows that rank p gets back lie summed in the staging area"},
    {PutField::kReturnsSent, "returns_sent", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.rdma * l.ranks, 1, 1, 1}, 4}; },
     "[p] senders that have put their share of them; zero between calls"},
    {PutField::kRows, "out_rows", Writer::kSelf,
     [](const Limits& l) { return FieldShape{{l.max_tokens, row_pitch(l.hidden, l.x_bytes), 1, 1}, 1}; },
     "[token][H] own rows as other ranks get them: quantised, or where a network reads (memory that is registered)"},
};

static_assert(sizeof(kHeapTable) / sizeof(kHeapTable[0]) == static_cast<size_t>(HeapField::kCount));
static_assert(sizeof(kWorkTable) / sizeof(kWorkTable[0]) == static_cast<size_t>(WorkField::kCount));
static_assert(sizeof(kPutTable) / sizeof(kPutTable[0]) == static_cast<size_t>(PutField::kCount));

// How many coordinates a region's fields have. Only regions that need four strides for each field have four, because
// the strides take room in a kernel's arguments and in a thread block's shared memory.
template <class Field>
inline constexpr int kDimensions = 3;
template <>
inline constexpr int kDimensions<HeapField> = 4;

// Offsets and strides of a region, computed once on the host and passed to the kernel by value.
template <class Field>
struct Layout {
  static constexpr uint32_t kFields = static_cast<uint32_t>(Field::kCount);
  static constexpr uint64_t kFieldAlign = 256;

  uint64_t offset[kFields] = {};
  uint64_t stride[kFields][kDimensions<Field>] = {};
  uint64_t bytes = 0;

  // Address of the element with coordinates (i, j, k, m) of a field, in the region that begins at `base`.
  template <class T = uint8_t>
  FLASHMOE_HD T* at(uint8_t* base, Field f, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0, uint64_t m = 0) const {
    const uint32_t x = static_cast<uint32_t>(f);
    uint8_t* const at = base + offset[x] + i * stride[x][0] + j * stride[x][1] + k * stride[x][2];
    if constexpr (kDimensions<Field> == 4) return reinterpret_cast<T*>(at + m * stride[x][3]);
    return reinterpret_cast<T*>(at);
  }
};

template <class Field, size_t N>
Layout<Field> make_layout(const FieldSpec<Field> (&table)[N], const Limits& limits, uint64_t begin = 0) {
  Layout<Field> layout{.bytes = begin};
  for (uint32_t x = 0; x < N; ++x) {
    const FieldShape shape = table[x].shape(limits);
    uint64_t stride = shape.elem_bytes;
    for (int d = 3; d >= 0; --d) {
      if (d < kDimensions<Field>) layout.stride[x][d] = stride;
      stride *= shape.dim[d];
    }
    layout.offset[x] = layout.bytes;
    layout.bytes += align_up(stride, Layout<Field>::kFieldAlign);
  }
  return layout;
}

using HeapLayout = Layout<HeapField>;
using WorkLayout = Layout<WorkField>;
using PutLayout = Layout<PutField>;

inline HeapLayout make_heap_layout(const Limits& limits) {
  return make_layout(kHeapTable, limits);
}
inline WorkLayout make_work_layout(const Limits& limits) {
  return make_layout(kWorkTable, limits);
}
// The layout of what lies behind the workspace if peers are reached only by puts, or if rows are quantised; else an
// empty layout.
inline PutLayout make_put_layout(const Limits& limits) {
  return limits.rdma != 0 || is_quantised(limits.x_bytes) ? make_layout(kPutTable, limits) : PutLayout{};
}
// Bytes of the workspace and of what lies behind it.
inline uint64_t work_bytes(const Limits& limits) {
  return make_work_layout(limits).bytes + make_put_layout(limits).bytes;
}

// The number of rank `source` among the peers of rank `home`. (home itself has none.)
FLASHMOE_HD constexpr uint32_t peer_slot(uint32_t source, uint32_t home, uint32_t ranks) {
  return (source + ranks - home) % ranks - 1;
}

}  // namespace flashmoe

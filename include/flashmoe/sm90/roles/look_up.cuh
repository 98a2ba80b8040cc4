// Works out what a task means for a thread block: which rows of the tile the block has (its cluster's other block has
// the rest), at which addresses its token rows, results and weights lie, and how many stages of the pipeline they
// fill.
// look_up() is run by the clerk (warp 10 of each block), a task ahead of the loaders and consumers. The small
// functions beside it read only the kernel's arguments and a task's slot, and any role may call them.
// look_up() reads the descriptions of the tile and of its rows in this rank's workspace, and writes the task's slot
// in the ring (shared memory). The addresses that it computes are in x, y and all ranks' heaps; it neither reads nor
// writes there. It touches no barrier.
// In training, the Pass (roles/pass.cuh) adds to the slot the numbers of the rows that a forward pass keeps. In a
// backward pass, it also writes to device memory of this rank: the list of rows to gather (GroupArgs::gather), and
// gradients of the shared expert's gate.
#pragma once

#include "flashmoe/sm90/machine/load.cuh"
#include "flashmoe/sm90/machine/tma.cuh"
#include "flashmoe/sm90/roles/pass.cuh"
#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// Where this rank's own token rows lie, in the type in which experts multiply them, and the bytes from row to row.
template <class Dtype>
__device__ __forceinline__ const uint8_t* own_rows(const KernelArgs& args, const Call& c) {
  if constexpr (kQuantised<Dtype>) return c.out_row(0);
  return args.x;
}
template <class Dtype>
__device__ __forceinline__ uint64_t own_row_bytes(const KernelArgs& args, const Call& c) {
  if constexpr (kQuantised<Dtype>) return c.memory.heap_layout.stride[static_cast<uint32_t>(HeapField::kRows)][1];
  return args.x_row_bytes;
}

// Where the token row of a tile's row lies, as an offset of TokenRows.
template <class Dtype>
__device__ __forceinline__ uint32_t offset_of(const KernelArgs& args, const Call& c, const Row& row) {
  if (row.source == c.rank) return static_cast<uint32_t>(row.token * (own_row_bytes<Dtype>(args, c) / 16));
  const uint64_t at = c.dispatched_row(c.rank, row.source, row.token) - c.heap<uint8_t>(c.rank, HeapField::kRows);
  return static_cast<uint32_t>(at / 16) | TokenRows::kRemote;
}

__device__ __forceinline__ uint64_t result_of(const KernelArgs& args, const Call& c, const Row& row) {
  uint8_t* to =
      c.reduced() ? c.staged_row(row.source, row.token, row.ordinal) : c.return_row(row.source, row.token, row.k);
  if (c.policy.joined != 0 && c.shape.top_k == 1) to = args.out + uint64_t{row.token} * c.memory.return_row_bytes;
  return reinterpret_cast<uint64_t>(to);
}

// Changes the slot of a task of the shared expert for the expert's slices. first_token: the token of the tile's first
// row. Run by one lane.
template <class Pass>
__device__ __forceinline__ void look_up_slices(const KernelArgs& args, const Call& c, uint32_t first_token,
                                               TaskSlot& slot) {
  if (slot.task().tile().has_slice()) {
    const uint32_t slice = slot.task().tile().slice();
    slot.inner = c.inner_tile(slot.tile, first_token, slice);
    slot.expert += slice;
  } else {
    slot.slices = c.shape.shared;
    slot.later = c.inner_tile(slot.tile, first_token, 1);
    if constexpr (kBuild.sliced && kIsBackward) Pass::halve_slices(args, slot);
  }
}

// How many bytes of each row of an operand a task multiplies.
template <class Dtype>
__device__ __forceinline__ uint32_t contracted_bytes(const Call& c, TaskKind kind) {
  const bool hidden = is_one_of<kOverHidden>(kind);
  if constexpr (kQuantised<Dtype>) return hidden ? c.shape.hidden : c.shape.intermediate;
  return hidden ? c.memory.token_row_bytes : c.memory.intermediate_row_bytes;
}

// Looks up this block's share of a task, that is, everything for which the other roles would have to wait. One warp.
template <class Dtype, class Pass>
__device__ __forceinline__ void look_up(const KernelArgs& args, const Call& c, const Task& task, TaskSlot& slot) {
  using P = Platform;
  // The tile's shape and all rows that a tile may have, not only the share's, are loaded together, to take one round
  // trip to the L2.
  const uint32_t tile = task.tile().number();
  const Tile::Shape shape = c.tile(tile)->shape;
  [[maybe_unused]] uint32_t first_row =
      Pass::first_number(args, c, tile, shape.expert + (kBuild.sliced ? task.tile().slice() : 0));
  constexpr uint32_t kEach = kTileTokens / P::kLanes;
  Row row[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) row[i] = *c.tile_row(tile, P::lane() + i * P::kLanes);
  if constexpr (kTrainsInGroup && kBuild.sliced && !kIsBackward) {
    first_row = c.inner_tile(tile, P::broadcast(row[0].token, 0), task.tile().slice()) * kTileTokens;
  }
  const Share share =
      kQuantised<Dtype> ? wide_share_of(shape.rows, cluster_rank()) : share_of(shape.rows, cluster_rank());
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t r = P::lane() + i * P::kLanes - share.first;
    if (r >= share.rows) continue;  // also skips rows before share.first, since r is unsigned
    if (is_one_of<kGathering>(task.kind)) {
      slot.offsets[r] = offset_of<Dtype>(args, c, row[i]);
      if constexpr (kBuild.trains()) {
        Pass::look_up_gathered(args, c, task, {tile, share.first + r, first_row}, row[i], slot.tokens[r]);
      }
      if (kIsBackward || args.weights_on_input != 0) slot.weights[r] = row[i].weight;
    } else {
      slot.to[r] = result_of(args, c, row[i]);
      slot.weights[r] = kIsBackward || args.weights_on_input != 0 ? 1.0f : row[i].weight;
      slot.tokens[r] = row[i].token;
      if constexpr (kBuild.sliced && kIsBackward) {
        if (c.shape.is_shared(shape.expert)) {
          slot.tokens[r] = Pass::look_up_gate(args, c, task, tile, share.first + r, row[i]);
        }
      }
    }
  }
  if (P::lane() == 0) {
    slot.of = task.of;
    slot.tile = slot.inner = tile;
    slot.column = task.column;
    slot.expert = shape.expert;
    slot.k_bytes = contracted_bytes<Dtype>(c, task.kind);
    slot.slices = 1;
    slot.share = share;
    if (c.shape.is_shared(shape.expert)) look_up_slices<Pass>(args, c, row[0].token, slot);
  }
}

// Whether a task is one that comes after the queue's stop.
__device__ __forceinline__ bool is_behind_stop(TaskKind kind) {
  return kIsBackward && kind == TaskKind::kBehindStop;
}

// Rehearsals. The first epilogue of a block takes 11 us, because its code has to come from memory; later ones take 2
// to 3 us. So while the first tiles are formed, each cluster rehearses each product: it runs a task in a full tile's
// shape, with one stage and without rows, by the code of the tasks that follow. Only look-up, retirement and traces
// treat such a task differently; they know it by kNoTile.
inline constexpr uint32_t kRehearsals = kProducts;

// Rows of all experts, if all ranks have as many tokens as this one.
__device__ __forceinline__ uint64_t rows_of_all(const Call& c) {
  return uint64_t{c.shape.tokens} * c.shape.top_k * c.shape.ranks;
}

// With how many rehearsals each ring begins. None if hardly any tile is full, since other tiles run other code.
template <class Dtype>
__device__ __forceinline__ uint32_t rehearsals(const Call& c) {
  constexpr uint64_t kRows = kTileTokens / 2;  // the least rows of an expert, on average
  const bool full = rows_of_all(c) >= kRows * c.shape.experts;
  return Dtype::kTensorCores && c.shape.local_experts != 0 && full ? kRehearsals : 0;
}

// The n-th rehearsal. The last product comes first and the first product last, because its tasks follow.
__device__ __forceinline__ Task rehearsal(uint32_t n) {
  Task task{.of = kNoTile};
  for_each_product([&]<uint32_t m>() {
    if (n + 1 + m == kRehearsals) task.kind = Product<m>::kKind;
  });
  return task;
}

__device__ __forceinline__ bool is_rehearsal(const Task& task) {
  return task.of == kNoTile;
}

// Run in place of look_up() for a rehearsal. The task loads one stage of the first expert's features. It has no rows,
// so it loads no tokens, and multiplies whatever lies in their place. Nothing is stored, so the slot's offsets,
// addresses and weights are left as they are.
__device__ __forceinline__ void look_up_rehearsal(TaskSlot& slot) {
  if (Platform::lane() != 0) return;
  slot.tile = kNoTile;
  slot.of = kNoTile;
  slot.column = 0;
  slot.expert = 0;
  slot.k_bytes = kRowBytes;
  slot.slices = 1;
  slot.share = {.wide = true, .first = 0, .rows = 0, .cover = Wide::kTokens};
}

// The number of stages that a task takes.
__device__ __forceinline__ uint32_t stages_of(const TaskSlot& slot) {
  return slot.slices * (slot.share.wide ? Wide::stages(slot.k_bytes) : Narrow::stages(slot.k_bytes));
}

}  // namespace flashmoe::sm90

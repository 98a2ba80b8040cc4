// What host code asks of a GPU architecture: which devices have it, how its kernels cut a call, how they are launched.
//
// Kernels compute with the same values, of their own headers: an instance takes them from there, and nothing else in csrc/ does, but for
// the kernels' entries. A further architecture is a further instance, which arch.cpp lists.
#pragma once

#include "flashmoe/sm90/geometry.h"

namespace flashmoe::cuda {

class Device;

using Share = sm90::Share;

// Of a kernel's thread blocks.
struct BlockSize {
  uint32_t threads, shared_bytes;
};

struct Arch {
  uint32_t capability;  // compute capability; 90 is 9.0
  const char* devices;  // that have it

  // The fused kernel. A task is a tile by some rows of weights, and the thread blocks of a cluster compute it together.
  BlockSize fused;
  uint32_t tile_rows, task_features, cluster_blocks;  // rows of a tile, at most; of a task's weights
  uint32_t stage_bytes;                               // of each row along K, that a task multiplies at a time
  uint32_t return_columns;                            // of results, that a task of the returning product has
  std::array<uint32_t, kProducts> (*columns_per_task)(bool gated);
  Share (*share_of)(uint32_t tile_rows, uint32_t block);  // what a block of the cluster multiplies
  uint64_t reach_bytes;                                   // behind a base, within which gathered rows lie
  uint32_t max_choices, max_gate_logits;                  // of a token block, for which a thread block has room

  // Of `blocks` thread blocks: those with a former, and those with a keeper; and the fewest that there can be.
  uint32_t (*formers_of)(uint32_t ranks, uint32_t local_experts, uint32_t blocks);
  uint32_t (*keepers_of)(uint32_t ranks, uint32_t local_experts, uint32_t blocks);
  uint32_t (*least_blocks)(uint32_t ranks, uint32_t local_experts);

  // The kernel of a few tokens; that of weights with scales.
  BlockSize few, few_scaled;
  uint32_t few_features;  // rows of a task's weights

  // What the copy engine brings at a time (tensor_map.h): stage_bytes of so many rows.
  uint32_t box_features, box_rows;                     // of weights; of tokens or intermediate rows
  uint32_t (*gate_features)(uint32_t experts);         // of the router
  uint64_t (*quantised_pitch)(uint32_t intermediate);  // from row to row of a tile in e4m3
};

// wgmma and setmaxnreg exist on 9.0 and, that being what the `a` of sm_90a means, on no other.
inline constexpr Arch kHopper{.capability = 90,
                              .devices = "H100, H200",
                              .fused = {sm90::kThreads, sm90::kSharedBytes},
                              .tile_rows = sm90::kTileTokens,
                              .task_features = sm90::kTaskFeatures,
                              .cluster_blocks = sm90::kClusterBlocks,
                              .stage_bytes = sm90::kRowBytes,
                              .return_columns = sm90::kReturnColumns,
                              .columns_per_task = sm90::columns_per_task,
                              .share_of = sm90::share_of,
                              .reach_bytes = sm90::kReachBytes,
                              .max_choices = sm90::kMaxChoices,
                              .max_gate_logits = sm90::kMaxGateLogits,
                              .formers_of = sm90::formers_of,
                              .keepers_of = sm90::keepers_of,
                              .least_blocks = sm90::least_blocks,
                              .few = {sm90::few_warps(false) * 32, sm90::kFewSharedBytes},
                              .few_scaled = {sm90::few_warps(true) * 32, sm90::kFewSharedBytes},
                              .few_features = sm90::kBoxFeatures,
                              .box_features = sm90::kBoxFeatures,
                              .box_rows = sm90::kRowBox,
                              .gate_features = sm90::gate_features,
                              .quantised_pitch = sm90::quantised_pitch};

// Throws Error for a device that has none.
const Arch& arch_of(const Device& device);

}  // namespace flashmoe::cuda

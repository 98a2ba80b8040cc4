// What host code needs to know of a GPU architecture: which devices have it, how its kernels cut a call, and how they
// are launched.
//
// Kernels compute with the same values, which their own headers define. An instance of Arch takes the values from these
// headers. Nothing else in csrc/ includes the headers, except the kernels' entries. A further architecture is a further
// instance, which arch.cpp lists.
#pragma once

#include "flashmoe/sm90/geometry.h"

namespace flashmoe::cuda {

class Device;

using Share = sm90::Share;

// The size of a kernel's thread blocks.
struct BlockSize {
  uint32_t threads, shared_bytes;
};

struct Arch {
  uint32_t capability;  // compute capability; 90 is 9.0
  const char* devices;  // names of devices that have it

  // The fused kernel. A task multiplies a tile by some rows of weights. The thread blocks of a cluster compute the task
  // together.
  BlockSize fused;
  uint32_t tile_rows, task_features, cluster_blocks;  // rows of a full tile; a task's rows of weights
  uint32_t stage_bytes;                               // bytes of each row, along the contracted axis, in a stage
  uint32_t return_columns;                            // columns of results of a GEMM1 task
  std::array<uint32_t, kProducts> (*columns_per_task)(bool gated);
  Share (*share_of)(uint32_t tile_rows, uint32_t block);  // what each block of the cluster multiplies
  uint64_t reach_bytes;                                   // how far behind a base address gathered rows may lie
  uint32_t max_choices, max_gate_logits;                  // of a token block: what a thread block has room for

  // How many of `blocks` thread blocks have a former, and how many have a keeper; and the fewest thread blocks that a
  // launch can have. work_behind: see Shape in policy.h.
  uint32_t (*formers_of)(uint32_t ranks, uint32_t local_experts, uint32_t blocks, bool work_behind);
  uint32_t (*keepers_of)(uint32_t ranks, uint32_t local_experts, uint32_t blocks);
  uint32_t (*least_blocks)(uint32_t ranks, uint32_t local_experts);

  // Thread blocks of the kernel for a few tokens, if the weights have no scales, and if they have scales.
  BlockSize few, few_scaled;
  uint32_t few_features;  // a task's rows of weights

  // What the copy engine loads at a time (tensor_map.h): stage_bytes bytes of each of so many rows.
  uint32_t box_features, box_rows;                     // rows of weights; rows of tokens or intermediate rows
  uint32_t (*gate_features)(uint32_t experts);         // rows of the router
  uint64_t (*quantised_pitch)(uint32_t intermediate);  // bytes from row to row of an e4m3 tile
};

// wgmma and setmaxnreg exist on 9.0 and on no other architecture; the `a` of sm_90a says so.
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

// Throws Error for a device whose architecture is not listed.
const Arch& arch_of(const Device& device);

}  // namespace flashmoe::cuda

// What the ranks of a group must agree on: their limits when the group forms, and in each call the call's
// configuration.
#pragma once

#include <string>
#include <vector>

#include "flashmoe/protocol/call.h"
#include "host/placement.h"

namespace flashmoe::host {

// A message about the first of the limits that must be the same on both ranks but differ; empty if there is none.
std::string difference(const Limits& mine, uint32_t rank, const Limits& theirs, uint32_t peer);

// The configuration of a call of `layer`; the call's return groups must be set. columns_per_task: columns of a GEMM1
// task. forward: in a backward pass, the epoch of the call whose gradients it computes; else 0. redispatch: the
// backward pass sends x again.
CallConfig make_config(const Call& call, const LayerSpec& layer, const Holders& placement, uint32_t columns_per_task,
                       Epoch forward = 0, bool redispatch = false);

}  // namespace flashmoe::host

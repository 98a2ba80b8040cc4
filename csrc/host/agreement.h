// What the ranks of a group must agree on: their limits when it forms, the call's configuration in each call.
#pragma once

#include <string>
#include <vector>

#include "flashmoe/protocol/call.h"
#include "host/placement.h"

namespace flashmoe::host {

// The first difference between two ranks' limits that no call could bridge, as a message; empty if there is none.
std::string difference(const Limits& mine, uint32_t rank, const Limits& theirs, uint32_t peer);

// The configuration of a call of `layer` whose return groups are set. columns_per_task: of GEMM1.
// forward: of a backward pass, the epoch of the call whose gradients it computes; else 0. redispatch: it sends x again.
CallConfig make_config(const Call& call, const LayerSpec& layer, const Holders& placement, uint32_t columns_per_task,
                       Epoch forward = 0, bool redispatch = false);

}  // namespace flashmoe::host

// What the ranks of a group must agree on in a call, as each of them believes it to be.
#pragma once

#include <vector>

#include "flashmoe/protocol/call.h"

namespace flashmoe::cpu {

// Of a call whose sizes, return mode and groups are set. columns_per_task: of GEMM1.
CallConfig make_config(const Call& call, DType dtype, Activation activation, double capacity_factor,
                       const std::vector<uint32_t>& placement, uint32_t columns_per_task);

}  // namespace flashmoe::cpu

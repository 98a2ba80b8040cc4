// The team that dispatches a token block together: warps 0 to 10 of a block, all but the OS actor's (warp 11).
// Team is the Platform of these warps' code (roles/dispatch.cuh). They meet in named barrier 3, which nobody else uses.
// Here are only names and numbers: no code, and no memory is touched.
#pragma once

#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

inline constexpr uint32_t kTeamWarps = kWarps - 1;  // the last is the OS actor's
inline constexpr uint32_t kTeamBarrier = 3;         // 1 and 2 are the consumer warpgroups' own
using Team = TeamPlatform<kTeamWarps, kTeamBarrier>;

}  // namespace flashmoe::sm90

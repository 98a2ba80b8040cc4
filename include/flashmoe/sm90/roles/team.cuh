// The warps of a block that dispatch a token block together: all but the OS actor's.
#pragma once

#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

inline constexpr uint32_t kTeamWarps = kWarps - 1;  // the last is the OS actor's
inline constexpr uint32_t kTeamBarrier = 3;         // 1 and 2 are the consumer warpgroups' own
using Team = TeamPlatform<kTeamWarps, kTeamBarrier>;

}  // namespace flashmoe::sm90

// Former: an actor that does nothing but tile formation, for the local experts that its TileFormer serves. The CUDA
// engine runs many, a warp each (formers_of, sm90/geometry.h); the CPU engine's OS actor forms tiles itself.
#pragma once

#include "flashmoe/protocol/arrivals.h"
#include "flashmoe/protocol/tile_former.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// Runs until every packet is here and its tiles are announced; false if the call was aborted. All lanes. It reports no
// fault: the OS actor awaits the same packets, and says who is missing.
template <class P>
FLASHMOE_FN bool run_former(const Call& c, Source* sources, const FormerMemory& memory) {
  if (memory.step == 0 || memory.first >= c.shape.local_experts) return true;
  constexpr uint32_t kLooks = 8;  // many, because own packets arrive all at once, and the first tiles wait for them
  Arrivals<P, kPacketsOfLane, kLooks> arrivals(c, sources);
  TileFormer<P, kPacketsOfLane> former(c, memory);
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        const bool moved = arrivals.step([&](uint32_t p, uint32_t b, uint32_t n) { former.consume(p, b, n); },
                                         [&](uint32_t p) {
                                           // finish() comes first: tasks wait for the tiles that it announces.
                                           if (arrivals.complete()) former.finish();
                                           former.close(p);
                                         });
        if (arrivals.complete()) return Step::kDone;
        return moved ? Step::kProgress : Step::kIdle;
      },
      OsLiveness<P>{c});
  if (end != WaitEnd::kDone) return false;
  former.report();
  return true;
}

}  // namespace flashmoe

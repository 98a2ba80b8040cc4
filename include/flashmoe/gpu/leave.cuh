// The end of a kernel's call.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/fault.h"

namespace flashmoe::gpu {

// The own fault if there is one, else a peer's.
__device__ __forceinline__ void hand_over_fault(const Call& c, HostFault& to) {
  for (uint32_t i = 0; i < c.shape.ranks; ++i) {
    const FaultRecord* record = c.fault(c.rank, (c.rank + i) % c.shape.ranks);
    if (Platform::load_acquire(&record->posted, kSystem) == 0) continue;
    to.fault = record->fault;
    to.entered = entered_by<Platform>(c, to.fault.culprit);
    // A rank's configuration is in its own heap, and here once it has announced it.
    auto at = [&](uint32_t p) { return Platform::kPeersMapped ? p : c.rank; };
    to.mine = *c.call_config(at(to.fault.rank), to.fault.rank);
    to.theirs = *c.call_config(at(to.fault.rank), to.fault.awaited);  // as the finder read it
    Platform::store_release(&to.posted, uint64_t{1}, kSystem);
    return;
  }
}

// One thread, when all of the block's warps are done. The last block to leave counts the call, when every block has read
// the count, and hands the host what went wrong. Calls that are queued behind one that failed, or replayed, find its leftovers
// in queue and lists, and tokens of another number: they must not begin.
__device__ __forceinline__ void leave(const KernelArgs& args, const Call& c, uint64_t epoch) {
  Control* control = c.control();
  if (Platform::fetch_add_acq_rel(&control->left.value, uint64_t{1}) + 1 != gridDim.x) return;
  Platform::store_relaxed(&control->left.value, uint64_t{0});
  Platform::store_relaxed(&control->met.value, uint64_t{0});
  const bool failed = Platform::load_relaxed(&control->abort.value) != 0;
  Platform::store_relaxed(&control->calls.value, failed ? kNoMoreCalls : epoch);
  if (failed) hand_over_fault(c, *args.host_fault);
}

}  // namespace flashmoe::gpu

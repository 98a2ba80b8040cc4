// The end of a kernel's call.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/gpu/refused.cuh"
#include "flashmoe/protocol/fault.h"

namespace flashmoe::gpu {

// Hands the host this rank's own fault if there is one, else a peer's.
__device__ __forceinline__ void hand_over_fault(const Call& c, HostFault& to) {
  for (uint32_t i = 0; i < c.shape.ranks; ++i) {
    const FaultRecord* record = c.fault(c.rank, (c.rank + i) % c.shape.ranks);
    if (Platform::load_acquire(&record->posted, kSystem) != FaultRecord::kFailed) continue;
    to.fault = record->fault;
    to.entered = entered_by<Platform>(c, to.fault.culprit);
    // In whose heap rank p's own configuration and those that p has received are read: in p's heap, or if that is not
    // mapped, in this rank's.
    auto at = [&](uint32_t p) { return Platform::kPeersMapped ? p : c.rank; };
    to.mine = *c.call_config(at(to.fault.rank), to.fault.rank);
    to.theirs = *c.call_config(at(to.fault.rank), to.fault.awaited);  // as the finder read it
    Platform::store_release(&to.posted, uint64_t{1}, kSystem);
    return;
  }
}

// Hands the host the note of a bad row, if that row is an error, and unless an earlier note still waits for the host.
__device__ __forceinline__ void hand_over_note(const KernelArgs& args, const Call& c, uint64_t note) {
  Platform::store_relaxed(&c.control()->noted.value, uint64_t{0});
  if (args.strict == 0 && RowNote::unpack(note).fault == RowFault::kLogits) return;
  HostFault& to = *args.host_fault;
  if (Platform::load_acquire(&to.noted, kSystem) != 0) return;
  to.noted_experts = c.shape.gate_experts;
  Platform::store_release(&to.noted, note, kSystem);
}

// Run by one thread of each block, when all of the block's warps are done. The last block to leave counts the call
// (every block has read the count by then), and hands the host what went wrong. Calls that are queued or replayed
// after a failed call would find what it has left in queue and lists, and perhaps another number of tokens. So they
// must not begin: kNoMoreCalls tells them. kAlone: the rank has no peers, whatever the call says.
template <bool kAlone = false>
__device__ __forceinline__ void leave(const KernelArgs& args, const Call& c, uint64_t epoch) {
  Control* control = c.control();
  if (Platform::fetch_add_acq_rel(&control->left.value, uint64_t{1}) + 1 != gridDim.x) return;
  Platform::store_relaxed(&control->left.value, uint64_t{0});
  auto zero = [](auto&... lines) { (Platform::store_relaxed(&lines.value, uint64_t{0}), ...); };
  if constexpr (kBuild.few) zero(kBuild.group ? control->few_stored : control->few_met, control->few_tickets);
  if constexpr (kTrainsInGroup) zero(control->keepers_done);
  if constexpr (kIsBackward) zero(control->weight_tickets, control->routed);
  bool failed = Platform::load_relaxed(&control->abort.value) != 0;
  if constexpr (!kAlone && Platform::kPeersMapped) {
    if (failed && args.reasons != nullptr) failed = !end_refused(args, c);
  }
  Platform::store_relaxed(&control->calls.value, failed ? kNoMoreCalls : epoch);
  if (failed) hand_over_fault(c, *args.host_fault);
  if constexpr (!kIsBackward) {
    if (const uint64_t note = Platform::load_relaxed(&control->noted.value); note != 0) hand_over_note(args, c, note);
  }
}

}  // namespace flashmoe::gpu

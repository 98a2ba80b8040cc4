// The end of a kernel's call.
#pragma once

#include "flashmoe/sm90/kernel_args.h"
#include "flashmoe/sm90/platform.cuh"

namespace flashmoe::sm90 {

// One thread, when all of the block's warps are done. The last block to leave counts the call, when every block has read
// the count, and hands the host what went wrong.
__device__ __forceinline__ void leave(const KernelArgs& args, const Call& c, uint64_t epoch) {
  Control* control = c.control();
  if (Platform::fetch_add_acq_rel(&control->left.value, uint64_t{1}) + 1 != gridDim.x) return;
  Platform::store_relaxed(&control->left.value, uint64_t{0});
  Platform::store_relaxed(&control->met.value, uint64_t{0});
  Platform::store_relaxed(&control->calls.value, epoch);
  if (Platform::load_relaxed(&control->abort.value) == 0) return;
  args.host_fault->fault = c.fault(c.rank, c.rank)->fault;
  Platform::store_release(&args.host_fault->posted, uint64_t{1}, kSystem);
}

}  // namespace flashmoe::sm90

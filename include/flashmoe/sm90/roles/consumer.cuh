// Which consumer warpgroup of the block a thread belongs to (0 or 1), and where the staging buffer of that warpgroup is
// in shared memory. Each thread of the consumers (warps 0 to 7) runs it for itself.
// It reads the thread's number and computes an address. It writes nothing, and touches no barrier.
#pragma once

#include "flashmoe/sm90/machine/pipeline.cuh"

namespace flashmoe::sm90 {

// The thread's consumer warpgroup, and its staging buffer. If rows are quantised, and in passes that train, the sums
// leave no registers to keep these two, so anew() finds them again.
struct Consumer {
  uint32_t group, staging;

  template <class Dtype>
  __device__ __forceinline__ Consumer anew(const Pipeline& ring) const {
    if constexpr (!kQuantised<Dtype> && !kIsBackward && !kBuild.keeps) return *this;
    return of_group(ring, thread_anew() / kWarpgroup);
  }
  static __device__ __forceinline__ Consumer of_group(const Pipeline& ring, uint32_t group) {
    return {group, ring.stages + kStages * kStageBytes + group * kStagingBytes};
  }
};

}  // namespace flashmoe::sm90

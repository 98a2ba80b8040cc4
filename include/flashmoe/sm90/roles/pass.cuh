// What a pass does besides the layer. The roles are written once, and get one of three policies as `Pass`: Inference,
// in this file, for a forward pass that serves; Keeping (gradients/keeping.cuh) for a forward pass that keeps what
// gradients need; Backward (gradients/backward.cuh) for a backward pass. In builds that train (kBuild.keeps,
// kIsBackward, kTrainsInGroup), roles also call functions that only Keeping or Backward have. Inference has the
// functions that every pass has.
// Clerks run first_number and TasksBehindStop, consumers run kept_place.
// Inference reads and writes nothing: its functions are empty or return a constant. The files of the other two say what
// memory they touch.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/sm90/epilogue/rows.cuh"
#include "flashmoe/sm90/roles/ring.cuh"

namespace flashmoe::sm90 {

// The place of pre-activations that are not kept.
struct NothingKept {
  template <class Dtype, Columns kOrder, uint32_t kCount>
  __device__ __forceinline__ void rows(const Lane&, const float (&)[kCount], uint32_t) const {}
};

// A row of a task's tile: the tile, the row's number in it, and the number of the tile's first row (first_number).
struct RowPlace {
  uint32_t tile, in_tile, first_number;
};

struct Inference {
  // The leading clerk's tasks after the queue's stop: there are none.
  struct TasksBehindStop {
    __device__ __forceinline__ explicit TasksBehindStop(const KernelArgs&) {}
  };
  // The number under which the tile's first row is kept.
  static __device__ __forceinline__ uint32_t first_number(const KernelArgs&, const Call&, uint32_t, uint32_t) {
    return 0;
  }
  // Where the pre-activations of a task that activates are kept. The last argument is the task's first column of
  // results.
  template <bool kGated, bool kBehind = false>
  static __device__ __forceinline__ NothingKept kept_place(const KernelArgs&, const Call&, const TaskSlot&, uint32_t) {
    return {};
  }
};

}  // namespace flashmoe::sm90

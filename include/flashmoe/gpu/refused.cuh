// The end of a call that some rank has refused (protocol/refusal.h), on a rank that has begun the call. The last thread
// of the kernel runs this code.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/fault.h"

namespace flashmoe::gpu {

__device__ __forceinline__ uint64_t progress_of_all(const Call& c) {
  uint64_t sum = 0;
  for (uint32_t p = 0; p < c.shape.ranks; ++p) sum += Platform::poll(&c.status(p)->progress, kSystem);
  return sum;
}

__device__ __forceinline__ bool any_failed(const Call& c) {
  for (uint32_t p = 0; p < c.shape.ranks; ++p) {
    if (Platform::load_acquire(&c.fault(c.rank, p)->posted, kSystem) == FaultRecord::kFailed) return true;
  }
  return false;
}

// Tells the host that rank p has refused the call. It also tells the reason, unless the host has not yet raised an
// earlier refusal.
__device__ __forceinline__ void hand_over_refusal(const KernelArgs& args, const Call& c, uint32_t p) {
  HostFault& to = *args.host_fault;
  if (Platform::load_acquire(&to.refused, kSystem) == 0) {
    constexpr uint32_t kWords = kReasonBytes / sizeof(uint64_t);
    const auto* const reason = reinterpret_cast<const uint64_t*>(args.reasons) + p * kWords;
#pragma unroll 1
    for (uint32_t i = 0; i < kWords; ++i) reinterpret_cast<uint64_t*>(to.reason)[i] = reason[i];
    to.refuser = p;
    Platform::store_release(&to.refused, c.epoch, kSystem);
  }
  Platform::store_release(&to.last_refused, c.epoch, kSystem);
}

// Zeroes queue, lists and counters, as in a workspace that no call has used. Rows, which lie behind them, stay.
__device__ __forceinline__ void clear_workspace(const KernelArgs& args, const Call& c) {
  static_assert(static_cast<uint32_t>(WorkField::kIntermediate) + 2 == static_cast<uint32_t>(WorkField::kCount));
  auto clear = [](void* from, uint64_t bytes) {
    auto* const to = static_cast<uint4*>(from);
#pragma unroll 1
    for (uint64_t i = 0; i < bytes / sizeof(uint4); ++i) to[i] = uint4{};
  };
  clear(c.memory.work, c.memory.work_layout.offset[static_cast<uint32_t>(WorkField::kIntermediate)]);
  if constexpr (kBuild.few) {
    const FewMemory few{args.few_layout, c};
    clear(few.done(0), few.done_bytes());
  }
}

// Waits until all ranks have left the call. False if a rank has failed. Also false, with a fault posted, if a rank
// has not left and no rank has made progress for a whole timeout.
__device__ __forceinline__ bool all_have_left(const Call& c) {
  uint64_t since = Platform::now_ns(), progress = progress_of_all(c);
  uint32_t p = 0;
#pragma unroll 1
  while (p < c.shape.ranks) {
    if (Platform::load_acquire(&c.fault(c.rank, p)->left, kSystem) >= c.epoch) {
      ++p;
      continue;
    }
    if (any_failed(c)) return false;
    const uint64_t now = Platform::now_ns();
    if (c.policy.timeout_ns != 0 && now - since > c.policy.timeout_ns) {
      const uint64_t sum = progress_of_all(c);
      if (sum == progress) {
        post_fault<Platform>(c, {.kind = FaultKind::kLeft, .awaited = p, .culprit = p, .expected = c.epoch});
        return false;
      }
      progress = sum;
      since = now;
    }
    Platform::rest();
  }
  return true;
}

// For a call that was aborted: whether it was aborted because a rank has refused it, and all ranks are ready for the
// next call. Run by one thread, when all other threads of the rank have left.
__device__ __forceinline__ bool end_refused(const KernelArgs& args, const Call& c) {
  const uint32_t p = refuser<Platform>(c);
  if (p == c.shape.ranks || any_failed(c)) return false;
  hand_over_refusal(args, c, p);
  clear_workspace(args, c);
  // The releases come after the loads of the reason, and after the other blocks' stores to peers, which these blocks
  // have released by their adds to Control::left.
  for (uint32_t q = 0; q < c.shape.ranks; ++q) Platform::store_release(&c.fault(q, c.rank)->left, c.epoch, kSystem);
  if (!all_have_left(c)) return false;
  Platform::store_relaxed(&c.control()->refused.value, c.epoch);
  return true;
}

}  // namespace flashmoe::gpu

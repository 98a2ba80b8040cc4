// The device's clock for the host, which brackets each answer between two readings of its own (csrc/cuda/clock.cpp).
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// One thread: answers `times` times, or until the host has let it wait for so long.
__device__ __forceinline__ void answer_the_time(ClockPage* page, uint32_t times, uint64_t patience_ns) {
  const uint64_t begin = Platform::now_ns();
  for (uint64_t n = 1; n <= times; ++n) {
    while (Platform::load_acquire(&page->asked, kSystem) < n) {
      if (Platform::now_ns() - begin > patience_ns) return;
    }
    page->device_ns = Platform::now_ns();
    Platform::store_release(&page->answered, n, kSystem);
  }
}

}  // namespace flashmoe::gpu

// Writes what a block's roles do, and when, to the trace buffer. Compiled to nothing unless asked for.
#pragma once

#include "flashmoe/sm90/kernel_args.h"
#include "flashmoe/sm90/platform.cuh"

namespace flashmoe::sm90 {

template <bool kOn>
struct Tracer {
  uint8_t* buffer;   // of this block; null: not traced
  uint32_t* events;  // in shared memory: how many there are

  __device__ __forceinline__ uint64_t now() const {
    if constexpr (kOn) return Platform::now_ns();
    return 0;
  }
  // One thread. A span from `start` to now.
  __device__ __forceinline__ void add_here(TracePhase phase, uint64_t start, uint32_t index, uint32_t column) const {
    if constexpr (kOn) {
      if (buffer == nullptr) return;
      const uint32_t i = atomicAdd(events, 1u);
      if (i >= kTraceEvents) return;
      TraceEvent* to = reinterpret_cast<TraceEvent*>(buffer + sizeof(TraceHeader)) + i;
      *to = {start, Platform::now_ns(), static_cast<uint32_t>(phase), index, column, 0};
    }
  }
  // One warp: its first lane adds the span.
  __device__ __forceinline__ void add(TracePhase phase, uint64_t start, uint32_t index, uint32_t column) const {
    if constexpr (kOn) {
      if (Platform::lane() == 0) add_here(phase, start, index, column);
    }
  }
  // One thread, after the last event.
  __device__ __forceinline__ void finish() const {
    if constexpr (kOn) {
      if (buffer != nullptr)
        reinterpret_cast<TraceHeader*>(buffer)->count = *events < kTraceEvents ? *events : kTraceEvents;
    }
  }
};

}  // namespace flashmoe::sm90

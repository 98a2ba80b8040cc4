// Writes what a block's roles do, and when, to the trace buffer. Compiled to nothing unless asked for.
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// For each warp, when the spans began that its tracing thread is in: [0], and inside that [1]. In shared memory, not in
// registers: the mainloop has none left.
using TraceStarts = uint64_t[kWarps][2];

// Called by all threads; the first of every kEach of them traces.
template <bool kOn, uint32_t kEach>
struct Tracer {
  const KernelArgs& args;
  uint32_t& events;  // in shared memory: how many there are
  TraceStarts& starts;

  // A span begins; at depth 1, inside that at depth 0.
  __device__ __forceinline__ void begin(uint32_t depth = 0) const {
    if constexpr (kOn) {
      const uint32_t t = thread();
      if (t % kEach == 0) starts[t / 32][depth] = Platform::now_ns();
    }
  }
  // The span ends. Of a rehearsal nothing is recorded.
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column, uint32_t depth = 0) const {
    if constexpr (kOn) {
      const uint32_t t = thread();
      if (t % kEach != 0 || args.trace == nullptr || index == kNoTile) return;
      const uint32_t i = atomicAdd(&events, 1u);
      if (i >= kTraceEvents) return;
      TraceEvent* to = reinterpret_cast<TraceEvent*>(buffer() + sizeof(TraceHeader)) + i;
      *to = {starts[t / 32][depth], Platform::now_ns(), static_cast<uint32_t>(phase), index, column, 0};
    }
  }
  // One thread, after the last event.
  __device__ __forceinline__ void finish() const {
    if constexpr (kOn) {
      if (args.trace == nullptr) return;
      reinterpret_cast<TraceHeader*>(buffer())->count = events < kTraceEvents ? events : kTraceEvents;
    }
  }

 private:
  // Volatile: else ptxas keeps whether this thread traces in a register throughout the kernel, and spills it.
  static __device__ __forceinline__ uint32_t thread() {
    uint32_t t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
  }
  __device__ __forceinline__ uint8_t* buffer() const { return args.trace + blockIdx.x * kTraceBytesPerBlock; }
};

}  // namespace flashmoe::gpu

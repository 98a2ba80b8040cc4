// Writes to the trace buffer what a block's roles do, and when. If no trace is asked for, this code compiles to
// nothing. The file also has the device's clock for the host, which brackets each answer between two readings of its
// own clock (csrc/cuda/clock.cpp).
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// For each warp, when the spans began that its tracing thread is in: [0], and inside that [1]. In shared memory, not in
// registers: the mainloop has none left.
using TraceStarts = uint64_t[kWarps][2];

// First of all, by all threads.
template <bool kOn>
__device__ __forceinline__ void begin_trace(const KernelArgs& args) {
  if constexpr (kOn) {
    if (threadIdx.x != 0 || args.trace == nullptr) return;
    uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    *reinterpret_cast<TraceHeader*>(args.trace + blockIdx.x * kTraceBytesPerBlock) = {0, Platform::now_ns(), 0,
                                                                                      multiprocessor};
  }
}

// Called by all threads; the first of every kEach of them traces.
template <bool kOn, uint32_t kEach>
struct Tracer {
  const KernelArgs& args;
  uint32_t& events;  // in shared memory: how many there are
  TraceStarts& starts;

  // A span begins; at depth 1, inside that at depth 0.
  __device__ __forceinline__ void begin(uint32_t depth = 0) const {
    if constexpr (kOn) {
      const uint32_t t = thread_anew();
      if (t % kEach == 0) starts[t / 32][depth] = Platform::now_ns();
    }
  }
  // The span ends; if none is begun before the next end at this depth, that one's begins here. So what is between two
  // tasks, the trace's own stores with it, is in the wait for the second.
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column, uint32_t depth = 0) const {
    if constexpr (kOn) record(phase, index, column, kNoExpert, depth);
  }
  // The same of a product of expert `expert`; without a tile it is rehearsed.
  __device__ __forceinline__ void end_product(Phase phase, uint32_t tile, uint32_t column, uint32_t expert) const {
    if constexpr (kOn) record(tile == kNoTile ? Phase::kRehearse : phase, tile, column, expert, 0);
  }
  // One thread, after the last event.
  __device__ __forceinline__ void finish() const {
    if constexpr (kOn) {
      if (args.trace == nullptr) return;
      auto* const header = reinterpret_cast<TraceHeader*>(buffer());
      header->count = events;
      header->end_ns = Platform::now_ns();
    }
  }

 private:
  __device__ __forceinline__ void record(Phase phase, uint32_t index, uint32_t column, uint32_t expert,
                                         uint32_t depth) const {
    const uint32_t t = thread_anew();
    if (t % kEach != 0 || args.trace == nullptr) return;
    if (phase == Phase::kEpilogue && index == kNoTile) return;  // part of what is rehearsed
    uint64_t& start = starts[t / 32][depth];
    const uint64_t begun = start, now = Platform::now_ns();
    start = now;
    const uint32_t i = atomicAdd(&events, 1u);
    if (i >= kTraceEvents) return;
    TraceEvent* to = reinterpret_cast<TraceEvent*>(buffer() + sizeof(TraceHeader)) + i;
    *to = {begun, now, static_cast<uint16_t>(phase), static_cast<uint16_t>(t / 32), index, column, expert};
  }
  __device__ __forceinline__ uint8_t* buffer() const { return args.trace + blockIdx.x * kTraceBytesPerBlock; }
};

// What an engine has of spans (actors/engine.h).
template <class Trace>
class Spans {
 public:
  explicit __device__ __forceinline__ Spans(const Trace& trace) : trace_(trace) {}
  __device__ __forceinline__ void begin() const { trace_.begin(); }
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column) const {
    trace_.end(phase, index, column);
  }

 private:
  const Trace& trace_;
};

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

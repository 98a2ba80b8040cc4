// Writes to the trace buffer what a block's roles do, and when. If no trace is asked for, this code compiles to
// nothing. The file also has the function that tells the host the device's time. The host reads its own clock before
// and after each answer (csrc/cuda/clock.cpp).
#pragma once

#include "flashmoe/gpu/kernel_args.h"
#include "flashmoe/gpu/platform.cuh"

namespace flashmoe::gpu {

// For each warp, when the spans began in which its tracing thread is: [0] of the outer span, [1] of a span inside
// that one. They are in shared memory, because the mainloop has no registers left.
using TraceStarts = uint64_t[kWarps][2];

// Called first, by all threads: writes the beginning of the block's trace.
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

  // A span begins. A span at depth 1 is inside the span at depth 0.
  __device__ __forceinline__ void begin(uint32_t depth = 0) const {
    if constexpr (kOn) {
      const uint32_t t = thread_anew();
      if (t % kEach == 0) starts[t / 32][depth] = Platform::now_ns();
    }
  }
  // The span ends. If begin() is not called before the next end() at this depth, the next span begins here. So the
  // time between two tasks, with the trace's own stores, is part of the wait for the second task.
  __device__ __forceinline__ void end(Phase phase, uint32_t index, uint32_t column, uint32_t depth = 0) const {
    if constexpr (kOn) record(phase, index, column, kNoExpert, depth);
  }
  // The same for a product of expert `expert`. If the tile is kNoTile, the product was rehearsed.
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
    if (phase == Phase::kEpilogue && index == kNoTile) return;  // part of a rehearsal
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

// The part of an engine that traces spans (HasSpans in actors/engine.h).
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

// Run by one thread: tells the host the time, `times` times. It gives up when patience_ns have passed since it began.
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

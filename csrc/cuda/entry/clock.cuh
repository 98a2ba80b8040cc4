// The kernel that tells the time to calls that are traced, beside each kernel that may be.
#pragma once

#include "flashmoe/gpu/tracer.cuh"

extern "C" __global__ void flashmoe_clock(flashmoe::gpu::ClockPage* page, uint32_t times, uint64_t patience_ns) {
  flashmoe::gpu::answer_the_time(page, times, patience_ns);
}

// The clock of a GPU, which kernels use to trace, as the host sees it.
#pragma once

#include "cuda/launch.h"

namespace flashmoe::cuda {

// At host_ns (CLOCK_MONOTONIC), give or take error_ns, the device's global timer showed device_ns.
struct ClockReading {
  uint64_t host_ns, device_ns, error_ns;
};

// Launches one kernel, which answers many questions for the time through a mapped page. Returns the reading with the
// smallest error. `kernels` must be those of a cubin that traces, because no other cubin has that kernel. The device's
// context must be current, and the device idle. Throws Error if the device does not answer.
ClockReading read_clock(const Device& device, const Kernels& kernels, DriverStream stream);

}  // namespace flashmoe::cuda

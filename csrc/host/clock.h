// The clock by which waits end and reports give times.
#pragma once

#include <time.h>

#include <cstdint>

namespace flashmoe::host {

// CLOCK_MONOTONIC, which processes of one machine share.
inline uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace flashmoe::host

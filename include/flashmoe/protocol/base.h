// What every protocol header needs: the host/device markers and small integer helpers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
// Layout arithmetic runs on both sides; protocol steps run on the device only, because the Platform they are
// instantiated with has device members.
#define FLASHMOE_HD __host__ __device__ inline
#define FLASHMOE_FN __device__ inline
// Loops over small arrays that must stay in registers.
#define FLASHMOE_UNROLL    _Pragma("unroll")
#define FLASHMOE_NO_UNROLL _Pragma("unroll 1")
#else
#define FLASHMOE_HD inline
#define FLASHMOE_FN inline
#define FLASHMOE_UNROLL
#define FLASHMOE_NO_UNROLL
#endif

namespace flashmoe {

template <class T>
FLASHMOE_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
FLASHMOE_HD constexpr T align_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <class T>
FLASHMOE_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
FLASHMOE_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

FLASHMOE_HD constexpr uint64_t next_power_of_two(uint64_t v) {
  uint64_t p = 1;
  while (p < v) p *= 2;
  return p;
}

}  // namespace flashmoe

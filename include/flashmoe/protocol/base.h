// What every protocol header needs: the host/device markers and small integer helpers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmoe/spec/markers.h"

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

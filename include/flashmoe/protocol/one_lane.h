// What the lanes of a warp do together (MeetsInWarps, platform.h), for a warp of one lane. Platforms on the host
// inherit it.
#pragma once

#include <cstdint>

namespace flashmoe {

struct OneLane {
  static constexpr uint32_t kLanes = 1;
  static uint32_t lane() { return 0; }
  static void sync() {}
  static void team_sync() {}
  static uint32_t ballot(bool p) { return p ? 1 : 0; }
  template <class T>
  static T broadcast(T v, uint32_t) {
    return v;
  }
  static uint32_t exclusive_scan(uint32_t v, uint32_t& total) {
    total = v;
    return 0;
  }
  static uint32_t rank_among_equal(uint32_t, bool, bool& last) {
    last = true;
    return 0;
  }
};

}  // namespace flashmoe

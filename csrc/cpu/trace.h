// How each actor spent the time of a call: as a sum for each phase, and on request as events.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "flashmoe/spec/enums.h"

namespace flashmoe::cpu {

inline constexpr uint32_t kPhases = static_cast<uint32_t>(Phase::kEpilogue);  // phases before this one have sums
inline constexpr uint32_t kNoExpert = ~0u;

struct Event {
  uint32_t actor;  // 0: OS, i + 1: processor i
  Phase phase;
  uint64_t start_ns, end_ns;  // CLOCK_MONOTONIC
  uint32_t index, column;
  uint32_t expert = kNoExpert;  // of a product: local expert; in events that Context returns, the layer's expert
};

struct ActorTrace {
  uint32_t actor = 0;
  bool record_events = false;
  std::array<uint64_t, kPhases> ns{};
  std::array<uint64_t, kPhases> count{};
  uint64_t rows_sent = 0, entries_sent = 0;  // to other ranks, by dispatch and senders
  std::vector<Event> events{};

  void add(Phase phase, uint64_t start, uint64_t end, uint32_t index, uint32_t column, uint32_t expert = kNoExpert) {
    if (const auto p = static_cast<uint32_t>(phase); p < kPhases) {
      ns[p] += end - start;
      ++count[p];
    }
    if (record_events) events.push_back({actor, phase, start, end, index, column, expert});
  }
};

}  // namespace flashmoe::cpu

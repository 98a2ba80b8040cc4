// What a report or a trace says that an actor was doing.
#pragma once

#include "flashmoe/protocol/task.h"

namespace flashmoe {

// Between dispatch and wait comes a phase for each row of the program. Order and names are those of python/flashmoe/trace.py,
// but for programs of which Python knows nothing. kEpilogue is a part of a GPU's products, which have its time too.
inline constexpr uint32_t kFirstTaskPhase = 2;
enum class Phase : uint32_t {
  kGate,
  kDispatch,
  kReduce = kFirstTaskPhase + row_of(TaskKind::kReduce),
  kCombine = kFirstTaskPhase + row_of(TaskKind::kCombine),
  kWait = kFirstTaskPhase + kTaskRows,
  kSchedule,
  kEpilogue,
  kCount
};

FLASHMOE_HD constexpr Phase phase_of(uint32_t row) {
  return static_cast<Phase>(kFirstTaskPhase + row);
}

FLASHMOE_FN Phase phase_of_product(TaskKind kind) {
  return with_product(kind, [&]<uint32_t n>() { return phase_of(n); });
}

}  // namespace flashmoe

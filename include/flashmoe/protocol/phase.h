// What a report or a trace says that an actor was doing.
#pragma once

#include "flashmoe/protocol/base.h"

namespace flashmoe {

// Order and names are those of python/flashmoe/trace.py. kEpilogue is a part of a GPU's GEMM tasks, which have its time too.
enum class Phase : uint32_t {
  kGate,
  kDispatch,
  kGemm0,
  kGemm1,
  kReduce,
  kCombine,
  kWait,
  kSchedule,
  kEpilogue,
  kCount
};

}  // namespace flashmoe

// Finds out what went wrong in a call of the CPU engine.
#pragma once

#include <optional>

#include "flashmoe/protocol/call.h"

namespace flashmoe::cpu {

// The fault that ended an aborted call, in the form that the host puts into words (host/fault_message.h). This is this
// rank's own record if it found the fault, else a peer's. Nothing if nobody posted a fault. (A GPU hands the same to
// its host: gpu/leave.cuh.)
std::optional<HostFault> posted_fault(const Call& c);

}  // namespace flashmoe::cpu

// What went wrong in a call of the CPU engine.
#pragma once

#include <optional>

#include "flashmoe/protocol/call.h"

namespace flashmoe::cpu {

// The fault with which a call that was aborted ended, as the host words it (host/fault_message.h): this rank's own record
// if it found one, else a peer's. Nothing if nobody posted any. (A GPU hands its host the same: gpu/leave.cuh.)
std::optional<HostFault> posted_fault(const Call& c);

}  // namespace flashmoe::cpu

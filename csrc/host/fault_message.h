// What a fault record says, in words.
#pragma once

#include <string>

#include "flashmoe/protocol/call.h"
#include "host/error.h"
#include "host/group.h"

namespace flashmoe::host {

// The error of a call that ended with a fault: this rank's own record if it found one, else a peer's.
Error fault_error(const Call& call, const Group& group);

}  // namespace flashmoe::host

// The messages of faults.
#pragma once

#include <string>

#include "flashmoe/protocol/status.h"
#include "host/error.h"

namespace flashmoe::host {

// What a rank knows, besides the fault itself, when it reports a fault to its user.
struct Teller {
  uint32_t rank = 0;
  uint64_t timeout_ns = 0;
  // obituary: a sentence about the culprit if it is known to be gone (Group::obituary), else empty.
  std::string obituary;
};

// The error of a call that ended with this fault. `record.entered` is used if a wait expired, `record.mine` and
// `record.theirs` if ranks disagree.
Error fault_error(const HostFault& record, const Teller& teller);

// The error that the other ranks raise for a call that rank p has refused. reason: kReasonBytes bytes of memory, which
// p may write. last: the last of the refused calls that this error stands for; 0: this call alone.
Error refusal_error(uint32_t p, uint64_t epoch, const char* reason, uint64_t last = 0);

// Whether a call that noted this row raises an error. The context can be used again either way.
bool is_error(const RowNote& note, bool strict);
// The error for a row of this rank. experts: E.
Error row_error(const RowNote& note, uint32_t rank, uint32_t experts);

}  // namespace flashmoe::host

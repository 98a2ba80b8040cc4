// What a fault says, in words.
#pragma once

#include <string>

#include "flashmoe/protocol/status.h"
#include "host/error.h"

namespace flashmoe::host {

// What a rank knows, besides the fault, when it tells its user of one.
struct Teller {
  uint32_t rank = 0;
  uint64_t timeout_ns = 0;
  std::string obituary;  // a sentence about the culprit if it is known to be gone (Group::obituary), else empty
};

// The error of a call that ended with this fault. Of the record, `entered` matters where a wait expired, and `mine` and
// `theirs` where ranks disagree.
Error fault_error(const HostFault& record, const Teller& teller);

// The error of a call that rank p has refused, on the others; reason: kReasonBytes of memory that p may write. last: the last of
// the refused calls that the error stands for; 0: this one.
Error refusal_error(uint32_t p, uint64_t epoch, const char* reason, uint64_t last = 0);

// Whether a call in which a row was noted is to raise that. Its context goes on either way.
bool is_error(const RowNote& note, bool strict);
// That error, of a row of this rank's. experts: E.
Error row_error(const RowNote& note, uint32_t rank, uint32_t experts);

}  // namespace flashmoe::host

// What has arrived at a rank in a call that is over, counted from its packets.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/call.h"

namespace flashmoe::host {

// Adds to rows[p * El + l] the rows that rank p's tokens have with local expert l.
void count_rows(const Call& c, int32_t* rows);

// Rows that this rank's experts produced for other ranks, as they travelled: per entry, or summed per token.
uint64_t rows_returned(const Call& c);

}  // namespace flashmoe::host

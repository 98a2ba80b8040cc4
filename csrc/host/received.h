// What has arrived at a rank in a call that is over, counted from its packets.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/machines.h"

namespace flashmoe::host {

// Adds to rows[p * El + l] the rows that rank p's tokens have with local expert l.
void count_rows(const Call& c, int32_t* rows);

// Rows of results that this rank has sent home to other ranks: one for each entry, or summed for each token. Without
// sums of machines, which are not told by its packets alone.
uint64_t rows_returned(const Call& c, const Machines& m = {});

}  // namespace flashmoe::host

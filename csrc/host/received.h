// What a rank has received in a call that is over, counted from its packets.
#pragma once

#include <cstdint>

#include "flashmoe/protocol/machines.h"

namespace flashmoe::host {

// Adds to rows[p * El + l] the number of rows that rank p's tokens have with local expert l.
void count_rows(const Call& c, int32_t* rows);

// How many rows of results this rank has sent home to other ranks: one for each entry, or one sum for each token. Does
// not count sums of machines, because this rank's packets alone do not tell them.
uint64_t rows_returned(const Call& c, const Machines& m = {});

}  // namespace flashmoe::host

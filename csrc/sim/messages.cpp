#include "sim/messages.h"

#include "sim/machine.h"

namespace flashmoe::sim {

uint64_t bytes_of_batch(const SpreadCall& c, uint32_t relay, uint32_t n) {
  const Machines& m = c.spread;
  const RelayPlace to(c, m, relay, c.rank);
  const uint32_t each = m.batch_blocks(c.block_tokens(), c.memory.token_row_bytes), ranks = m.size(m.of[relay]);
  const uint32_t begin = n * each, end = min_of(begin + each, c.blocks());
  const uint32_t first = begin << c.policy.log2_block, last = min_of(end << c.policy.log2_block, c.shape.tokens);
  uint64_t bytes = uint64_t{last - first} * ranks * sizeof(uint16_t);  // counts
  for (uint32_t t = first; t < last; ++t) bytes += to.is_needed(t) ? c.memory.token_row_bytes : 0;
  for (uint32_t b = begin; b < end; ++b) {
    for (uint32_t i = 0; i < ranks; ++i) {
      const uint32_t owned = c.owned(m.rank_at(m.of[relay], i));
      bytes += (owned + 1) * sizeof(uint16_t) + to.offsets(b, i)[owned] * sizeof(Entry);
    }
  }
  return bytes;
}

uint64_t bytes_of_returns(const SpreadCall& c, uint32_t p, uint32_t g) {
  const RelayPlace from(c, c.spread, c.rank, p);
  uint64_t rows = 0;
  for (uint32_t t = 0; t < c.tokens_of(p); ++t) rows += from.is_needed(t) ? 1 : 0;
  return rows * bytes_of_group(c, g);
}

uint32_t bytes_of_group(const Call& c, uint32_t g) {
  const uint32_t column_bytes = kArch.task_features * 2;
  const uint32_t end = min_of(c.policy.group_first[g + 1] * column_bytes, c.memory.return_row_bytes);
  return end - c.policy.group_first[g] * column_bytes;
}

}  // namespace flashmoe::sim

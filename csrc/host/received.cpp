#include "host/received.h"

#include <algorithm>

namespace flashmoe::host {
namespace {

// Calls f(p, b, entries) for each packet (p, b) that has entries.
template <class F>
void for_each_packet(const Call& c, F&& f) {
  for (uint32_t p = 0; p < c.shape.ranks; ++p) {
    for (uint32_t b = 0; b < c.blocks_of(p); ++b) {
      if (const uint32_t entries = c.packet_size(p, b); entries != 0) f(p, b, entries);
    }
  }
}

}  // namespace

void count_rows(const Call& c, int32_t* rows) {
  const uint32_t experts = c.shape.routed_local_experts();
  for_each_packet(c, [&](uint32_t p, uint32_t b, uint32_t) {
    const uint16_t* offsets = c.packet_offsets(c.rank, p, b);
    for (uint32_t l = 0; l < experts; ++l) rows[p * experts + l] += offsets[l + 1] - offsets[l];
  });
}

uint64_t rows_returned(const Call& c, const Machines& m) {
  uint64_t rows = 0;
  for_each_packet(c, [&](uint32_t p, uint32_t b, uint32_t entries) {
    if (p == c.rank) return;
    if (!c.reduced()) {
      rows += entries;
      return;
    }
    if (m.sums && !m.together(p, c.rank)) return;
    const uint16_t* counts = c.packet_counts(c.rank, p, c.packet_first_token(p, b));
    rows +=
        static_cast<uint64_t>(std::count_if(counts, counts + c.packet_tokens(p, b), [](uint16_t n) { return n != 0; }));
  });
  return rows;
}

}  // namespace flashmoe::host

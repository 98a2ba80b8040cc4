// Tile formation: the entries of arriving packets become tiles of one expert each, whatever their source.
//
// State: per local expert one open tile, and how many have been closed and taken. It lives in shared memory of the OS
// block and only the OS warp touches it, lane per expert, without atomics. A tile's segments are posted stores to
// device memory as they come, its descriptor and its place among the expert's tiles two more when it closes; the OS
// warp never reads them back, processors do after acquiring a task.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

template <class P>
class TileFormer {
 public:
  struct Expert {
    uint32_t open;      // id of the open tile
    uint32_t rows;      // of the open tile, 0: none is open
    uint32_t segments;  // of the open tile
    uint32_t remote;    // the open tile has rows of another rank
    uint32_t closed;    // tiles ready for GEMM0 so far
    uint32_t taken;     // of those, published
  };
  // Packets consumed together: their offsets, which come from device memory, are loaded side by side.
  static constexpr uint32_t kBatch = 8;

  // experts: [El], uninitialised.
  FLASHMOE_FN TileFormer(const Call& call, Expert* experts) : c_(call), experts_(experts) {
    for (uint32_t l = P::lane(); l < c_.local_experts; l += P::kLanes) experts_[l] = {};
    P::sync();
  }

  // Appends the entries of packets (p, b) .. (p, b + n - 1), n <= kBatch, to the open tiles of their experts. Bit i of
  // `filled` says whether packet b + i has entries: one without has no offsets either. All lanes.
  FLASHMOE_FN void consume(uint32_t p, uint32_t b, uint32_t n, uint32_t filled) {
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      const bool mine = l < c_.local_experts;
      uint32_t next[kBatch], end[kBatch];
      FLASHMOE_UNROLL
      for (uint32_t i = 0; i < kBatch; ++i) {
        next[i] = end[i] = 0;
        if (i < n && (filled >> i & 1u) && mine) {
          const uint16_t* offsets = c_.packet_offsets(c_.rank, p, b + i);
          next[i] = offsets[l];
          end[i] = offsets[l + 1];
        }
      }
      Expert x = mine ? experts_[l] : Expert{};  // in registers for the batch
      FLASHMOE_UNROLL
      for (uint32_t i = 0; i < kBatch; ++i) {
        while (P::ballot(next[i] < end[i])) {
          open_tile(x, next[i] < end[i]);
          if (next[i] < end[i]) next[i] += append(x, p, b + i, next[i], end[i] - next[i]);
          close_tile(x, l, x.rows == c_.tile_rows);
        }
      }
      if (mine) experts_[l] = x;
    }
    P::sync();
  }

  // No more packets: the partial tiles are ready as they are. All lanes.
  FLASHMOE_FN void flush() {
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      const bool mine = l < c_.local_experts;
      Expert x = mine ? experts_[l] : Expert{};
      close_tile(x, l, x.rows != 0);
      if (mine) experts_[l] = x;
    }
    P::sync();
  }

  // Tiles made so far, and those of them that are ready and not yet taken. The same in every lane.
  FLASHMOE_FN uint32_t tiles() const { return tiles_; }
  FLASHMOE_FN uint32_t ready() const { return ready_; }

  // Takes a ready tile, of local expert `l` or of the next one that has any; l is left at its expert. Returns its
  // ordinal among the expert's tiles. All lanes, with the same l. Precondition: ready() > 0.
  FLASHMOE_FN uint32_t take(uint32_t& l) {
    if (experts_[l].taken == experts_[l].closed) l = find_ready(l);
    const uint32_t ordinal = experts_[l].taken;
    --ready_;
    P::sync();
    if (P::lane() == 0) experts_[l].taken = ordinal + 1;
    P::sync();
    return ordinal;
  }

 private:
  // The first expert after l, cyclically, with a ready tile; kLanes experts per step.
  FLASHMOE_FN uint32_t find_ready(uint32_t l) const {
    for (uint32_t base = 1; base < c_.local_experts; base += P::kLanes) {
      const uint32_t i = base + P::lane();
      bool has = false;
      if (i < c_.local_experts) {
        const Expert& x = experts_[(l + i) % c_.local_experts];
        has = x.taken != x.closed;
      }
      const uint32_t found = P::ballot(has);
      if (found != 0) return (l + base + lowest_bit<P>(found)) % c_.local_experts;
    }
    return l;
  }

  // Gives the lanes' experts that want one an open tile; ids are handed out in lane order.
  FLASHMOE_FN void open_tile(Expert& x, bool wanted) {
    const bool fresh = wanted && x.rows == 0;
    uint32_t total;
    const uint32_t id = tiles_ + count_before<P>(fresh, total);
    tiles_ += total;
    if (!fresh) return;
    x.open = id;
    x.segments = x.remote = 0;
  }

  // Puts as many of `available` entries as fit into the open tile. Returns how many.
  FLASHMOE_FN uint32_t append(Expert& x, uint32_t p, uint32_t b, uint32_t first, uint32_t available) {
    const uint32_t taken = min_of(available, c_.tile_rows - x.rows);
    c_.segments(x.open)[x.segments++] = {c_.packet_id(p, b), static_cast<uint16_t>(first),
                                         static_cast<uint16_t>(taken)};
    x.rows += taken;
    if (p != c_.rank) x.remote = 1;
    return taken;
  }

  // Writes the descriptors of the closing tiles and puts them behind their experts' other tiles.
  FLASHMOE_FN void close_tile(Expert& x, uint32_t l, bool closing) {
    if (closing) {
      *c_.tile(x.open) = Tile{l, x.rows, x.segments, x.remote, 0};
      *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, x.closed++) = x.open;
      x.rows = 0;
    }
    ready_ += count_lanes<P>(closing);
  }

  const Call& c_;
  Expert* experts_;
  uint32_t tiles_ = 0;
  uint32_t ready_ = 0;
};

}  // namespace flashmoe

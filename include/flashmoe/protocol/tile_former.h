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

  // Shared memory, uninitialised.
  struct Memory {
    Expert* experts;                // [El]
    uint32_t (*ranges)[P::kLanes];  // [kBatch] each lane's entries of the batch's packets: first, and end << 16
  };

  FLASHMOE_FN TileFormer(const Call& call, const Memory& memory)
      : c_(call), experts_(memory.experts), ranges_(memory.ranges) {
    for (uint32_t l = P::lane(); l < c_.local_experts; l += P::kLanes) experts_[l] = {};
    P::sync();
  }

  // Appends the entries of packets (p, b) .. (p, b + n - 1), n <= kBatch, to the open tiles of their experts. Bit i of
  // `filled` says whether packet b + i has entries: one without has no offsets either. All lanes.
  FLASHMOE_FN void consume(uint32_t p, uint32_t b, uint32_t n, uint32_t filled) {
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      const bool mine = l < c_.local_experts;
      load_ranges(p, b, n, mine ? filled : 0, l);
      Expert x = mine ? experts_[l] : Expert{};  // in registers for the batch
      // Not unrolled: a warp alone on its SM is held up by fetching code, not by this arithmetic.
      FLASHMOE_NO_UNROLL
      for (uint32_t i = 0; i < n; ++i) {
        uint32_t next = ranges_[i][P::lane()] & 0xffffu;
        const uint32_t end = ranges_[i][P::lane()] >> 16;
        while (P::ballot(next < end)) {
          open(x, next < end);
          if (next < end) next += append(x, p, b + i, next, end - next);
          close(x, l, x.rows == c_.tile_rows);
        }
      }
      if (mine) experts_[l] = x;
    }
    P::sync();
  }

  // No more packets: the partial tiles are ready as they are. All lanes.
  FLASHMOE_FN void flush() {
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      const bool mine = l < c_.local_experts;
      Expert x = mine ? experts_[l] : Expert{};
      close(x, l, x.rows != 0);
      if (mine) experts_[l] = x;
    }
    P::sync();
  }

  // Tiles made so far, and those of them that are ready and not yet taken. The same in every lane.
  FLASHMOE_FN uint32_t tiles() const { return tiles_; }
  FLASHMOE_FN uint32_t ready() const { return ready_; }

  // Takes up to kLanes ready tiles, expert by expert from local expert `l` on, cyclically; l moves on with them. Leaves
  // each one's place among all, ordinal * El + expert, in tiles[], and returns how many. All lanes, with the same l.
  FLASHMOE_FN uint32_t take(uint32_t& l, uint32_t* tiles) {
    uint32_t taken = 0;
    P::sync();  // tiles[] may still be being read
    // One round more than it takes to see every expert: the last may start in the middle of the first's.
    for (uint32_t seen = 0; ready_ > 0 && taken < P::kLanes && seen < c_.local_experts + P::kLanes; seen += P::kLanes) {
      const uint32_t base = l - l % P::kLanes;
      const uint32_t mine = base + P::lane();
      uint32_t ready = 0, first = 0;
      if (mine >= l && mine < c_.local_experts) {
        first = experts_[mine].taken;
        ready = experts_[mine].closed - first;
      }
      uint32_t total;
      const uint32_t place = taken + P::exclusive_scan(ready, total);
      const uint32_t room = place < P::kLanes ? min_of(ready, P::kLanes - place) : 0;
      for (uint32_t i = 0; i < room; ++i) tiles[place + i] = (first + i) * c_.local_experts + mine;
      if (room > 0) experts_[mine].taken = first + room;
      const uint32_t n = min_of(total, P::kLanes - taken);
      ready_ -= n;
      taken += n;
      // Full: go on with the first expert that has tiles left. Else with the next kLanes experts.
      const uint32_t left = P::ballot(room < ready);
      l = left != 0 ? base + lowest_bit<P>(left) : base + P::kLanes;
      if (l >= c_.local_experts) l = 0;
    }
    P::sync();
    return taken;
  }

 private:
  // Every lane's own column of ranges_: the loads of a batch are independent, and under way together.
  FLASHMOE_FN void load_ranges(uint32_t p, uint32_t b, uint32_t n, uint32_t filled, uint32_t l) {
    uint32_t range[kBatch];
    FLASHMOE_UNROLL
    for (uint32_t i = 0; i < kBatch; ++i) {
      range[i] = 0;
      if (i < n && (filled >> i & 1u)) {
        const uint16_t* offsets = c_.packet_offsets(c_.rank, p, b + i);
        range[i] = offsets[l] | static_cast<uint32_t>(offsets[l + 1]) << 16;
      }
    }
    FLASHMOE_UNROLL
    for (uint32_t i = 0; i < kBatch; ++i) ranges_[i][P::lane()] = range[i];
  }

  // Gives the lanes' experts that want one an open tile; ids are handed out in lane order. All lanes.
  FLASHMOE_FN void open(Expert& x, bool wanted) {
    const bool fresh = wanted && x.rows == 0;
    uint32_t total;
    const uint32_t id = tiles_ + count_before<P>(fresh, total);
    tiles_ += total;
    x.open = fresh ? id : x.open;
    x.segments = fresh ? 0 : x.segments;
    x.remote = fresh ? 0 : x.remote;
  }

  // Puts as many of `available` entries as fit into the open tile. Returns how many.
  FLASHMOE_FN uint32_t append(Expert& x, uint32_t p, uint32_t b, uint32_t first, uint32_t available) {
    const uint32_t taken = min_of(available, c_.tile_rows - x.rows);
    c_.segments(x.open)[x.segments++] = {c_.packet_id(p, b), static_cast<uint16_t>(first),
                                         static_cast<uint16_t>(taken)};
    x.rows += taken;
    x.remote |= p != c_.rank;
    return taken;
  }

  // Writes the shapes of the closing tiles and puts them behind their experts' other tiles. All lanes.
  FLASHMOE_FN void close(Expert& x, uint32_t l, bool closing) {
    const uint32_t closed = count_lanes<P>(closing);
    if (closed == 0) return;
    ready_ += closed;
    if (!closing) return;
    c_.tile(x.open)->shape = {l, x.rows, x.segments, x.remote};
    *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, x.closed++) = x.open;
    x.rows = 0;
  }

  const Call& c_;
  Expert* experts_;
  uint32_t (*ranges_)[P::kLanes];
  uint32_t tiles_ = 0;
  uint32_t ready_ = 0;
};

}  // namespace flashmoe

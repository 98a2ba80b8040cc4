// Tile formation: the entries of arriving packets become tiles of one expert each, whatever their source.
//
// State: per local expert one open tile and a list of full tiles not yet published. It lives in shared memory of the OS
// block and only the OS warp touches it, lane per expert, without atomics. A tile's segments are posted stores to device
// memory as they come, its descriptor one more when it closes; processors read both after acquiring a task.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

inline constexpr uint32_t kNoTile = 0xffffffffu;

template <class P>
class TileFormer {
 public:
  struct Expert {
    uint32_t open;         // id of the open tile, kNoTile: none
    uint32_t rows;         // of the open tile
    uint32_t segments;     // of the open tile
    uint32_t remote;       // the open tile has rows of another rank
    uint32_t first_ready;  // tiles ready for GEMM0, linked by tile_next; kNoTile: none
    uint32_t last_ready;
  };

  // experts: [El], uninitialised.
  FLASHMOE_FN TileFormer(const Call& call, Expert* experts) : c_(call), experts_(experts) {
    for (uint32_t l = P::lane(); l < c_.local_experts; l += P::kLanes) {
      experts_[l] = {kNoTile, 0, 0, 0, kNoTile, kNoTile};
    }
    P::sync();
  }

  // Appends the entries of packet (p, b) to the open tiles of their experts. All lanes.
  FLASHMOE_FN void consume(uint32_t p, uint32_t b) {
    const uint16_t* offsets = c_.packet_offsets(c_.rank, p, b);
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      uint32_t next = 0, end = 0;
      if (l < c_.local_experts) {
        next = offsets[l];
        end = offsets[l + 1];
      }
      while (P::ballot(next < end)) {
        open_tiles(l, next < end);
        bool full = false;
        if (next < end) {
          next += append(experts_[l], p, b, next, end - next);
          full = experts_[l].rows == c_.tile_rows;
        }
        close_tiles(l, full);
      }
    }
    P::sync();
  }

  // No more packets: the partial tiles are ready as they are. All lanes.
  FLASHMOE_FN void flush() {
    for (uint32_t base = 0; base < c_.local_experts; base += P::kLanes) {
      const uint32_t l = base + P::lane();
      close_tiles(l, l < c_.local_experts && experts_[l].open != kNoTile);
    }
    P::sync();
  }

  // Tiles made so far, and those of them that are ready and not yet taken. The same in every lane.
  FLASHMOE_FN uint32_t tiles() const { return tiles_; }
  FLASHMOE_FN uint32_t ready() const { return ready_; }

  // Takes a ready tile, of local expert `l` or of the next one that has any; l is left at its expert. All lanes, with
  // the same l. Precondition: ready() > 0.
  FLASHMOE_FN uint32_t take(uint32_t& l) {
    while (experts_[l].first_ready == kNoTile) l = find_ready(l);
    Expert& x = experts_[l];
    const uint32_t tile = x.first_ready;
    P::sync();
    if (P::lane() == 0) x.first_ready = tile == x.last_ready ? kNoTile : *link(tile);
    --ready_;
    P::sync();
    return tile;
  }

 private:
  FLASHMOE_FN uint32_t* link(uint32_t tile) const { return c_.workspace<uint32_t>(WorkField::kTileNext, tile); }

  // The first expert after l, cyclically, with a ready tile; kLanes experts per step.
  FLASHMOE_FN uint32_t find_ready(uint32_t l) const {
    for (uint32_t base = 1; base <= c_.local_experts; base += P::kLanes) {
      const uint32_t i = base + P::lane();
      const bool has = i <= c_.local_experts && experts_[(l + i) % c_.local_experts].first_ready != kNoTile;
      const uint32_t found = P::ballot(has);
      if (found == 0) continue;
      uint32_t lane = 0;
      while (!(found >> lane & 1u)) ++lane;
      return (l + base + lane) % c_.local_experts;
    }
    return l;
  }

  // Gives the lanes' experts that want one an open tile; ids are handed out in lane order.
  FLASHMOE_FN void open_tiles(uint32_t l, bool wanted) {
    const bool fresh = wanted && experts_[l].open == kNoTile;
    uint32_t total;
    const uint32_t id = tiles_ + count_before<P>(fresh, total);
    tiles_ += total;
    if (!fresh) return;
    Expert& x = experts_[l];
    x.open = id;
    x.rows = x.segments = x.remote = 0;
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

  // Writes the descriptors of the closing tiles and puts them behind their experts' ready tiles.
  FLASHMOE_FN void close_tiles(uint32_t l, bool closing) {
    if (closing) {
      Expert& x = experts_[l];
      *c_.tile(x.open) = Tile{l, x.rows, x.segments, x.remote, 0};
      if (x.first_ready == kNoTile) {
        x.first_ready = x.open;
      } else {
        *link(x.last_ready) = x.open;
      }
      x.last_ready = x.open;
      x.open = kNoTile;
    }
    ready_ += count_lanes<P>(closing);
  }

  const Call& c_;
  Expert* experts_;
  uint32_t tiles_ = 0;
  uint32_t ready_ = 0;
};

}  // namespace flashmoe

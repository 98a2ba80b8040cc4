// Tile formation: the entries of arriving packets become tiles of one expert each, whatever their source.
//
// A former serves every step-th local expert: on a GPU one warp per SM, so that all experts' tiles form at once; on the
// CPU the OS thread serves them all. An expert's state has one owner, needs no atomics, and lives in shared memory. The
// lanes go over packets: each copies its packet's entries of the expert to the places that a scan assigns.
#pragma once

#include "flashmoe/protocol/pending.h"

namespace flashmoe {

// What a former knows of an expert. The same in every lane.
struct FormedExpert {
  uint32_t open;         // id of the open tile
  uint32_t rows;         // of the open tile, 0: none is open
  uint32_t segments;     // of the open tile
  Segment last;          // its last segment
  uint32_t remote;       // the open tile has rows of another rank
  uint32_t closed;       // tiles closed so far
  uint32_t last_closed;  // id of the last of them
  uint32_t announced;    // of those, pushed to the ready list
};
// Shared memory, uninitialised: the states of local experts first, first + step, ...; step 0: of none.
struct FormerMemory {
  FormedExpert* experts;
  uint32_t first, step;
};

// kDepth: packets that a lane handles at a time.
template <class P, uint32_t kDepth = 1>
class TileFormer {
 public:
  FLASHMOE_FN TileFormer(const Call& call, const FormerMemory& memory) : c_(call), m_(memory) {
    const uint32_t el = c_.local_experts;
    count_ = m_.step == 0 || m_.first >= el ? 0 : ceil_div(el - m_.first, m_.step);
    for (uint32_t i = P::lane(); i < count_; i += P::kLanes) m_.experts[i] = {};
    P::sync();
  }

  // Takes over the entries of packets (p, b) .. (p, b + n - 1), n <= kLanes * kDepth. All lanes.
  FLASHMOE_FN void consume(uint32_t p, uint32_t b, uint32_t n) {
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 0; i < count_; ++i) consume_expert(i, p, b, n);
  }

  // Source p has no more packets. All lanes.
  FLASHMOE_FN void close(uint32_t p) {
    if (count_ == 0) return;
    close_source<P>(c_, p, count_);
    // Own rows arrive within microseconds of one another: an expert's tiles become ready together, so that they run
    // side by side while its weights are in the cache.
    if (p != c_.rank || c_.ranks == 1) return;  // alone, finish() has
    for (uint32_t i = 0; i < count_; ++i) announce(i);
  }

  // No more packets at all: the partial tiles are ready as they are. All lanes.
  FLASHMOE_FN void finish() {
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 0; i < count_; ++i) {
      const FormedExpert x = m_.experts[i];
      if (x.rows != 0) {
        const uint32_t l = expert(i);
        if (P::lane() == 0) write_tile(x.open, l, x.rows, x.segments, x.remote, x.closed);
        P::sync();
        if (P::lane() == 0) {
          ++m_.experts[i].closed;
          m_.experts[i].last_closed = x.open;
          m_.experts[i].rows = 0;
        }
        P::sync();
      }
      announce(i);
    }
  }

  // After finish(), and after close() of every source: nothing is pushed to the ready list behind this. All lanes.
  FLASHMOE_FN void report() {
    if (count_ == 0) return;
    uint32_t tiles = 0;
    for (uint32_t i = 0; i < count_; ++i) tiles += m_.experts[i].closed;
    push_ready<P>(c_, P::lane() == 0, {TaskKind::kFormed, count_, tiles});
  }

 private:
  FLASHMOE_FN uint32_t expert(uint32_t i) const { return m_.first + i * m_.step; }

  FLASHMOE_FN void consume_expert(uint32_t i, uint32_t p, uint32_t b, uint32_t n) {
    const uint32_t l = expert(i);
    uint32_t first[kDepth], count[kDepth];  // of the packets lane(), lane() + kLanes, ...
    FLASHMOE_UNROLL
    for (uint32_t d = 0; d < kDepth; ++d) {
      first[d] = count[d] = 0;
      if (P::lane() + d * P::kLanes < n) {
        const uint16_t* offsets = c_.packet_offsets(c_.rank, p, b + P::lane() + d * P::kLanes);
        first[d] = offsets[l];
        count[d] = offsets[l + 1];
      }
    }
    uint32_t mine = 0;
    FLASHMOE_UNROLL
    for (uint32_t d = 0; d < kDepth; ++d) mine += count[d] -= first[d];
    uint32_t total;
    uint32_t before = P::exclusive_scan(mine, total);
    if (total == 0) return;
    FormedExpert x = m_.experts[i];
    const uint32_t end = x.rows + total;
    // Tiles that these rows begin; the open one goes on first.
    const bool goes_on = x.rows != 0;
    const uint32_t fresh = ceil_div(end, c_.tile_rows) - (goes_on ? 1 : 0);
    uint64_t id = 0;
    if (fresh != 0) {
      if (P::lane() == 0) id = P::fetch_add(&c_.control()->tiles.value, uint64_t{fresh});
      id = P::broadcast(id, 0);
    }
    const uint32_t first_id = static_cast<uint32_t>(id) - (goes_on ? 1 : 0);  // of the n-th tile: first_id + n
    auto tile_id = [&](uint32_t nth) { return goes_on && nth == 0 ? x.open : first_id + nth; };

    FLASHMOE_UNROLL
    for (uint32_t d = 0; d < kDepth; ++d) {
      copy_rows(p, b + P::lane() + d * P::kLanes, first[d], count[d], x.rows + before, tile_id);
      before += count[d];
    }
    expect_rows<P>(c_, p, total);
    extend(x, tile_id(0), p, min_of(total, c_.tile_rows - x.rows));
    const uint32_t full = end / c_.tile_rows;
    P::sync();  // every lane's rows before anyone's announcement
    for (uint32_t nth = P::lane(); nth < full; nth += P::kLanes) {
      const bool head = nth == 0;
      if (!head) *c_.segments(tile_id(nth)) = {p, c_.tile_rows};
      write_tile(tile_id(nth), l, c_.tile_rows, head ? x.segments : 1, head ? x.remote : p != c_.rank, x.closed + nth);
    }
    if (full != 0) {  // the last of the new tiles is the open one now, if it has rows
      x.closed += full;
      x.last_closed = tile_id(full - 1);
      x.open = tile_id(full);
      x.rows = end % c_.tile_rows;
      x.segments = 0;
      x.remote = 0;
      if (x.rows != 0) extend(x, x.open, p, x.rows);
    } else {
      x.open = tile_id(0);
      x.rows = end;
    }
    P::sync();
    if (P::lane() == 0) m_.experts[i] = x;
    P::sync();
    if (p != c_.rank) announce(i);
  }

  // Copies `count` entries of packet (p, b) from the first-th on to the rows from `place` on, counted from the begin of
  // the tile that goes on or begins.
  template <class TileId>
  FLASHMOE_FN void copy_rows(uint32_t p, uint32_t b, uint32_t first, uint32_t count, uint32_t place,
                             TileId&& tile_id) const {
    constexpr uint32_t kFlight = 4;  // entries on their way at a time
    if (count == 0) return;
    const Entry* entries = c_.packet_entries(c_.rank, p, c_.packet_first_token(p, b)) + first;
    uint32_t nth = place / c_.tile_rows, row = place % c_.tile_rows;
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < count; base += kFlight) {
      Entry e[kFlight];
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        if (base + j < count) e[j] = entries[base + j];
      }
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        if (base + j >= count) break;
        *c_.tile_row(tile_id(nth), row) = {e[j].token, static_cast<uint16_t>(p), e[j].k, e[j].ordinal, e[j].weight};
        if (++row == c_.tile_rows) {
          row = 0;
          ++nth;
        }
      }
    }
  }

  // `rows` rows of rank p join the open tile, whose id is `tile`: its segments say so.
  FLASHMOE_FN void extend(FormedExpert& x, uint32_t tile, uint32_t p, uint32_t rows) const {
    if (x.segments != 0 && x.last.source == p) {
      x.last.count += rows;
    } else {
      x.last = {p, rows};
      ++x.segments;
    }
    x.remote |= p != c_.rank;
    if (P::lane() == 0) c_.segments(tile)[x.segments - 1] = x.last;
  }

  FLASHMOE_FN void write_tile(uint32_t tile, uint32_t l, uint32_t rows, uint32_t segments, uint32_t remote,
                              uint32_t nth) const {
    c_.tile(tile)->shape = {l, rows, segments, remote};
    *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, nth) = tile;
  }

  // Tells the scheduler of the expert's closed tiles. All lanes.
  FLASHMOE_FN void announce(uint32_t i) {
    const FormedExpert x = m_.experts[i];
    const uint32_t l = expert(i);
    for (uint32_t base = x.announced; base < x.closed; base += P::kLanes) {
      const uint32_t nth = base + P::lane();
      const bool has = nth < x.closed;
      // The last one is known: an expert with one tile need not wait for memory.
      const bool last = nth + 1 == x.closed;
      const uint32_t tile = has && !last ? *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, nth) : x.last_closed;
      push_ready<P>(c_, has, {TaskKind::kGemm0, 0, tile});
    }
    P::sync();
    if (P::lane() == 0) m_.experts[i].announced = x.closed;
    P::sync();
  }

  const Call& c_;
  const FormerMemory m_;
  uint32_t count_;  // experts served
};

}  // namespace flashmoe

// Tile formation: the entries of arriving packets become tiles of one expert each, whatever their source.
//
// A former serves every step-th local expert: on a GPU, many blocks have a former, which is one warp, so that the tiles
// of all experts form at the same time; on the CPU the OS thread serves all experts. An expert's state has one owner,
// needs no atomics, and lives in shared memory. Packets are taken in slices of kLanes, one a lane; a scan over the
// lanes' numbers of entries says to which rows of the tiles each lane copies its entries.
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
  uint32_t announced;    // of the closed tiles, those pushed to the ready list
};
// Shared memory, uninitialised: the states of local experts first, first + step, ... If step is 0, the former serves
// none.
struct FormerMemory {
  FormedExpert* experts;
  uint32_t first, step;
};

// kDepth: packets that a lane handles at a time.
template <class P, uint32_t kDepth>
class TileFormer {
 public:
  FLASHMOE_FN TileFormer(const Call& call, const FormerMemory& memory)
      : c_(call),
        m_(memory),
        first_experts_(call.shape.ranks == 1
                           ? ~0u
                           : ceil_div(call.shape.routed_local_experts(), max_of(call.policy.order.own_first, 1u))) {
    const uint32_t el = c_.shape.local_experts;
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
    if (c_.shape.ranks == 1) return;  // finish() announces
    // Announces the full tiles that were held back, until there were more of them (kFirstTiles) or until another
    // rank's packets were here (OrderPolicy::own_first).
    if (p != c_.rank) first_experts_ = ~0u;
    for (uint32_t i = 0; i < count_; ++i) announce(i);
  }

  // No more packets at all: the partial tiles are ready as they are. All lanes.
  FLASHMOE_FN void finish() {
    first_experts_ = ~0u;
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
      if constexpr (kIsBackward || kTrainsInGroup) {
        if (P::lane() == 0) *c_.expert_tile_count(expert(i)) = m_.experts[i].closed;
      }
    }
  }

  // After finish(), and after close() of every source: nothing is pushed to the ready list behind this. All lanes.
  FLASHMOE_FN void report() {
    if (count_ == 0) return;
    uint32_t tiles = 0;
    for (uint32_t i = 0; i < count_; ++i) tiles += m_.experts[i].closed;
    push_ready<P>(c_, P::lane() == 0, Ready::formed(count_, tiles));
  }

 private:
  // An expert's full tiles of own rows are announced together when all own packets are here, microseconds after the
  // first packet, so that the tiles run side by side while the expert's weights are in the cache. There are two
  // exceptions, so that tasks begin while later rows are copied. First, the first full tiles are announced when there
  // are this many.
  static constexpr uint32_t kFirstTiles = 4;
  // Second, before these, the very first tile is announced alone, as soon as it is full, if the first tiles of all
  // experts together have at most this number of GEMM0 tasks for each cluster. (More such tasks would keep the
  // clusters busy for long, each with weights that no task beside it reads.)
  static constexpr uint32_t kFirstTasks = 2;
  // The number of entries whose loads a lane has under way at a time: as many as registers allow.
  static constexpr uint32_t kFlight = 4;

  FLASHMOE_FN uint32_t expert(uint32_t i) const { return m_.first + i * m_.step; }

  // The expert's entries in one packet, in one register.
  struct Span {
    uint32_t word = 0;
    FLASHMOE_FN static Span between(uint32_t first, uint32_t end) { return {first | (end - first) << 16}; }
    FLASHMOE_FN uint32_t first() const { return word & 0xffffu; }
    FLASHMOE_FN uint32_t count() const { return word >> 16; }
  };
  // Ids of the tiles that rows go to: `head`, the open tile or a new one; then rest + 1, rest + 2, ..., all new.
  struct TileIds {
    uint32_t head, rest;
    FLASHMOE_FN uint32_t nth(uint32_t n) const { return n == 0 ? head : rest + n; }
  };

  FLASHMOE_FN void consume_expert(uint32_t i, uint32_t p, uint32_t b, uint32_t n) {
    const uint32_t l = expert(i);
    if (p != c_.rank && c_.shape.is_shared(l)) return;  // other ranks have shared experts of their own
    Span span[kDepth];                                  // of the packets lane(), lane() + kLanes, ...
    FLASHMOE_UNROLL
    for (uint32_t d = 0; d < kDepth; ++d) {
      if (P::lane() + d * P::kLanes < n) {
        const uint16_t* offsets = c_.packet_offsets(c_.rank, p, b + P::lane() + d * P::kLanes);
        span[d] = Span::between(offsets[l], offsets[l + 1]);
      }
    }
    uint32_t mine = 0;
    FLASHMOE_UNROLL
    for (uint32_t d = 0; d < kDepth; ++d) mine += span[d].count();
    uint32_t total;
    P::exclusive_scan(mine, total);
    if (total == 0) return;
    uint32_t next = begin_tiles(m_.experts[i].rows, total);
    expect_rows<P>(c_, p, total);
    // Slice by slice of kLanes packets, so that the first tasks begin while later rows are still being copied.
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < n; base += P::kLanes) {
      while (consume_slice(i, p, b + base, span[0], next)) {
      }
      FLASHMOE_UNROLL
      for (uint32_t d = 1; d < kDepth; ++d) span[d - 1] = span[d];  // span[base / kLanes] would put span into memory
    }
    if (p != c_.rank) announce(i);
  }

  // Takes ids for the tiles that `total` more rows begin if the open tile has `rows` rows, and returns the first id.
  // (With tiles of 256 rows, 200 rows and 400 more fill the open tile and begin two.) All lanes.
  FLASHMOE_FN uint32_t begin_tiles(uint32_t rows, uint32_t total) const {
    const uint32_t fresh = ceil_div(rows + total, c_.policy.tile_rows) - (rows != 0 ? 1 : 0);
    if (fresh == 0) return 0;
    uint64_t id = 0;
    if (P::lane() == 0) id = P::fetch_add(&c_.control()->tiles.value, uint64_t{fresh});
    return static_cast<uint32_t>(P::broadcast(id, 0));
  }

  // Whether the expert's tiles must not be announced yet, see OrderPolicy::own_first. Tiles of the shared expert
  // never wait, because they get no rows of other ranks; they fill the time until such rows are here.
  FLASHMOE_FN bool waits(uint32_t i) const { return expert(i) >= first_experts_ && !c_.shape.is_shared(expert(i)); }

  // Whether an expert's first tile is announced by itself, see kFirstTasks.
  FLASHMOE_FN bool announces_first() const {
    return c_.shape.local_experts * c_.policy.columns[kFirst] <= kFirstTasks * c_.policy.clusters;
  }

  // Takes over the entries of packets (p, b) .. (p, b + kLanes - 1), one packet a lane; `span` says which entries of
  // the lane's packet. next: id of the next tile to begin. If the first tile is announced alone, this takes only the
  // packets that fill that tile, and returns true. Then `span` has what remains for another call. All lanes.
  FLASHMOE_FN bool consume_slice(uint32_t i, uint32_t p, uint32_t b, Span& span, uint32_t& next) {
    uint32_t total;
    const uint32_t before = P::exclusive_scan(span.count(), total);
    if (total == 0) return false;
    const uint32_t rows = m_.experts[i].rows;
    const bool first = m_.experts[i].announced == 0 && announces_first() && !waits(i);
    const uint32_t lanes = first ? count_lanes<P>(rows + before < c_.policy.tile_rows) : P::kLanes;
    if (lanes < P::kLanes) total = P::broadcast(before, lanes);
    const Span now = P::lane() < lanes ? span : Span{};
    if (P::lane() < lanes) span = {};
    const uint32_t goes_on = rows != 0 ? 1 : 0;
    const TileIds ids = {goes_on ? m_.experts[i].open : next, next - goes_on};
    next = ids.rest + ceil_div(rows + total, c_.policy.tile_rows);
    copy_rows(p, b, now, before, total, rows, ids);
    add_rows(i, p, total, ids);
    const uint32_t closed = m_.experts[i].closed, announced = m_.experts[i].announced;
    if ((first && closed != 0) || (announced < kFirstTiles && closed >= announced + kFirstTiles)) announce(i);
    return lanes < P::kLanes;
  }

  // Copies the lanes' spans, together `total` entries of packets (p, b), (p, b + 1), ..., to rows `rows`, rows + 1,
  // ... Rows are counted through all the tiles, from row 0 of the first. before: entries of the lower lanes. All
  // lanes.
  FLASHMOE_FN void copy_rows(uint32_t p, uint32_t b, const Span& span, uint32_t before, uint32_t total, uint32_t rows,
                             const TileIds& ids) const {
    const Entry* slice = c_.packet_entries(c_.rank, p, c_.packet_first_token(p, b));
    const Entry* mine = c_.packet_entries(c_.rank, p, c_.packet_first_token(p, b + P::lane())) + span.first();
    // New tiles have consecutive ids, and tiles lie in memory by id: so the rows of all but the first are one array.
    const uint32_t tile_rows = c_.policy.tile_rows;
    Row* const head = c_.tile_row(ids.head, 0) + rows;
    Row* const rest = c_.tile_row(ids.rest, 0) + rows;
    auto put = [&](uint32_t n, const Entry& e) {
      (rows + n < tile_rows ? head : rest)[n] = {e.token, static_cast<uint16_t>(p), e.k, e.ordinal, e.weight};
    };
    // If no packet has more entries than a lane loads at a time, nothing is gained by sharing packets among lanes.
    if (P::kLanes == 1 || P::ballot(span.count() > kFlight) == 0) {
      copy_apart(mine, span.count(), before, put);
    } else {
      copy_together(slice, static_cast<uint32_t>(mine - slice), before, total, put);
    }
  }

  // Each lane copies the entries of its own packet.
  template <class Put>
  FLASHMOE_FN void copy_apart(const Entry* from, uint32_t count, uint32_t before, Put&& put) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < count; base += kFlight) {
      Entry e[kFlight];
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        if (base + j < count) e[j] = from[base + j];
      }
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        if (base + j < count) put(before + base + j, e[j]);
      }
    }
  }

  // Each lane copies every kLanes-th of all entries, whatever packet they are in, so that neighbouring lanes load and
  // store neighbouring entries. Each lane's own span begins `at` entries behind `slice`. All lanes.
  template <class Put>
  FLASHMOE_FN void copy_together(const Entry* slice, uint32_t at, uint32_t before, uint32_t total, Put&& put) const {
    const uint32_t shift = at - before;
    FLASHMOE_NO_UNROLL
    for (uint32_t base = P::lane(); base - P::lane() < total; base += kFlight * P::kLanes) {
      uint32_t packet[kFlight] = {};  // the packet of each entry n: the last packet with at most n entries before it
      FLASHMOE_UNROLL
      for (uint32_t step = P::kLanes / 2; step != 0; step /= 2) {
        FLASHMOE_UNROLL
        for (uint32_t j = 0; j < kFlight; ++j) {
          if (P::broadcast(before, packet[j] + step) <= base + j * P::kLanes) packet[j] += step;
        }
      }
      Entry e[kFlight];
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        const uint32_t n = base + j * P::kLanes;
        const uint32_t from = P::broadcast(shift, packet[j]) + n;
        if (n < total) e[j] = slice[from];
      }
      FLASHMOE_UNROLL
      for (uint32_t j = 0; j < kFlight; ++j) {
        const uint32_t n = base + j * P::kLanes;
        if (n < total) put(n, e[j]);
      }
    }
  }

  // Adds `total` rows of rank p, which have been copied, to the expert's tiles, and closes the tiles that are full.
  // All lanes.
  FLASHMOE_FN void add_rows(uint32_t i, uint32_t p, uint32_t total, const TileIds& ids) {
    const uint32_t l = expert(i);
    FormedExpert x = m_.experts[i];
    const uint32_t end = x.rows + total, full = end / c_.policy.tile_rows;
    extend(x, ids.head, p, min_of(total, c_.policy.tile_rows - x.rows));
    for (uint32_t n = P::lane(); n < full; n += P::kLanes) {
      const bool head = n == 0;
      if (!head) *c_.segments(ids.nth(n)) = {p, c_.policy.tile_rows};
      write_tile(ids.nth(n), l, c_.policy.tile_rows, head ? x.segments : 1, head ? x.remote : p != c_.rank,
                 x.closed + n);
    }
    x.open = ids.nth(full);
    x.rows = end - full * c_.policy.tile_rows;
    if (full != 0) {  // the open tile, if it has rows, is a new one
      x.closed += full;
      x.last_closed = ids.nth(full - 1);
      x.segments = 0;
      x.remote = 0;
      if (x.rows != 0) extend(x, x.open, p, x.rows);
    }
    P::sync();  // all lanes have read the state, and written rows and shapes, which announce() will release
    if (P::lane() == 0) m_.experts[i] = x;
    P::sync();
  }

  // Appends `rows` rows of rank p to the segments of the open tile, whose id is `tile`.
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
    if constexpr (kInTurn) c_.tile(tile)->nth = nth;
    *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, nth) = tile;
  }

  // Pushes the expert's closed tiles to the ready list (a tile of the shared expert once for each slice), unless they
  // must wait. All lanes.
  FLASHMOE_FN void announce(uint32_t i) {
    const FormedExpert x = m_.experts[i];
    const uint32_t l = expert(i);
    if (waits(i)) return;
    for (uint32_t base = x.announced; base < x.closed; base += P::kLanes) {
      const uint32_t nth = base + P::lane();
      const bool has = nth < x.closed;
      // The last tile's id is at hand: an expert with one tile need not wait for memory.
      const bool last = nth + 1 == x.closed;
      const uint32_t tile = has && !last ? *c_.workspace<uint32_t>(WorkField::kExpertTiles, l, nth) : x.last_closed;
      if (!c_.shape.is_shared(l)) {
        push_ready<P>(c_, has, Ready::of_tile(Product<kFirst>::kKind, {tile}, l, 0));
        continue;
      }
      FLASHMOE_NO_UNROLL
      for (uint32_t s = 0; s < c_.shape.shared; ++s) {
        push_ready<P>(c_, has, Ready::of_tile(Product<kFirst>::kKind, TileIndex::of_slice(tile, s), l + s, 0));
      }
    }
    P::sync();
    if (P::lane() == 0) m_.experts[i].announced = x.closed;
    P::sync();
  }

  const Call& c_;
  const FormerMemory m_;
  uint32_t count_;          // experts served
  uint32_t first_experts_;  // routed local experts below this number do not wait, see waits()
};

}  // namespace flashmoe

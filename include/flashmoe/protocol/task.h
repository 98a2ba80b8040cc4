// Tasks, tiles and the entries they are made of. Every type here is shared by host, device and peers.
#pragma once

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/program.h"

namespace flashmoe {

// A tile as a task names it. In GEMM0 a tile of the shared expert is worked on slice by slice (CallShape::shared): the upper
// bits then say of which slice the task is, counted from 1.
struct TileIndex {
  static constexpr uint32_t kTileBits = 22, kMostTiles = 1u << kTileBits, kMostSlices = (1u << (32 - kTileBits)) - 1;

  uint32_t bits;

  FLASHMOE_HD static constexpr TileIndex of_slice(uint32_t tile, uint32_t slice) {
    return {tile | (slice + 1) << kTileBits};
  }
  FLASHMOE_HD constexpr uint32_t number() const { return bits & (kMostTiles - 1); }
  // The same of tasks that have no slice: all but GEMM0's.
  FLASHMOE_HD constexpr uint32_t whole() const { return bits; }
  FLASHMOE_HD constexpr bool has_slice() const { return bits >= kMostTiles; }
  // 0 where it says none.
  FLASHMOE_HD constexpr uint32_t slice() const { return has_slice() ? (bits >> kTileBits) - 1 : 0; }
  FLASHMOE_HD friend constexpr bool operator==(TileIndex a, TileIndex b) { return a.bits == b.bits; }
};

// A task as it stands in the ready queue: one word, so that publishing it is one store and reading it one load. What each
// kind is of: TaskKind.
struct Task {
  TaskKind kind = TaskKind::kNone;
  uint32_t column = 0;  // the block of columns; behind the stop: which of its group's tasks
  uint32_t of = 0;      // read as what the kind says it is:

  FLASHMOE_HD constexpr TileIndex tile() const { return {of}; }
  FLASHMOE_HD constexpr uint32_t group() const { return of; }

  // Non-zero for every kind but kNone: zero is an empty slot.
  FLASHMOE_HD constexpr uint64_t pack() const {
    return (static_cast<uint64_t>(kind) << 56) | (static_cast<uint64_t>(column & 0xffffffu) << 32) | of;
  }
  FLASHMOE_HD static constexpr Task unpack(uint64_t word) {
    return {static_cast<TaskKind>(word >> 56), static_cast<uint32_t>(word >> 32) & 0xffffffu,
            static_cast<uint32_t>(word)};
  }
};

// What a word of the ready list, which is packed as a task is, says has become ready: a tile, for a product, with its local
// expert, whose weights its tasks read (the shared expert's slices count as experts here), and whether it has rows of another
// rank; or that so many more local experts have all their tiles, so many.
class Ready {
 public:
  FLASHMOE_HD static constexpr Ready of_tile(TaskKind product, TileIndex tile, uint32_t expert, uint32_t remote) {
    return Ready({product, expert << 1 | remote, tile.bits});
  }
  FLASHMOE_HD static constexpr Ready formed(uint32_t experts, uint32_t tiles) {
    return Ready({TaskKind::kFormed, experts, tiles});
  }
  FLASHMOE_HD static constexpr Ready unpack(uint64_t word) { return Ready(Task::unpack(word)); }
  FLASHMOE_HD constexpr uint64_t pack() const { return word_.pack(); }

  FLASHMOE_HD constexpr TaskKind kind() const { return word_.kind; }
  // Of a tile.
  FLASHMOE_HD constexpr TileIndex tile() const { return word_.tile(); }
  FLASHMOE_HD constexpr uint32_t expert() const { return word_.column >> 1; }
  FLASHMOE_HD constexpr bool remote() const { return (word_.column & 1u) != 0; }
  // Of kFormed.
  FLASHMOE_HD constexpr uint32_t experts() const { return word_.column; }
  FLASHMOE_HD constexpr uint32_t tiles() const { return word_.of; }

 private:
  FLASHMOE_HD constexpr explicit Ready(const Task& word) : word_(word) {}

  Task word_;
};

// Whether a kind known at run time is in a set known at compile time (kinds_where()): one comparison for a set of one.
template <uint32_t kKinds>
FLASHMOE_HD constexpr bool is_one_of(TaskKind kind) {
  if constexpr (kOnly<kKinds> != TaskKind::kNone) {
    return kind == kOnly<kKinds>;
  } else {
    return (kKinds >> static_cast<uint32_t>(kind) & 1u) != 0;
  }
}

// Calls f, a lambda `[&]<uint32_t n>() {..}`, with the number of the product that `kind` is; returns what f returns.
template <uint32_t n = 0, class F>
FLASHMOE_FN decltype(auto) with_product(TaskKind kind, F&& f) {
  if constexpr (n + 1 < kProducts) {
    return kind == Product<n>::kKind ? f.template operator()<n>() : with_product<n + 1>(kind, f);
  } else {
    return f.template operator()<n>();
  }
}

// What reports and traces call a product: by its number (host only: device code cannot read the table), by its kind.
constexpr Phase phase_of(uint32_t product) {
  return kProgram[product].phase;
}
FLASHMOE_FN Phase phase_of_product(TaskKind kind) {
  return with_product(kind, [&]<uint32_t n>() { return Product<n>::kPhase; });
}

// Calls f, likewise, for every product.
template <uint32_t n = 0, class F>
FLASHMOE_FN void for_each_product(F&& f) {
  if constexpr (n < kProducts) {
    f.template operator()<n>();
    for_each_product<n + 1>(f);
  }
}

// One choice (token, k) of a packet, as the destination needs it.
struct Entry {
  uint32_t token;    // index at its home rank: names the row, and the place of the result
  uint16_t k;        // which of the token's K choices
  uint16_t ordinal;  // `reduced`: which of the token's entries on this destination, in ascending k
  float weight;      // combine weight, applied in fp32 before the expert's row is rounded
};
static_assert(sizeof(Entry) == 12);

// One row of a tile: an entry, and the rank it came from.
struct alignas(16) Row {
  uint32_t token;    // as in Entry
  uint16_t source;   // home rank
  uint16_t k;        // as in Entry
  uint32_t ordinal;  // as in Entry
  float weight;      // as in Entry
};
static_assert(sizeof(Row) == 16);

// Consecutive rows of a tile that came from one rank.
struct Segment {
  uint32_t source;
  uint32_t count;
};
static_assert(sizeof(Segment) == 8);

// Up to tile_rows rows of one local expert, from any sources. One cache line, so that the counters of two tiles,
// which different processors bump, never share one.
struct alignas(128) Tile {
  // Written at once, when the tile closes.
  struct alignas(16) Shape {
    uint32_t expert;    // local index
    uint32_t rows;      // real rows
    uint32_t segments;  // used slots of the tile's segment list
    uint32_t remote;    // 1 if any row came from another rank
  };
  Shape shape;
  uint32_t done[kProducts];  // blocks of columns retired, of each product that another follows; zero between calls
  uint32_t nth;              // which of its expert's tiles it is (where tiles are in canonical order: kInTurn)
};
static_assert(sizeof(Tile) == 128);

}  // namespace flashmoe

// Tasks, tiles and the entries they are made of. Every type here is shared by host, device and peers.
#pragma once

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/program.h"

namespace flashmoe {

// A task as it stands in the ready queue: one word, so that publishing it is one store and reading it one load.
//   index   the tile (TileIndex); or, behind the stop of a backward pass, a group of weights (sm90/gradients/weights.cuh)
//   column  the block of columns
// In the ready list the word says what has become ready: tile `index` for a product (column: see
// ReadyTile); or, of kind kFormed, that `column` more local experts have all their tiles, which are `index` in all.
struct Task {
  TaskKind kind = TaskKind::kNone;
  uint32_t column = 0;
  uint32_t index = 0;

  // Non-zero for every kind but kNone: zero is an empty slot.
  FLASHMOE_HD constexpr uint64_t pack() const {
    return (static_cast<uint64_t>(kind) << 56) | (static_cast<uint64_t>(column & 0xffffffu) << 32) | index;
  }
  FLASHMOE_HD static constexpr Task unpack(uint64_t word) {
    return {static_cast<TaskKind>(word >> 56), static_cast<uint32_t>(word >> 32) & 0xffffffu,
            static_cast<uint32_t>(word)};
  }
};

// A tile as a task names it. In GEMM0 a tile of the shared expert is worked on slice by slice (CallShape::shared): the upper
// bits then say of which slice the task is, counted from 1.
struct TileIndex {
  static constexpr uint32_t kTileBits = 22, kMostTiles = 1u << kTileBits, kMostSlices = (1u << (32 - kTileBits)) - 1;

  FLASHMOE_HD static constexpr uint32_t of_slice(uint32_t tile, uint32_t slice) {
    return tile | (slice + 1) << kTileBits;
  }
  FLASHMOE_HD static constexpr uint32_t tile(uint32_t index) { return index & (kMostTiles - 1); }
  FLASHMOE_HD static constexpr bool has_slice(uint32_t index) { return index >= kMostTiles; }
  // 0 where it says none.
  FLASHMOE_HD static constexpr uint32_t slice(uint32_t index) {
    return has_slice(index) ? (index >> kTileBits) - 1 : 0;
  }
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

// What a word of the ready list has in place of a task's column: the tile's local expert, whose weights its tasks read (the
// shared expert's slices count as experts here), and whether it has rows of another rank.
struct ReadyTile {
  FLASHMOE_HD static constexpr uint32_t column(uint32_t expert, uint32_t remote) { return expert << 1 | remote; }
  FLASHMOE_HD static constexpr uint32_t expert(const Task& task) { return task.column >> 1; }
  FLASHMOE_HD static constexpr bool remote(const Task& task) { return (task.column & 1u) != 0; }
};

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

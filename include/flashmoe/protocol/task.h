// Tasks, tiles, and the entries of which tiles are made. Host and device share all types of this file, and entries go
// to peers, too.
#pragma once

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/program.h"

namespace flashmoe {

// A tile as a task names it: the number of the tile in the low bits. A GEMM0 task of the shared expert is for one
// slice of a tile (CallShape::shared). Then the upper bits have the number of the slice, plus 1.
struct TileIndex {
  static constexpr uint32_t kTileBits = 22, kMostTiles = 1u << kTileBits, kMostSlices = (1u << (32 - kTileBits)) - 1;

  uint32_t bits;

  FLASHMOE_HD static constexpr TileIndex of_slice(uint32_t tile, uint32_t slice) {
    return {tile | (slice + 1) << kTileBits};
  }
  FLASHMOE_HD constexpr uint32_t number() const { return bits & (kMostTiles - 1); }
  // The same for tasks that never have a slice, which are all but GEMM0's.
  FLASHMOE_HD constexpr uint32_t whole() const { return bits; }
  FLASHMOE_HD constexpr bool has_slice() const { return bits >= kMostTiles; }
  // The slice; 0 if the task has none.
  FLASHMOE_HD constexpr uint32_t slice() const { return has_slice() ? (bits >> kTileBits) - 1 : 0; }
  FLASHMOE_HD friend constexpr bool operator==(TileIndex a, TileIndex b) { return a.bits == b.bits; }
};

// A task as it stands in the ready queue. It is one word, so that one store publishes it and one load reads it. What
// a task of each kind names: see TaskKind.
struct Task {
  TaskKind kind = TaskKind::kNone;
  uint32_t column = 0;  // the block of columns; kBehindStop: the number of the task in its group
  uint32_t of = 0;      // depends on the kind: tile() for products, group() for kBehindStop

  FLASHMOE_HD constexpr TileIndex tile() const { return {of}; }
  FLASHMOE_HD constexpr uint32_t group() const { return of; }

  // Non-zero for every kind but kNone, because a zero word is an empty slot.
  FLASHMOE_HD constexpr uint64_t pack() const {
    return (static_cast<uint64_t>(kind) << 56) | (static_cast<uint64_t>(column & 0xffffffu) << 32) | of;
  }
  FLASHMOE_HD static constexpr Task unpack(uint64_t word) {
    return {static_cast<TaskKind>(word >> 56), static_cast<uint32_t>(word >> 32) & 0xffffffu,
            static_cast<uint32_t>(word)};
  }
};

// A word of the ready list, packed like a task. It says one of two things. Either a tile is ready for a product. Then
// the word also has the local expert whose weights the tile's tasks read (each slice of the shared expert has a
// number of its own here), and whether the tile has rows of another rank. Or (kFormed) more local experts have all
// their tiles. Then the word has the number of these experts and the number of their tiles.
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
  // For a tile.
  FLASHMOE_HD constexpr TileIndex tile() const { return word_.tile(); }
  FLASHMOE_HD constexpr uint32_t expert() const { return word_.column >> 1; }
  FLASHMOE_HD constexpr bool remote() const { return (word_.column & 1u) != 0; }
  // For kFormed.
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

// The phase of a product in reports and traces. The product is given by its number (host only, because device code
// cannot read the table) or by its kind.
constexpr Phase phase_of(uint32_t product) {
  return kProgram[product].phase;
}
FLASHMOE_FN Phase phase_of_product(TaskKind kind) {
  return with_product(kind, [&]<uint32_t n>() { return Product<n>::kPhase; });
}

// Calls f, which is such a lambda, for every product.
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
  uint32_t done[kProducts];  // blocks of columns done, for products that make another one ready; zero between calls
  uint32_t nth;              // the number of the tile among its expert's tiles (written only if kInTurn)
};
static_assert(sizeof(Tile) == 128);

}  // namespace flashmoe

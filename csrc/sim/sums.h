// What a Returner and a Joiner sum: nothing is added, it takes the time in which memory reads and writes the rows.
#pragma once

#include "flashmoe/actors/processor.h"
#include "flashmoe/sm90/geometry.h"
#include "sim/platform.h"

namespace flashmoe::sim {

// A GPU's memory, as far as sums read and write it: first come, first served.
class MemoryPort {
 public:
  explicit MemoryPort(const Machine& machine) : machine_(machine) {}
  // When so many bytes that are asked for at that time have been read or written.
  Time pass(uint64_t bytes, Time at) {
    free_ = std::max(free_, at) + static_cast<Time>(static_cast<double>(bytes) * 1e12 / machine_.memory);
    return free_;
  }

 private:
  const Machine& machine_;
  Time free_ = 0;
};

// The engine of a Returner: a block is a processor, its warps are the workers. An item is 512 bytes of a row.
class SumEngine {
 public:
  static constexpr uint32_t kItemBytes = 512, kWarps = gpu::kWarps;
  struct Piece {
    uint32_t items, rows;
  };

  // least: what a piece takes at least.
  SumEngine(const Call& call, uint32_t block, MemoryPort& memory, Time least)
      : c_(call), block_(block), memory_(memory), least_(least) {}

  uint32_t processor() const { return block_; }
  uint32_t processors() const { return blocks(); }
  uint32_t items(uint32_t tokens, uint32_t g) const { return tokens * items_of_token(g); }
  uint32_t items_of_reduce(uint32_t items) const {
    constexpr uint32_t kMost = 16;
    return min_of(max_of(ceil_div(items, blocks()), 1u), kMost);
  }
  uint32_t items_of_combine(uint32_t items) const {
    constexpr uint32_t kMost = 10;
    return min_of(max_of(ceil_div(items, blocks() * kWarps * 2), 1u), kMost);
  }
  Piece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    return piece(n, each, all, [&](uint32_t item) { return *c_.packet_counts(c_.rank, p, item / items_of_token(g)); });
  }
  Piece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    return piece(n, each, all, [&](uint32_t item) { return returned(item / items_of_token(g)); });
  }
  void sum(const Piece& piece) const {
    Lane& lane = World::lane();
    const Time read = memory_.pass(uint64_t{piece.items + piece.rows} * kItemBytes, lane.at);
    World::of_lane().sleep_until(std::max(read, lane.at + least_));
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  uint32_t blocks() const { return c_.policy.clusters * sm90::kClusterBlocks; }
  uint32_t items_of_token(uint32_t g) const {
    const uint32_t column_bytes = sm90::kTaskFeatures * 2;
    const uint32_t end = min_of(c_.policy.group_first[g + 1] * column_bytes, c_.memory.return_row_bytes);
    return ceil_div(end - c_.policy.group_first[g] * column_bytes, kItemBytes);
  }
  uint32_t returned(uint32_t token) const {
    if (!c_.reduced()) return c_.shape.top_k;
    uint32_t rows = 0;
    for (uint32_t q = 0; q < c_.shape.ranks; ++q) rows += is_returned(c_, token, q) ? 1 : 0;
    return rows;
  }
  template <class Rows>
  static Piece piece(uint32_t n, uint32_t each, uint32_t all, Rows&& rows_of) {
    Piece p{min_of(each, all - n * each), 0};
    for (uint32_t i = 0; i < p.items; ++i) p.rows += rows_of(n * each + i);
    return p;
  }

  const Call& c_;
  const uint32_t block_;
  MemoryPort& memory_;
  const Time least_;
};

// The engine of a Joiner.
class JoinEngine {
 public:
  static constexpr uint32_t kJoinedAtOnce = 6;  // sm90/join.cuh

  // least: what a warp takes for its rows at least.
  JoinEngine(MemoryPort& memory, Time least) : memory_(memory), least_(least) {}

  // Of each row two are read and one is written, a task's columns of them.
  void join(uint32_t, uint32_t count) const {
    Lane& lane = World::lane();
    if (lane.index != 0) return;
    const Time read = memory_.pass(uint64_t{3} * count * sm90::kTaskFeatures * 2, lane.at);
    lane.at = std::max(read, lane.at + least_);
  }
  static void begin() {}
  static void end(Phase, uint32_t, uint32_t) {}

 private:
  MemoryPort& memory_;
  const Time least_;
};

}  // namespace flashmoe::sim

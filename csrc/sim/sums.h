// The engines of a Returner and a Joiner. They add nothing: a sum takes the time that the GPU's memory needs to read
// and write the rows.
#pragma once

#include "flashmoe/actors/processor.h"
#include "sim/machine.h"
#include "sim/messages.h"
#include "sim/platform.h"
#include "sim/spans.h"

namespace flashmoe::sim {

// A GPU's memory, as far as sums and copies of rows read and write it. Requests are served in the order in which they
// come.
class MemoryPort {
 public:
  explicit MemoryPort(const Machine& machine) : machine_(machine) {}
  // Returns the time at which `bytes` have been read or written, if this is asked for at the time `at`.
  Time pass(uint64_t bytes, Time at) {
    free_ = std::max(free_, at) + static_cast<Time>(static_cast<double>(bytes) * 1e12 / machine_.memory);
    return free_;
  }

 private:
  const Machine& machine_;
  Time free_ = 0;
};

// What a rank's actors share.
struct RankState {
  RankState(const Machine& machine, const SpreadCall& the_call) : call(the_call), memory(machine) {}

  // How many rows came back for a token of this rank. May be called only when all rows have come, because all choices
  // are known only then.
  uint32_t returned(uint32_t token) {
    if (!call.reduced()) return call.shape.top_k;
    if (rows_back_.empty()) count_rows_back();
    return rows_back_[token];
  }

  const SpreadCall& call;
  MemoryPort memory;
  Time first_task = 0, last_task = 0;  // when the first task begins and when the last one ends
  Time busy = 0;                       // time of all clusters in tasks
  uint64_t tasks = 0;
  Time end = 0;  // when the last actor has ended
  Spans spans;

 private:
  void count_rows_back() {
    rows_back_.resize(call.shape.tokens);
    for (uint32_t q = 0; q < call.shape.ranks; ++q) {
      for (uint32_t t = 0; t < call.shape.tokens; ++t) {
        rows_back_[t] = static_cast<uint16_t>(rows_back_[t] + (is_returned(call, call.spread, t, q) ? 1 : 0));
      }
    }
  }

  std::vector<uint16_t> rows_back_;  // [T]
};

// The engine of a Returner. A processor is a thread block, its warps are the workers. An item is 512 bytes of a row.
class SumEngine {
 public:
  static constexpr uint32_t kItemBytes = 512, kWideBytes = 2 * kItemBytes;
  // memory: how many bytes memory reads and writes. sent: how many bytes go to rank `to` of this machine.
  struct Piece {
    uint64_t memory = 0, sent = 0;
    uint32_t to = 0;
  };

  // least: the least time of a piece. It may change: each piece takes the value that is there when the piece begins.
  SumEngine(RankState& rank, uint32_t block, const Time& least)
      : rank_(rank), c_(rank.call), block_(block), least_(least) {}

  uint32_t processor() const { return block_; }
  uint32_t processors() const { return blocks(); }
  uint32_t items(uint32_t tokens, uint32_t g) const { return tokens * items_of_token(g); }
  uint32_t items_of_reduce(uint32_t items) const {
    const uint32_t most = c_.policy.order.link_clusters != 0 ? 32 : 16;
    return min_of(max_of(ceil_div(items, blocks()), 1u), most);
  }
  uint32_t items_of_combine(uint32_t items) const {
    constexpr uint32_t kMost = 10;
    return min_of(max_of(ceil_div(items, blocks() * kWarps * 2), 1u), kMost);
  }
  // A piece reads the rows of tokens that have any here, and writes a token's sum to the token's home. If the home is
  // on another machine, it writes the sum, as fp32, to the relay that this machine has for the home.
  Piece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    const Machines& m = c_.spread;
    const bool stays = m.sums && !m.together(p, c_.rank);
    Piece piece{.to = stays ? m.relay(p, m.of[c_.rank]) : p};
    uint64_t& written = piece.to == c_.rank ? piece.memory : piece.sent;
    for_each_token(g, n, each, all, [&](uint32_t token, uint32_t items) {
      const uint32_t rows = *c_.packet_counts(c_.rank, p, token);
      if (rows == 0) return;
      piece.memory += uint64_t{items} * rows * kItemBytes;
      written += uint64_t{items} * (stays ? kWideBytes : kItemBytes);
    });
    return piece;
  }
  // A piece reads the sums that the ranks of this machine have left for tokens, and writes a token's total to the
  // place from which a message takes it.
  Piece machine_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    const Machines& m = c_.spread;
    const RelayPlace from(c_, m, c_.rank, p);
    Piece piece{.to = c_.rank};
    for_each_token(g, n, each, all, [&](uint32_t token, uint32_t items) {
      uint32_t sums = 0;
      for (uint32_t i = 0; i < m.size(m.of[c_.rank]); ++i) sums += *from.counts(i, token) != 0 ? 1 : 0;
      if (sums != 0) piece.memory += uint64_t{items} * (sums * kWideBytes + kItemBytes);
    });
    return piece;
  }
  Piece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) const {
    Piece piece{.to = c_.rank};
    for_each_token(g, n, each, all, [&](uint32_t token, uint32_t items) {
      piece.memory += uint64_t{items} * (rank_.returned(token) + 1) * kItemBytes;
    });
    return piece;
  }
  void sum(const Piece& piece) const {
    Lane& lane = World::lane();
    const Time read = rank_.memory.pass(piece.memory, lane.at);
    if (piece.sent != 0) {
      Warp& warp = World::warp();
      const Links::Transfer t = Group::of_lane().send(c_.rank, piece.to, piece.sent, lane.at);
      warp.written = std::max(warp.written, t.there);
    }
    World::of_lane().sleep_until(std::max(read, lane.at + least_));
  }
  void begin() { begun_ = World::lane().at; }
  void end(Phase phase, uint32_t, uint32_t) {
    rank_.spans.add(block_ / kArch.cluster_blocks, phase, begun_, World::lane().at);
  }

 private:
  uint32_t blocks() const { return c_.policy.clusters * kArch.cluster_blocks; }
  uint32_t items_of_token(uint32_t g) const { return ceil_div(bytes_of_group(c_, g), kItemBytes); }
  // Calls visit(token, items) for each token of piece n. A piece has `each` items; there are `all` items together.
  template <class Visit>
  void for_each_token(uint32_t g, uint32_t n, uint32_t each, uint32_t all, Visit&& visit) const {
    const uint32_t of_token = items_of_token(g), end = min_of((n + 1) * each, all);
    for (uint32_t item = n * each; item < end;) {
      const uint32_t token = item / of_token, next = min_of((token + 1) * of_token, end);
      visit(token, next - item);
      item = next;
    }
  }

  RankState& rank_;
  const SpreadCall& c_;
  const uint32_t block_;
  const Time& least_;
  Time begun_ = 0;
};

// The engine of a Joiner.
class JoinEngine {
 public:
  static constexpr uint32_t kJoinedAtOnce = 6;  // roles/join.cuh

  // least: the least time that a warp takes for the rows that it joins at a time.
  JoinEngine(RankState& rank, uint32_t cluster, Time least) : rank_(rank), cluster_(cluster), least_(least) {}

  // For each late row, memory reads two rows and writes one, each with the columns of one task.
  void join(uint32_t, uint32_t count) const {
    Lane& lane = World::lane();
    if (lane.index != 0) return;
    const Time read = rank_.memory.pass(uint64_t{3} * count * kArch.task_features * 2, lane.at);
    lane.at = std::max(read, lane.at + least_);
  }
  void begin() { begun_ = World::lane().at; }
  void end(Phase phase, uint32_t, uint32_t) {
    if (World::lane().index == 0) rank_.spans.add(cluster_, phase, begun_, World::lane().at);
  }

 private:
  RankState& rank_;
  const uint32_t cluster_;
  const Time least_;
  Time begun_ = 0;
};
static_assert(SumsForMachines<SumEngine> && JoinsRows<JoinEngine>);

}  // namespace flashmoe::sim

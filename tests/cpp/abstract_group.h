// A group of ranks in one process. It runs the whole protocol with an engine that computes nothing: the words of rows
// are hashes of the call, the token and the place in the row. Every task checks each word that it reads, and that no
// task runs twice.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/platform.h"
#include "flashmoe/actors/engine.h"
#include "flashmoe/actors/former.h"
#include "flashmoe/actors/keeper.h"
#include "flashmoe/actors/os.h"
#include "flashmoe/actors/processor.h"
#include "flashmoe/actors/put_sender.h"
#include "flashmoe/actors/relay.h"
#include "flashmoe/protocol/machines.h"
#include "flashmoe/protocol/packet.h"
#include "host/machines.h"
#include "problem.h"
#include "put_platform.h"
#include "warp_platform.h"

namespace flashmoe::test {

// Zeroed memory of exactly the size that a layout asks for, so that AddressSanitizer reports an access to the byte
// behind it.
class Region {
 public:
  explicit Region(uint64_t bytes) : base_(static_cast<uint8_t*>(std::aligned_alloc(256, bytes))) {
    std::memset(base_.get(), 0, bytes);
  }
  uint8_t* base() const { return base_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> base_;
};

// Notes for each of n things which of its columns are done. No column may be done twice.
class Once {
 public:
  explicit Once(size_t n) : bits_(n) {}
  void mark(size_t i, uint32_t column) {
    const uint32_t before = bits_[i].fetch_or(1u << column, std::memory_order_relaxed);
    CHECK((before >> column & 1u) == 0);
  }
  // Whether exactly the columns [0, n) of thing i are marked. Unmarks them.
  bool whole(size_t i, uint32_t n) { return bits_[i].exchange(0, std::memory_order_relaxed) == (1u << n) - 1; }
  size_t size() const { return bits_.size(); }

 private:
  std::vector<std::atomic<uint32_t>> bits_;
};

// What was done for one rank, whichever rank did it. Checked at the end of each call.
struct Ledger {
  explicit Ledger(const Limits& l)
      : contributed(uint64_t{l.max_tokens} * l.top_k),
        reduced(uint64_t{l.max_tokens} * l.ranks),
        combined(l.max_tokens),
        joined(l.max_tokens),
        activated(l.max_tiles()),
        received(uint64_t{l.max_tokens} * l.ranks),
        load(l.experts) {}
  Once contributed;            // [token, k] at the token's home: columns that its expert wrote
  Once reduced;                // [token, rank] at the token's home: return groups that the rank has summed
  Once combined;               // [token]: return groups that are combined
  Once joined;                 // [token]: columns that are written, in a joined call
  Once activated;              // [tile]: columns of its intermediate rows that are written
  Once received;               // [rank, token]: whether a keeper has copied the row here
  std::vector<uint64_t> load;  // [expert]: choices of the rank's tokens, in all calls
};

// The scratch memory of build_packets().
class PacketMemory {
 public:
  PacketMemory(const Limits& l, uint32_t workers)
      : ids_(kMaxTokenBlock * l.top_k),
        weights_(ids_.size()),
        place_(workers * l.experts),
        count_(l.experts),
        start_(l.experts),
        entries_(l.ranks) {}
  PacketScratch of(const Call& c) {
    return {.ids = ids_.data(),
            .weights = weights_.data(),
            .place = place_.data(),
            .count = count_.data(),
            .start = start_.data(),
            .entries = entries_.data(),
            .aborted = &aborted_,
            .missing = &missing_,
            .owner = c.placement.owner};
  }

 private:
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  std::vector<uint16_t> place_, count_, start_;
  std::vector<uint32_t> entries_;
  uint32_t aborted_ = 0, missing_ = 0;
};

// The engine of one processor. ledgers: one for each rank.
template <class P>
class AbstractEngine {
 public:
  AbstractEngine(const Call& call, uint32_t id, const Limits& limits, std::vector<Ledger>& ledgers)
      : c_(call), id_(id), limits_(limits), ledgers_(ledgers), scratch_(limits, P::workers()) {}

  void set_problem(const Problem& x) { x_ = &x; }

  // Called by all workers of the processor's team.
  bool dispatch(uint32_t b) {
    const uint32_t thread = P::worker() * P::kLanes + P::lane(), threads = P::workers() * P::kLanes;
    const Problem::OfRank& mine = x_->of[c_.rank];
    const uint32_t first = b << c_.policy.log2_block, end = first + c_.tokens_in_block(b);
    const PacketScratch s = scratch_.of(c_);
    for (uint32_t token = first + thread; token < end; token += threads) {
      const uint32_t from = token * c_.shape.top_k, to = (token - first) * c_.shape.top_k;
      for (uint32_t k = 0; k < c_.shape.gate_top_k; ++k) {
        s.ids[to + k] = mine.ids[from + k * x_->slices] / static_cast<int32_t>(x_->slices);
        s.weights[to + k] = mine.weights[from + k * x_->slices];
      }
      if (x_->slices != 1) choose_slices<P>(c_, token, s.ids + to, s.weights + to);
    }
    P::team_sync();
    if (!build_packets<P>(c_, b, s, ledgers_[c_.rank].load.data())) return false;
    signal_own_packet<P>(c_, b, s);
    return true;
  }

  // Sends `rows` rows to rank q. Lane i passes the token of row i.
  void send_rows(uint32_t q, uint32_t token, uint32_t rows) {
    CHECK(q != c_.rank && rows <= P::kLanes);
    if (P::lane() >= rows) return;
    CHECK(is_needed(token, q));
    uint64_t* row = words(c_.dispatched_row(q, c_.rank, token));
    for (uint32_t i = 0; i < c_.shape.hidden; ++i) row[i] = x_->row_word(c_.rank, token, i);
  }

  // Called by a relay. Checks that each row is as rank p has sent it.
  void pass_rows(uint32_t q, uint32_t p, uint32_t token, uint32_t rows) {
    CHECK(q != c_.rank && p != c_.rank && rows <= P::kLanes);
    if (P::lane() >= rows) return;
    CHECK(x_->entries(p, token, q, c_.shape.top_k) != 0);
    const uint64_t* from = words(c_.dispatched_row(c_.rank, p, token));
    uint64_t* to = words(c_.dispatched_row(q, p, token));
    for (uint32_t i = 0; i < c_.shape.hidden; ++i) {
      CHECK_EQ(from[i], x_->row_word(p, token, i));
      to[i] = from[i];
    }
  }

  // Called by a PutSender.
  void stage_row(uint32_t token) {
    uint64_t* row = words(c_.out_row(token));
    for (uint32_t i = P::lane(); i < c_.shape.hidden; i += P::kLanes) row[i] = x_->row_word(c_.rank, token, i);
  }

  template <uint32_t n>
  void multiply(TileIndex index, uint32_t block) {
    const uint32_t tile = index.whole();
    if constexpr (kProgram[n].epilogue == Epilogue::kActivate) activate(tile, block);
    if constexpr (kProgram[n].epilogue == Epilogue::kDifferentiate) activate(tile, block);
    if constexpr (kProgram[n].epilogue == Epilogue::kReturn) contribute(tile, block);
  }

  void activate(uint32_t tile, uint32_t n) {
    const Tile::Shape t = c_.tile(tile)->shape;
    const uint32_t expert = c_.placement.by_owner[c_.placement.owner_base[c_.rank] + t.expert];
    bool remote = false;
    for_each_row(tile, [&](uint32_t row, uint32_t p, const Row& entry) {
      remote |= p != c_.rank;
      if (row % P::kLanes != P::lane()) return;
      const Problem::OfRank& source = x_->of[p];
      CHECK(entry.token < source.tokens && entry.k < c_.shape.top_k);
      const uint32_t choice = entry.token * c_.shape.top_k + entry.k;
      CHECK_EQ(source.routed[choice], static_cast<int32_t>(expert));
      CHECK_EQ(source.weights[choice], entry.weight);
      if (c_.reduced()) CHECK_EQ(x_->entries(p, entry.token, c_.rank, entry.k), entry.ordinal);
      if (p != c_.rank) {  // own rows are not sent
        const uint64_t* sent = words(c_.dispatched_row(c_.rank, p, entry.token));
        for (uint32_t i = 0; i < c_.shape.hidden; ++i) CHECK_EQ(sent[i], x_->row_word(p, entry.token, i));
      }
      uint64_t* hidden = words(c_.intermediate_row(tile, row));
      for_columns(kFirst, n, n + 1, [&](uint32_t i) { hidden[i] = x_->hidden_word(p, entry.token, entry.k, i); });
    });
    if (P::lane() == 0) {
      CHECK(t.rows != 0 && t.rows <= c_.policy.tile_rows);
      CHECK_EQ(uint32_t{remote}, t.remote);
      ledgers_[c_.rank].activated.mark(tile, n);
    }
    P::sync();
  }

  void contribute(uint32_t tile, uint32_t n) {
    for_each_row(tile, [&](uint32_t row, uint32_t home, const Row& entry) {
      if (row % P::kLanes != P::lane()) return;
      check_hidden(tile, row, home, entry);
      if (c_.policy.joined != 0 && c_.shape.top_k == 1)
        ledgers_[home].joined.mark(entry.token, n);  // the output itself
      uint64_t* to = words(c_.reduced() ? c_.staged_row(home, entry.token, entry.ordinal)
                                        : c_.return_row(home, entry.token, entry.k));
      for_columns(kReturning, n, n + 1,
                  [&](uint32_t i) { to[i] = x_->contribution(home, entry.token, entry.k, entry.weight, i); });
      ledgers_[home].contributed.mark(entry.token * c_.shape.top_k + entry.k, n);
    });
    P::sync();
  }

  // Called by all lanes of a keeper. Checks that the row is still that of this call, however late it is copied.
  void copy_received(uint32_t p, uint32_t token) {
    const bool late = c_.rank == c_.epoch % c_.shape.ranks && token < 2;  // others may be through with the call by then
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK(p != c_.rank && x_->entries(p, token, c_.rank, c_.shape.top_k) != 0);
    const uint64_t* sent = words(c_.dispatched_row(c_.rank, p, token));
    for (uint32_t i = P::lane(); i < c_.shape.hidden; i += P::kLanes) CHECK_EQ(sent[i], x_->row_word(p, token, i));
    if (P::lane() == 0) ledgers_[c_.rank].received.mark(uint64_t{p} * limits_.max_tokens + token, 0);
  }

  // An item is the columns of one return group for one token. Pieces are small, so that there are many of them.
  struct Piece {
    enum { kReduce, kMachine, kCombine } of;
    uint32_t source, group, first_token, tokens;
  };
  uint32_t processor() const { return id_; }
  uint32_t processors() const { return c_.policy.clusters; }
  static uint32_t items(uint32_t tokens, uint32_t) { return tokens; }
  static uint32_t items_of_reduce(uint32_t) { return 5; }
  static uint32_t items_of_combine(uint32_t) { return 3; }
  static Piece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    CHECK(n * each < all);
    return {Piece::kReduce, p, g, n * each, min_of(each, all - n * each)};
  }
  static Piece machine_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    CHECK(n * each < all);
    return {Piece::kMachine, p, g, n * each, min_of(each, all - n * each)};
  }
  static Piece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    CHECK(n * each < all);
    return {Piece::kCombine, 0, g, n * each, min_of(each, all - n * each)};
  }
  void sum(const Piece& piece) {
    for (uint32_t i = P::lane(); i < piece.tokens; i += P::kLanes) {
      const uint32_t token = piece.first_token + i;
      switch (piece.of) {
        case Piece::kReduce: reduce(piece.source, token, piece.group); break;
        case Piece::kMachine: sum_machine(piece.source, token, piece.group); break;
        case Piece::kCombine: combine(token, piece.group); break;
      }
    }
  }

  static constexpr uint32_t kJoinedAtOnce = min_of(P::kLanes, 6u);
  // Every lane reads a part of every row, as on a GPU. Checks that both rows of the token are here, and are of this
  // call.
  void join(uint32_t row, uint32_t count) {
    CHECK(count != 0 && count <= kJoinedAtOnce);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t late = P::broadcast(row, i), token = LateRow::token(late), column = LateRow::column(late);
      for_columns(kReturning, column, column + 1, [&](uint32_t h) {
        if (h % P::kLanes != P::lane()) return;
        for (uint32_t k = 0; k < c_.shape.top_k; ++k) {
          const float weight = x_->of[c_.rank].weights[token * c_.shape.top_k + k];
          CHECK_EQ(words(c_.return_row(c_.rank, token, k))[h], x_->contribution(c_.rank, token, k, weight, h));
        }
      });
      if (P::lane() == 0) ledgers_[c_.rank].joined.mark(token, column);
    }
    P::sync();
  }

  void begin() {}
  void end(Phase, uint32_t, uint32_t) {}

 private:
  void check_hidden(uint32_t tile, uint32_t row, uint32_t home, const Row& entry) const {
    const uint64_t* hidden = words(c_.intermediate_row(tile, row));
    for (uint32_t i = 0; i < c_.shape.intermediate; ++i) {
      CHECK_EQ(hidden[i], x_->hidden_word(home, entry.token, entry.k, i));
    }
  }

  static uint64_t* words(uint8_t* row) { return reinterpret_cast<uint64_t*>(row); }

  void reduce(uint32_t p, uint32_t token, uint32_t g) {
    const uint32_t rows = *c_.packet_counts(c_.rank, p, token);
    CHECK_EQ(x_->entries(p, token, c_.rank, c_.shape.top_k), rows);
    if (rows == 0) return;
    const bool stays = !P::kPeersMapped && p != c_.rank;
    uint64_t* to = words(stays ? c_.staged_row(p, token, 0) : c_.return_row(p, token, c_.rank));
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      if (m.sums && !m.together(p, c_.rank)) {
        to = reinterpret_cast<uint64_t*>(RelayPlace(c_, m, m.relay(p, m.of[c_.rank]), p).sum(m.place[c_.rank], token));
      }
    }
    for_columns(kReturning, c_.policy.group_first[g], c_.policy.group_first[g + 1], [&](uint32_t i) {
      uint64_t sum = 0;
      for (uint32_t j = 0; j < rows; ++j) sum += words(c_.staged_row(p, token, j))[i];
      to[i] = sum;
    });
    ledgers_[p].reduced.mark(uint64_t{token} * c_.shape.ranks + c_.rank, g);
  }

  void sum_machine(uint32_t p, uint32_t token, uint32_t g) {
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      const RelayPlace from(c_, m, c_.rank, p);
      if (!is_needed_by(p, token, m.of[c_.rank])) return;
      for_columns(kReturning, c_.policy.group_first[g], c_.policy.group_first[g + 1], [&](uint32_t i) {
        uint64_t sum = 0;
        for (uint32_t place = 0; place < m.size(m.of[c_.rank]); ++place) {
          if (*from.counts(place, token) != 0) sum += reinterpret_cast<uint64_t*>(from.sum(place, token))[i];
        }
        words(c_.return_row(p, token, c_.rank))[i] = sum;
      });
    }
  }

  bool is_needed_by(uint32_t p, uint32_t token, uint32_t machine) const {
    bool any = false;
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      for (uint32_t q = 0; q < c_.shape.ranks; ++q) {
        any |= m.of[q] == machine && x_->entries(p, token, q, c_.shape.top_k) != 0;
      }
    }
    return any;
  }
  // Whether this rank sends its token's row to rank q.
  bool is_needed(uint32_t token, uint32_t q) const {
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      if (!m.together(c_.rank, q)) return m.is_relay(c_.rank, q) && is_needed_by(c_.rank, token, m.of[q]);
    }
    return x_->entries(c_.rank, token, q, c_.shape.top_k) != 0;
  }
  bool has_come_back(uint32_t token, uint32_t slot) const {
    if constexpr (SpansMachines<P>) {
      if (c_.reduced()) return is_returned(c_, *c_.machines, token, slot);
    }
    return is_returned(c_, token, slot);
  }

  // Sums of words wrap around, so they are exact. A contribution that is missing, that is there twice, or that is of
  // another call makes the sum differ.
  void combine(uint32_t token, uint32_t g) {
    for_columns(kReturning, c_.policy.group_first[g], c_.policy.group_first[g + 1], [&](uint32_t i) {
      uint64_t sum = 0, expected = 0;
      for (uint32_t k = 0; k < c_.shape.top_k; ++k) {
        if (x_->owner_of(c_.rank, token, k) == ~0u) continue;
        expected += x_->contribution(c_.rank, token, k, x_->of[c_.rank].weights[token * c_.shape.top_k + k], i);
      }
      for (uint32_t slot = 0; slot < (c_.reduced() ? c_.shape.ranks : c_.shape.top_k); ++slot) {
        if (has_come_back(token, slot)) sum += words(c_.return_row(c_.rank, token, slot))[i];
      }
      CHECK_EQ(sum, expected);
    });
    ledgers_[c_.rank].combined.mark(token, g);
  }

  // Calls visit(i) for each word i in the blocks [begin, end) of the columns of product n.
  template <class Visit>
  void for_columns(uint32_t n, uint32_t begin, uint32_t end, Visit&& visit) const {
    const uint32_t each = limits_.columns_per_task[n], all = c_.shape.extent(kProgram[n].columns);
    for (uint32_t i = begin * each; i < min_of(end * each, all); ++i) visit(i);
  }

  // Calls visit(row, source, entry) for each row of a tile. Checks that the segments of the tile agree with its rows.
  // Also checks that the rows of each segment are in the order of their tokens, in whatever order packets have
  // arrived.
  template <class Visit>
  void for_each_row(uint32_t tile, Visit&& visit) const {
    const Tile::Shape t = c_.tile(tile)->shape;
    uint32_t row = 0;
    for (uint32_t i = 0; i < t.segments; ++i) {
      const Segment s = c_.segments(tile)[i];
      CHECK(s.count != 0);
      for (uint32_t end = row + s.count; row < end; ++row) {
        CHECK_EQ(uint32_t{c_.tile_row(tile, row)->source}, s.source);
        CHECK(row + s.count == end || c_.tile_row(tile, row - 1)->token < c_.tile_row(tile, row)->token);
        visit(row, s.source, *c_.tile_row(tile, row));
      }
    }
    CHECK_EQ(row, t.rows);
  }

  const Call& c_;
  const uint32_t id_;
  const Limits& limits_;
  std::vector<Ledger>& ledgers_;
  const Problem* x_ = nullptr;
  PacketMemory scratch_;
};
using EngineOfOneLane = AbstractEngine<cpu::CpuPlatform>;
static_assert(RunsProcessor<EngineOfOneLane> && SumsForMachines<EngineOfOneLane> && StagesRows<EngineOfOneLane> &&
              PassesRows<EngineOfOneLane>);
// The concepts must refuse an engine without spans, and an engine whose pieces are not all of one type.
struct WithoutSpans : EngineOfOneLane {
  void begin() = delete;
};
struct OtherPieces : EngineOfOneLane {
  static int combine_piece(uint32_t, uint32_t, uint32_t, uint32_t);
};
static_assert(!SendsRows<WithoutSpans> && !JoinsRows<WithoutSpans> && !SumsRows<OtherPieces>);

// The rank whose actor this thread runs.
inline thread_local uint32_t this_rank = 0;

// How many actors a rank has beside the OS actor and the processors.
struct Helpers {
  uint32_t formers = 0;                 // 0: the OS actor forms the tiles
  uint32_t senders = 0;                 // only if peers are not mapped; otherwise the processors send
  uint32_t keepers = 0;                 // only if passes train among several ranks (kTrainsInGroup)
  uint32_t relays = 0;                  // only if relays are actors of their own (kRelaysApart)
  std::vector<uint32_t> machines = {};  // the machine of each rank; empty: all ranks are on one machine
};

// One rank: its workspace and its actors. The heaps are the group's.
template <class P>
class Rank {
 public:
  Rank(uint32_t rank, const Limits& limits, const Helpers& helpers, uint8_t* const* heaps, std::vector<Ledger>& ledgers)
      : limits_(limits),
        formers_(helpers.formers),
        senders_(helpers.senders),
        keepers_(helpers.keepers),
        relays_(helpers.relays),
        ledger_(ledgers[rank]),
        chosen_(limits.experts),
        heaps_(heaps),
        mapped_(heaps, heaps + limits.ranks),
        work_(work_bytes(limits)),
        sources_(formers_ + keepers_ + 1, std::vector<Source>(limits.ranks)),
        experts_(formers_ + 1, std::vector<FormedExpert>(limits.max_local_experts)),
        seen_(limits.ranks),
        memory_(limits.processors),
        machines_(helpers.machines, limits.ranks, rank),
        actors_(static_cast<ptrdiff_t>(
            (1 + limits.processors * P::workers() + formers_ + senders_ + keepers_ + relays_) * P::kLanes)) {
    CHECK(keepers_ == 0 || kTrainsInGroup);
    if constexpr (SpansMachines<P>) CHECK_EQ(relays_ != 0, P::kRelaysApart);
    CHECK_EQ(senders_ == 0, P::kPeersMapped);
    CHECK_EQ(limits.rdma == 0, P::kPeersMapped);
    if (!P::kPeersMapped) {
      for (uint32_t q = 0; q < limits.ranks; ++q) mapped_[q] = q == rank ? heaps[q] : nullptr;
    }
    call.rank = rank;
    call.shape.ranks = limits.ranks;
    call.policy.clusters = limits.processors;
    call.policy.tile_rows = limits.tile_rows;
    call.memory = make_call_memory(limits);
    call.memory.heaps = mapped_.data();
    call.memory.work = work_.base();
    call.spread = machines_.machines(limits);
    CHECK(call.spread.count == 1 || SpansMachines<P>);
    for (uint32_t i = 0; i < limits.processors; ++i) engines_.emplace_back(call, i, limits_, ledgers);
  }

  SpreadCall call;  // a test may set timeout_ns, and spoil other fields; prepare() sets what the problem says
  uint64_t perturbation = 0;

  // Runs the calls on this rank's actors, and checks each call when it has ended. Stops after a call that was
  // aborted. Returns how many calls succeeded.
  uint32_t run(const std::vector<Problem>& problems);

  // Makes the call ready to run. One thread.
  void prepare(const Problem& x) {
    const Problem::OfRank& mine = x.of[call.rank];
    call.epoch = x.epoch;
    call.shape.tokens = mine.tokens;
    call.policy.log2_block = mine.log2_block;
    call.shape.capacity = mine.capacity;
    call.policy.order = mine.order;
    call.shape.hidden = x.hidden;
    call.memory.token_row_bytes = x.hidden * limits_.x_bytes;
    call.memory.intermediate_row_bytes = x.intermediate * limits_.intermediate_bytes;
    call.memory.return_row_bytes = x.hidden * limits_.return_bytes;
    call.shape.intermediate = x.intermediate;
    call.shape.experts = x.experts;
    call.shape.top_k = x.top_k;
    call.shape.slices = x.slices;
    call.shape.gate_experts = x.experts / x.slices;
    call.shape.gate_top_k = x.top_k / x.slices;
    call.shape.return_mode = x.return_mode;
    call.policy.joined = limits_.ranks == 1 && !call.reduced() && call.shape.capacity == 0 && x.top_k <= 2 ? 1 : 0;
    call.spread.sums = call.spread.count != 1 && call.reduced();
    call.cut_columns(limits_.columns_per_task);
    call.policy.groups = min_of(x.groups, call.policy.columns[kReturning]);
    for (uint32_t g = 0; g <= call.policy.groups; ++g) {
      call.policy.group_first[g] = static_cast<uint16_t>(call.policy.columns[kReturning] * g / call.policy.groups);
    }
    const host::PlacementTables& tables = x.placement[call.rank];
    call.placement = {
        .owner = tables.owner.data(), .by_owner = tables.by_owner.data(), .owner_base = tables.owner_base.data()};
    call.shape.local_experts = call.owned(call.rank);
    call.policy.keepers = static_cast<uint16_t>(call.shape.local_experts == 0 ? 0 : keepers_);
    call.config.hash =
        mix(x.epoch, x.belief);  // differs from call to call, so that a configuration of an earlier call disagrees
    for (AbstractEngine<P>& e : engines_) e.set_problem(x);
  }

 private:
  // Actor 0 is the OS actor; processors, formers, senders, keepers and relays follow.
  bool is_processor(uint32_t actor) const { return actor != 0 && actor <= limits_.processors; }

  void run_actor(uint32_t actor, const std::vector<Problem>& problems) {
    const bool leader = actor == 0 && P::lane() == 0;
    for (const Problem& x : problems) {
      if (leader) prepare(x);
      meet();
      const uint64_t lane = P::worker() * P::kLanes + P::lane();
      if (perturbation != 0) {
        cpu::Perturbation::seed(mix(perturbation, x.epoch, call.rank, actor, lane) | 1);
      }
      Network::mine().join(heaps_, call.memory.heap_layout.bytes, call.rank, mix(x.epoch, call.rank, actor, lane));
      if (actor == 0) {
        const bool ok = run_os<P>(call, {.subscriber = {sources_[0].data(), {experts_[0].data(), 0, formers_ == 0}},
                                         .scheduler = &scheduler_,
                                         .seen = seen_.data()});
        if (leader) aborted_ = !ok;
      } else if (actor > limits_.processors + formers_ + senders_ + keepers_) {
        relay(actor - limits_.processors - formers_ - senders_ - keepers_ - 1);
      } else if (actor > limits_.processors + formers_ + senders_) {
        keep(actor - limits_.processors - formers_ - senders_ - 1);
      } else if (actor > limits_.processors + formers_) {
        send(actor - limits_.processors - formers_ - 1);
      } else if (!is_processor(actor)) {
        const uint32_t id = actor - limits_.processors - 1;
        run_former<P>(call, sources_[id + 1].data(), {experts_[id + 1].data(), id, formers_});
      } else if (P::worker() == 0) {
        run_processor<P>(call, actor - 1, engines_[actor - 1], memory_[actor - 1]);
      } else {
        help_dispatch(actor - 1);
      }
      cpu::Perturbation::seed(0);
      meet();
      if (aborted_) return;
      if (leader) {
        check_end(x);
        ++succeeded_;
      }
    }
  }

  void send(uint32_t id) {
    if constexpr (!P::kPeersMapped) {
      PutSender<P, AbstractEngine<P>>(call, engines_.front()).run(id, senders_, 0);
      if (id == 0) tell_fault<P>(call);
      CHECK(Network::mine().empty());  // all have arrived, because the next call overwrites what puts read
    }
  }

  void keep(uint32_t id) {
    if constexpr (kTrainsInGroup) {
      if (id >= call.policy.keepers) return;
      run_keeper<P>(call, sources_[formers_ + 1 + id].data(), id,
                    [&](uint32_t p, uint32_t token) { engines_.front().copy_received(p, token); });
    }
  }

  void relay(uint32_t id) {
    if constexpr (SpansMachines<P>) RelayWorker<P, AbstractEngine<P>>(call, engines_.front()).run(id, relays_);
  }

  // Checks that keepers have copied every row of other ranks, once; and where sources come in turn (kInTurn), that
  // the rows of each expert's tiles are in canonical order.
  void check_received(const Problem& x) {
    for (uint32_t p = 0; p < call.shape.ranks; ++p) {
      for (uint32_t t = 0; t < limits_.max_tokens; ++t) {
        const bool copied = call.policy.keepers != 0 && p != call.rank && t < x.of[p].tokens &&
                            x.entries(p, t, call.rank, call.shape.top_k) != 0;
        CHECK(ledger_.received.whole(uint64_t{p} * limits_.max_tokens + t, copied ? 1 : 0));
      }
    }
    if constexpr (kInTurn) {
      for (uint32_t l = 0; l < call.shape.local_experts; ++l) {
        CanonicalRow last{};
        for (uint32_t i = 0; i < *call.expert_tile_count(l); ++i) {
          const uint32_t t = call.expert_tiles(l)[i], rows = call.tile(t)->shape.rows;
          CHECK_EQ(call.tile(t)->nth, i);
          CHECK(rows == call.policy.tile_rows || i + 1 == *call.expert_tile_count(l));
          for (uint32_t r = 0; r < rows; ++r) {
            const CanonicalRow row{call.tile_row(t, r)->source, call.tile_row(t, r)->token};
            CHECK((i == 0 && r == 0) || last < row);
            last = row;
          }
        }
      }
    }
  }

  void help_dispatch(uint32_t processor) {
    for (uint32_t b = processor; b < call.blocks(); b += call.policy.clusters) {
      if (!engines_[processor].dispatch(b)) return;
    }
  }

  void meet() {
    if constexpr (requires { P::blocking([] {}); }) {
      P::blocking([&] { actors_.arrive_and_wait(); });
    } else {
      actors_.arrive_and_wait();
    }
  }

  // Called after a call. Checks that everything was done once, and that all that the next call expects to be zero is
  // zero.
  void check_end(const Problem& x) {
    const Control& control = *call.control();
    CHECK_EQ(control.queue_head.value, control.published.value);
    CHECK_EQ(control.list_tail.value, control.list_head.value);
    CHECK_EQ(control.abort.value, 0u);
    CHECK_EQ(control.fault_claim.value, 0u);
    CHECK(all_zero<uint64_t>(WorkField::kQueue, limits_.queue_capacity()));
    CHECK(all_zero<uint64_t>(WorkField::kReadyList, limits_.list_capacity()));
    CHECK_EQ(control.tiles.value, 0u);
    CHECK(all_zero<uint64_t>(WorkField::kPending, uint64_t{limits_.ranks} * kMaxGroups));
    const bool joints = limits_.ranks == 1 && limits_.top_k > 1;
    CHECK(all_zero<uint32_t>(WorkField::kJoints, joints ? limits_.columns(kReturning) * limits_.max_tokens : 0));
    CHECK(all_zero<uint32_t>(WorkField::kOutSent, limits_.outboxes() * limits_.max_blocks()));
    CHECK(all_zero<uint32_t>(WorkField::kReduceDone, uint64_t{limits_.staging} * limits_.ranks * kMaxGroups));
    for (uint32_t t = 0; t < limits_.max_tokens; ++t) {
      CHECK(ledger_.combined.whole(t, t < call.shape.tokens && call.policy.joined == 0 ? call.policy.groups : 0));
      CHECK(ledger_.joined.whole(
          t, t < call.shape.tokens && call.policy.joined != 0 ? call.policy.columns[kReturning] : 0));
      for (uint32_t q = 0; q < call.shape.ranks; ++q) {
        const bool sums = call.reduced() && t < call.shape.tokens && x.entries(call.rank, t, q, call.shape.top_k) != 0;
        CHECK(ledger_.reduced.whole(uint64_t{t} * call.shape.ranks + q, sums ? call.policy.groups : 0));
      }
      for (uint32_t k = 0; t < call.shape.tokens && k < call.shape.top_k; ++k) {
        const bool kept = x.owner_of(call.rank, t, k) != ~0u;
        CHECK(ledger_.contributed.whole(t * call.shape.top_k + k, kept ? call.policy.columns[kReturning] : 0));
      }
    }
    for (const int32_t slice : x.of[call.rank].ids) {
      const size_t id = static_cast<size_t>(slice);
      if (id % x.slices == 0) ++chosen_[id / x.slices];
    }
    CHECK(ledger_.load == chosen_);
    check_received(x);
    // Tiles are numbered from 0, and at most one tile of each expert is not full.
    const uint32_t tiles = expected_tiles(x);
    for (uint32_t tile = 0; tile < ledger_.activated.size(); ++tile) {
      CHECK(ledger_.activated.whole(tile, tile < tiles ? call.policy.columns[kFirst] : 0));
      for (const uint32_t done : call.tile(tile)->done) CHECK_EQ(done, 0u);
    }
  }

  uint32_t expected_tiles(const Problem& x) const {
    std::vector<uint32_t> rows(x.experts);
    for (uint32_t p = 0; p < x.of.size(); ++p) {
      for (const int32_t expert : x.of[p].routed) {
        if (expert >= 0 && x.placement[p].owner[expert] == call.rank) ++rows[expert];
      }
    }
    uint32_t tiles = 0;
    for (const uint32_t n : rows) tiles += ceil_div(n, call.policy.tile_rows);
    return tiles;
  }

  template <class T>
  bool all_zero(WorkField field, uint64_t n) const {
    const T* first = call.memory.work_layout.template at<T>(call.memory.work, field);
    return std::all_of(first, first + n, [](T v) { return v == 0; });
  }

  const Limits limits_;
  const uint32_t formers_, senders_, keepers_, relays_;
  Ledger& ledger_;
  std::vector<uint64_t> chosen_;  // [expert]: choices of this rank's tokens, in all calls
  uint8_t* const* heaps_;         // of all ranks; the network (put_platform.h) writes to them
  std::vector<uint8_t*> mapped_;  // those that this rank's actors may address; else null
  Region work_;
  // [i]: of the OS actor (i = 0) and the formers; sources_ also of the keepers
  std::vector<std::vector<Source>> sources_;
  std::vector<std::vector<FormedExpert>> experts_;
  typename Scheduler<P>::Memory scheduler_;
  std::vector<Status> seen_;
  std::deque<AbstractEngine<P>> engines_;
  std::vector<typename OneWorker<P>::Memory> memory_;  // [processor]
  host::MachineTables machines_;
  std::barrier<> actors_;
  bool aborted_ = false;
  uint32_t succeeded_ = 0;
};

// Defined outside the class, because inside it would be inline: each test would compile it, even one that declares it
// extern (compiled_once.h).
template <class P>
uint32_t Rank<P>::run(const std::vector<Problem>& problems) {
  std::vector<std::thread> threads;
  succeeded_ = 0;
  for (uint32_t actor = 0; actor <= limits_.processors + formers_ + senders_ + keepers_ + relays_; ++actor) {
    threads.emplace_back([&, actor] {
      this_rank = call.rank;
      const auto body = [&] { run_actor(actor, problems); };
      is_processor(actor) ? run_team<P>(body) : run_warp<P>(body);
    });
  }
  for (std::thread& t : threads) t.join();
  return succeeded_;
}

template <class P>
class AbstractGroup {
 public:
  explicit AbstractGroup(const Limits& limits, const Helpers& helpers = {})
      : heap_bytes(helpers.machines.empty() ? make_heap_layout(limits).bytes : spread_heap_bytes(limits)) {
    for (uint32_t p = 0; p < limits.ranks; ++p) {
      regions_.emplace_back(heap_bytes);
      heaps_.push_back(regions_.back().base());
      ledgers_.emplace_back(limits);
    }
    for (uint32_t p = 0; p < limits.ranks; ++p) {
      ranks_.push_back(std::make_unique<Rank<P>>(p, limits, helpers, heaps_.data(), ledgers_));
    }
  }

  const uint64_t heap_bytes;
  uint8_t* heap(uint32_t p) const { return heaps_[p]; }
  Rank<P>& rank(uint32_t p) { return *ranks_[p]; }
  Ledger& ledger(uint32_t p) { return ledgers_[p]; }

  // Runs the calls on all ranks. Checks that every call succeeds on every rank.
  void run(const std::vector<Problem>& problems) {
    std::vector<std::thread> threads;
    for (auto& r : ranks_) {
      threads.emplace_back([&, rank = r.get()] { CHECK_EQ(rank->run(problems), problems.size()); });
    }
    for (std::thread& t : threads) t.join();
  }

 private:
  std::vector<Region> regions_;
  std::vector<uint8_t*> heaps_;
  std::vector<Ledger> ledgers_;
  std::vector<std::unique_ptr<Rank<P>>> ranks_;
};

}  // namespace flashmoe::test

// Joiner: adds a token's two rows as soon as both are computed, in place of Combine. It runs in joined calls, where a
// rank is alone and a token has two rows at most. The processor that stores the later row of a token has the two rows
// added, and the output written, while other tasks run. With Combine, every processor would still have sums to make
// after its last task. (If tokens have one row each, nothing is joined: GEMM1 writes the output.)
//
// There is a word for each token and block of columns. It counts how much of the token's two rows is stored. A thread
// block that has stored all of a task's features of a row adds 2. If a cluster's two blocks have half of the features
// each, each block adds 1. The add that makes the word 4 belongs to the later row. Whoever makes it sets the word to
// zero. The sum of two rows does not depend on their order, so the bits are those of Combine.
#pragma once

#include "flashmoe/actors/engine.h"
#include "flashmoe/protocol/call.h"

namespace flashmoe {

// Whether there are late rows to join: in a joined call with two rows a token.
FLASHMOE_HD bool joins_late_rows(const Call& c) {
  return c.policy.joined != 0 && c.shape.top_k == 2;
}

// A late row is the later one of a token's two rows, in one block of columns. Its token and block of columns are
// packed into one word, which lanes and the queue pass on.
struct LateRow {
  FLASHMOE_HD static constexpr uint32_t make(uint32_t token, uint32_t column) { return token | column << 16; }
  FLASHMOE_HD static constexpr uint32_t token(uint32_t row) { return row & (kMaxJoinedTokens - 1); }
  FLASHMOE_HD static constexpr uint32_t column(uint32_t row) { return row >> 16; }
};

// A queue of a processor's late rows, in memory that its workers share. One worker puts late rows in, and any worker
// takes them out. All accesses are atomic.
struct LateRows {
  static constexpr uint32_t kCapacity = 512;

  uint32_t row[kCapacity];
  uint32_t found, taken;  // how many late rows have been put into the queue, and taken out of it
  uint32_t closed;        // 1: no more will be found

  // One thread, before the workers' first synchronization.
  FLASHMOE_FN void init() { found = taken = closed = 0; }
};

// One worker's access to the queue. All lanes call its functions.
template <class P, JoinsRows Engine>
class Joiner {
 public:
  FLASHMOE_FN Joiner(const Call& call, Engine& engine, LateRows& late) : c_(call), engine_(engine), late_(late) {}

  // Takes a few late rows from the queue and joins them; false if the queue is empty.
  FLASHMOE_FN bool step() {
    static_assert(Engine::kJoinedAtOnce <= P::kLanes);
    uint32_t first = 0, count = 0;
    if (P::lane() == 0) {
      first = P::look_nearby(&late_.taken);
      count = min_of(P::look_nearby(&late_.found) - first, Engine::kJoinedAtOnce);
    }
    first = P::broadcast(first, 0);
    count = P::broadcast(count, 0);
    if (count == 0) return false;
    P::fence_nearby();
    // Read before they are taken: the worker that fills the queue overwrites only what has been taken.
    uint32_t row = 0;
    if (P::lane() < count) row = P::look_nearby(&late_.row[(first + P::lane()) % LateRows::kCapacity]);
    P::sync();
    const bool mine = P::lane() == 0 && P::compare_swap_nearby(&late_.taken, first, first + count) == first;
    if (P::ballot(mine) == 0) return true;  // another worker has taken some of them
    engine_.begin();
    engine_.join(row, count);
    row = P::broadcast(row, 0);
    engine_.end(Phase::kCombine, LateRow::token(row) >> c_.policy.log2_block, LateRow::column(row));
    return true;
  }

  // Joins late rows until the queue is empty and no more will be found.
  FLASHMOE_FN void run() {
    while (true) {
      const bool closed = P::broadcast(P::lane() == 0 ? P::look_nearby(&late_.closed) : 0u, 0) != 0;
      if (step()) continue;
      if (closed) return;
      P::rest();
    }
  }

  // Called by the one worker that fills the queue. Counts rows 0 .. rows - 1 of a task, which are stored, and puts
  // the late ones into the queue. Before that, joins rows until the queue has room for kMost rows (kMost >= rows).
  // token_of(i): the token of row i; it is called for all i < kMost. part: what each row adds to its word, 2 or 1.
  template <uint32_t kMost, class TokenOf>
  FLASHMOE_FN void find(TokenOf&& token_of, uint32_t rows, uint32_t column, uint32_t part) {
    constexpr uint32_t kEach = kMost / P::kLanes, kAll = 4;
    uint32_t found = P::broadcast(P::lane() == 0 ? P::look_nearby(&late_.found) : 0u, 0);
    while (P::broadcast(P::lane() == 0 ? found - P::look_nearby(&late_.taken) : 0u, 0) > LateRows::kCapacity - kMost) {
      step();
    }
    uint32_t* const words = c_.joint_word(column, 0);
    uint32_t token[kEach], stored[kEach] = {};
    FLASHMOE_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) token[i] = token_of(P::lane() + i * P::kLanes);
    P::release_fence(kDevice);
    FLASHMOE_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
      if (P::lane() + i * P::kLanes < rows) stored[i] = part + P::post_add(words + token[i], part);
    }
    P::acquire_fence(kDevice);
    FLASHMOE_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
      const bool late = stored[i] == kAll;
      uint32_t total;
      const uint32_t position = found + count_before<P>(late, total);
      found += total;
      if (!late) continue;
      P::store_relaxed(words + token[i], 0u);
      P::set_nearby(&late_.row[position % LateRows::kCapacity], LateRow::make(token[i], column));
    }
    P::fence_nearby();
    P::sync();
    if (P::lane() == 0) P::set_nearby(&late_.found, found);
  }

  // Says that no more late rows will be found.
  FLASHMOE_FN void close() {
    if (P::lane() == 0) P::set_nearby(&late_.closed, 1u);
  }

 private:
  const Call& c_;
  Engine& engine_;
  LateRows& late_;
};

}  // namespace flashmoe

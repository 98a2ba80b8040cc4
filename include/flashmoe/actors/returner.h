// Returner: the work on returns that a processor does while it has no task. First it looks for Reduce, which other
// ranks wait for, then for Combine.
//
//   Reduce   (only with the reduced return) sums the rows that this rank's experts made for a token, and sends the sum
//            home (COMET, section 3.1). It goes return group by return group; in each, other ranks' tokens come before
//            the own. Where peers are not mapped, the sum replaces the token's first staged row, and senders put it.
//            Where ranks are on several machines, sums for another machine's tokens stay on this machine in fp32. The
//            relay of their source adds those of all ranks, by place ascending, and sends the total home
//            (protocol/machines.h).
//   Combine  out[token] = sum of the rows that came back for the token, over k (direct) or over ranks (reduced), in
//            ascending order in fp32 (FlashDMoE, equation 5.3). It goes return group by return group.
//
// In the papers both are tasks, but here no scheduler hands them out. They are cut into pieces of some items each.
// (The engine says what an item is: a token's columns of the group, or a part of these columns.) A worker takes the
// next piece before the piece is ready, and sums it when it is ready and the worker has no task. So pieces need no
// slot of the ready queue and no step of the scheduler, and fill the time between products.
//
//   ready     Reduce: reduce_signal[p][g] has this call's epoch. Combine: return_signal[q][g] of every rank q has it.
//   taken     Reduce: by tickets of one counter of the rank. The worker that does the last piece of (p, g) signals p,
//             so no piece may wait for a processor that is busy until the end. Combine: pieces are dealt out to
//             processors in turn, and a processor's workers (a GPU's warps) take its pieces by a counter that the
//             processor has.
//   retired   Reduce: reduce_done[p][g] counts pieces, and the worker that counts the last one signals the group to p.
//             Combine: nothing depends on it; a rank's call is over when no worker has a piece left.
//
// If some clusters stop early (OrderPolicy::link_clusters), only these take pieces of Reduce while the others have
// tasks.
//
// The sums that a rank makes as a relay are pieces of Reduce, too. In each return group they come after everything that
// this rank itself owes. So there is no circle of waits: a machine's sum of group g waits for Reduce of g, which waits
// for nothing that comes later.
#pragma once

#include <concepts>

#include "flashmoe/actors/engine.h"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe {

// The piece of Reduce that a worker has taken.
struct ReduceCursor {
  uint32_t debt;          // the number of the piece's debt: debts are counted by return group, then by source
  uint32_t base;          // the number of pieces of all debts before this one
  uint32_t ticket;        // the piece's number among the pieces of all debts
  uint32_t begun, ready;  // begun 1: the worker has taken its first piece. ready 1: the debt's rows are computed
};

// The piece of Combine that a worker has taken, one of those that its processor has to do.
struct CombineCursor {
  uint32_t group, piece;
  uint32_t held;          // 1: the worker has a piece that it has not summed yet
  uint32_t ready_groups;  // the first `ready_groups` groups are known to have returned from all ranks
};

// A cursor has an S for each worker of a processor. load() and save() are for the S of the worker that calls them,
// with all lanes.
template <class Cursor, class S>
concept HoldsForWorkers = requires(Cursor& cursor, const S& state) {
  { cursor.load() } -> std::same_as<S>;
  cursor.save(state);
};

// The cursors of a processor's workers. Zeroed before each call.
template <template <class> class Cursor>
  requires HoldsForWorkers<Cursor<ReduceCursor>, ReduceCursor>
struct ReturnCursors {
  uint32_t combines;  // how many of the processor's pieces of Combine its workers have taken
  Cursor<ReduceCursor> reduce;
  Cursor<CombineCursor> combine;
};

// Which pieces a worker takes.
enum class Summing : uint8_t { kAll, kReduces, kCombines };

// Which pieces a worker takes while its processor still has tasks. If some clusters stop early for Reduce, the others
// leave Reduce to them, because summing a piece beside tasks takes as long as one or two tasks.
FLASHMOE_HD Summing summing_between_tasks(const Call& c) {
  return c.policy.order.link_clusters != 0 ? Summing::kCombines : Summing::kAll;
}

// Whether return row s of an own token holds something: s is k (direct) or a rank (reduced). The return rows of a bad
// row hold NaN (fill_missing).
FLASHMOE_HD bool is_returned(const Call& c, uint32_t token, uint32_t s) {
  return c.reduced() ? *c.out_counts(s, token) != 0 : static_cast<uint32_t>(c.routing(token)[s]) < Choice::kNone;
}

// One worker's part in Reduce. All lanes call its functions.
template <class P, SumsRows Engine, class Cursor>
class Reducer {
 public:
  FLASHMOE_FN Reducer(const Call& call, Engine& engine, Cursor& cursor) : c_(call), engine_(engine), cursor_(cursor) {}

  // Looks at the worker's piece; the first look takes one. kProgress: its rows are computed. kDone: there is none left.
  FLASHMOE_FN Step look() {
    if (!c_.reduced() || owes_nothing()) return Step::kDone;
    ReduceCursor at = cursor_.load();
    const uint32_t debts = c_.policy.groups * debts_of_group();
    if (at.debt == debts) return Step::kDone;
    if (at.begun == 0) {
      if (!has_heard()) return Step::kIdle;
      at = {.debt = 0, .base = 0, .ticket = take(), .begun = 1, .ready = 0};
    }
    while (at.debt != debts && at.ticket - at.base >= pieces(at.debt)) {
      at.base += pieces(at.debt++);
      at.ready = 0;
    }
    if (at.debt != debts && at.ready == 0) at.ready = is_computed(at.debt);
    cursor_.save(at);
    if (at.debt == debts) return Step::kDone;
    return at.ready != 0 ? Step::kProgress : Step::kIdle;
  }

  FLASHMOE_FN typename Engine::Piece piece() const {
    engine_.begin();
    const ReduceCursor at = cursor_.load();
    const uint32_t all = items(at.debt);
    if constexpr (SpansMachines<P>) {
      if (is_of_machine(at.debt)) {
        return engine_.machine_piece(source(at.debt), group(at.debt), at.ticket - at.base, engine_.items_of_reduce(all),
                                     all);
      }
    }
    return engine_.reduce_piece(source(at.debt), group(at.debt), at.ticket - at.base, engine_.items_of_reduce(all),
                                all);
  }

  // Called after the piece is summed.
  FLASHMOE_FN void done() {
    ReduceCursor at = cursor_.load();
    const uint32_t p = source(at.debt), g = group(at.debt);
    P::sync();  // all lanes' rows before the count
    if (P::lane() == 0 && P::fetch_add_acq_rel(c_.reduce_done(p, g), 1u) + 1 == pieces(at.debt)) {
      P::store_relaxed(c_.reduce_done(p, g), 0u);
      signal(at.debt, p, g);
    }
    engine_.end(Phase::kReduce, at.ticket - at.base, p << 8 | g);
    at.ticket = take();
    cursor_.save(at);
  }

 private:
  // Called when a debt is paid, which means that all its sums are written. Tells the rank that waits for them.
  FLASHMOE_FN void signal([[maybe_unused]] uint32_t debt, uint32_t p, uint32_t g) const {
    if constexpr (SpansMachines<P>) {
      if (is_of_machine(debt)) return signal_home<P>(c_, p, g);
    }
    signal_return<P>(c_, p, g);
  }

  // How many debts a return group has: one of this rank to each rank, and behind these, for each source for which
  // this rank is the relay, one of the whole machine.
  FLASHMOE_FN uint32_t debts_of_group() const {
    if constexpr (SpansMachines<P>) {
      const Machines& m = *c_.machines;
      if (m.sums) return c_.shape.ranks + m.source_count;
    }
    return c_.shape.ranks;
  }
  FLASHMOE_FN bool owes_nothing() const {
    if constexpr (SpansMachines<P>) return c_.shape.local_experts == 0 && debts_of_group() == c_.shape.ranks;
    return c_.shape.local_experts == 0;
  }
  FLASHMOE_FN bool is_of_machine(uint32_t debt) const { return debt % debts_of_group() >= c_.shape.ranks; }
  FLASHMOE_FN uint32_t group(uint32_t debt) const { return debt / debts_of_group(); }
  // The source to which a debt is owed. First come all ranks, from the next rank on, round the ranks, the own rank
  // last. Then come the sources for which this rank is the relay.
  FLASHMOE_FN uint32_t source(uint32_t debt) const {
    if constexpr (SpansMachines<P>) {
      if (is_of_machine(debt)) return c_.machines->sources[debt % debts_of_group() - c_.shape.ranks];
    }
    return (c_.rank + 1 + debt % debts_of_group()) % c_.shape.ranks;
  }

  FLASHMOE_FN uint32_t take() const {
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = P::fetch_add(&c_.control()->reduces[c_.parity()].value, uint64_t{1});
    return static_cast<uint32_t>(P::broadcast(ticket, 0));
  }

  // Whether every rank's call signal is here: then it is known how many tokens, hence pieces, each has.
  FLASHMOE_FN bool has_heard() const {
    bool all = true;
    for (uint32_t p = P::lane(); p < c_.shape.ranks; p += P::kLanes) {
      all &= Signal::epoch(P::load_acquire(c_.call_signal(c_.rank, p), kSystem)) == c_.epoch;
    }
    const bool heard = P::ballot(!all) == 0;
    P::sync();
    return heard;
  }

  FLASHMOE_FN uint32_t is_computed(uint32_t debt) const {
    if constexpr (SpansMachines<P>) {
      if (is_of_machine(debt)) return has_sums(source(debt), group(debt));
    }
    const uint64_t* signal = c_.reduce_signal(source(debt), group(debt));
    if (Signal::epoch(P::broadcast(P::poll(signal, kDevice), 0)) != c_.epoch) return 0;
    P::acquire(signal, kDevice);  // each lane for itself; they meet in cursor_.save()
    return 1;
  }

  // Whether every rank of this machine has left its sums for source p with this rank, which is the relay for p.
  FLASHMOE_FN uint32_t has_sums(uint32_t p, uint32_t g) const {
    const Machines& m = *c_.machines;
    const RelayPlace from(c_, m, c_.rank, p);
    bool all = true;
    for (uint32_t i = 0; i < m.size(m.of[c_.rank]); ++i) {
      const uint64_t word = P::broadcast(P::poll(from.sum_signal(i, g), kSystem), 0);
      all = all && Signal::epoch(word) == c_.epoch;
    }
    // Each lane for itself; they meet in cursor_.save().
    for (uint32_t i = 0; all && i < m.size(m.of[c_.rank]); ++i) P::acquire(from.sum_signal(i, g), kSystem);
    return all ? 1 : 0;
  }

  // How many items a debt has. A rank without experts owes nothing itself.
  FLASHMOE_FN uint32_t items(uint32_t debt) const {
    if constexpr (SpansMachines<P>) {
      if (c_.shape.local_experts == 0 && !is_of_machine(debt)) return 0;
    }
    return engine_.items(c_.tokens_of(source(debt)), group(debt));
  }
  FLASHMOE_FN uint32_t pieces(uint32_t debt) const {
    const uint32_t all = items(debt);
    return ceil_div(all, engine_.items_of_reduce(all));
  }

  const Call& c_;
  Engine& engine_;
  Cursor& cursor_;
};

// One worker's part in Combine. All lanes call its functions.
template <class P, SumsRows Engine, class Cursor>
class Combiner {
 public:
  FLASHMOE_FN Combiner(const Call& call, Engine& engine, uint32_t& taken, Cursor& cursor)
      : c_(call), engine_(engine), taken_(taken), cursor_(cursor) {}

  // Takes the worker's next piece, if it has none. kProgress: its return group is here. kDone: there is none left.
  FLASHMOE_FN Step look() {
    CombineCursor at = cursor_.load();
    if (at.held == 0) take(at);
    if (at.group >= at.ready_groups && at.group != c_.policy.groups && has_returned(at.group))
      at.ready_groups = at.group + 1;
    cursor_.save(at);
    if (at.group == c_.policy.groups) return Step::kDone;
    return at.group < at.ready_groups ? Step::kProgress : Step::kIdle;
  }

  FLASHMOE_FN typename Engine::Piece piece() const {
    engine_.begin();
    const CombineCursor at = cursor_.load();
    const uint32_t all = engine_.items(c_.shape.tokens, at.group);
    return engine_.combine_piece(at.group, number(at), engine_.items_of_combine(all), all);
  }

  // Called after the piece is summed.
  FLASHMOE_FN void done() {
    CombineCursor at = cursor_.load();
    engine_.end(Phase::kCombine, number(at), at.group);
    at.held = 0;
    cursor_.save(at);
  }

 private:
  // The piece's number among the pieces of its group. These are dealt out to the processors in turn.
  FLASHMOE_FN uint32_t number(const CombineCursor& at) const {
    return engine_.processor() + at.piece * engine_.processors();
  }
  // Takes the processor's next piece, group after group. If none is left, sets at.group to the number of groups.
  FLASHMOE_FN void take(CombineCursor& at) const {
    uint32_t piece = 0;
    if (P::lane() == 0) piece = P::fetch_add_nearby(&taken_, 1u);
    at.piece = P::broadcast(piece, 0);
    FLASHMOE_NO_UNROLL
    for (at.group = 0; at.group < c_.policy.groups; ++at.group) {
      const uint32_t pieces = pieces_of_processor(at.group);
      if (at.piece < pieces) break;
      at.piece -= pieces;
    }
    at.held = 1;
  }
  FLASHMOE_FN uint32_t pieces_of_processor(uint32_t g) const {
    const uint32_t items = engine_.items(c_.shape.tokens, g), pieces = ceil_div(items, engine_.items_of_combine(items));
    return engine_.processor() < pieces ? ceil_div(pieces - engine_.processor(), engine_.processors()) : 0;
  }
  FLASHMOE_FN bool has_returned(uint32_t g) const {
    bool all = true;
    for (uint32_t q = P::lane(); q < c_.shape.ranks; q += P::kLanes) {
      all &= Signal::epoch(P::poll(c_.return_signal(c_.rank, returner(q), g), kSystem)) == c_.epoch;
    }
    if (P::ballot(!all) != 0) return false;
    // Each lane acquires the words that it polled; they meet in cursor_.save().
    for (uint32_t q = P::lane(); q < c_.shape.ranks; q += P::kLanes)
      P::acquire(c_.return_signal(c_.rank, returner(q), g), kSystem);
    return true;
  }
  // The rank whose return signal says that what rank q owes to this rank is here.
  FLASHMOE_FN uint32_t returner(uint32_t q) const {
    if constexpr (SpansMachines<P>) return c_.machines->returner(c_.rank, q);
    return q;
  }

  const Call& c_;
  Engine& engine_;
  uint32_t& taken_;
  Cursor& cursor_;
};

// One worker's returner. All lanes call its functions.
template <class P, SumsRows Engine, template <class> class Cursor>
class Returner {
 public:
  FLASHMOE_FN Returner(const Call& call, Engine& engine, ReturnCursors<Cursor>& cursors)
      : engine_(engine),
        reducer_(call, engine, cursors.reduce),
        combiner_(call, engine, cursors.combines, cursors.combine) {}

  // Sums a piece, if one is ready. kDone: no pieces are left.
  FLASHMOE_FN Step step(Summing what) {
    const Step reduced = what == Summing::kCombines ? Step::kDone : reducer_.look();  // first: a peer waits for it
    const bool reduces = reduced == Step::kProgress;
    const Step combined = reduces ? Step::kIdle : what == Summing::kReduces ? Step::kDone : combiner_.look();
    if (reduces || combined == Step::kProgress) {
      const typename Engine::Piece piece = reduces ? reducer_.piece() : combiner_.piece();
      engine_.sum(piece);
      if (reduces) {
        reducer_.done();
      } else {
        combiner_.done();
      }
      return Step::kProgress;
    }
    return reduced == Step::kDone && combined == Step::kDone ? Step::kDone : Step::kIdle;
  }

  // Sums pieces until none are left, or the call is aborted.
  FLASHMOE_FN void run(const Call& c, Summing what = Summing::kAll) {
    wait_until<P>(
        c,
        [&] {
          const Step s = step(what);
          if (s == Step::kIdle) P::rest();  // a group takes long, and all processors look at the same word
          return s;
        },
        OsLiveness<P>{c});
  }

 private:
  Engine& engine_;
  Reducer<P, Engine, Cursor<ReduceCursor>> reducer_;
  Combiner<P, Engine, Cursor<CombineCursor>> combiner_;
};

}  // namespace flashmoe

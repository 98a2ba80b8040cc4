// Returner: what a processor does that has no task. It reduces rows that are computed here and owed to other ranks, else it
// combines what came back for its own tokens.
//
//   Reduce   (only with the reduced return) the rows that this rank's experts made for a token, summed and sent home as one
//            (COMET, section 3.1). Return group by return group, in each the other ranks' tokens before the own. Where peers
//            are not mapped, the sum is left where the token's first row was, and senders put it (put_sender.h).
//   Combine  out[token] = sum of the rows that came back for it, over k (direct) or over ranks (reduced), in ascending order
//            in fp32 (FlashDMoE, equation 5.3). Return group by return group.
//
// Both are tasks in the papers' sense, but nobody hands them out: they are cut into pieces, some items each (the engine says
// what an item is: a token's columns of the group, or a part of these), and whoever is free takes the next piece that is
// ready. So they take no place in the ready queue and no step of the scheduler, and fill in between the products.
//
//   found     Reduce: reduce_signal[p][g] is of this call. Combine: return_signal[q][g] is, of every rank q.
//   taken     Reduce: by a ticket of the whole rank, since the last piece of (p, g) says that all have gone home: none may
//             lie with a processor that is busy to the end. Combine: pieces go round the processors, and a processor's
//             workers (a GPU's warps) take them from a counter of their own.
//   retired   Reduce: reduce_done[p][g] counts pieces, and the last one signals the group to p. Combine: nothing depends on
//             it; a rank's call is over when all its workers have none left.
#pragma once

#include "flashmoe/protocol/packet.h"
#include "flashmoe/protocol/pending.h"
#include "flashmoe/protocol/wait.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe {

// Of a worker: the piece of Reduce that it has taken.
struct ReducePlace {
  uint32_t stage;   // (group, source)
  uint32_t base;    // pieces of the stages before
  uint32_t ticket;  // counts the pieces of all stages
  uint32_t begun, ready;
};

// Of a worker: the piece of its processor's combines that it has taken.
struct CombinePlace {
  uint32_t group, piece;
  uint32_t held;          // 1: not combined yet
  uint32_t ready_groups;  // leading groups known to be here
};

// Of a processor, zeroed before each call. Place<S>: an S for each of its workers, with load() and save(S), for all lanes.
template <template <class> class Place>
struct ReturnPlaces {
  uint32_t combines;  // pieces of its combines taken
  Place<ReducePlace> reduce;
  Place<CombinePlace> combine;
};

// Whether slot s of an own token's return rows holds something: s is k (direct) or a rank (reduced).
FLASHMOE_HD bool is_returned(const Call& c, uint32_t token, uint32_t s) {
  return c.reduced() ? *c.out_counts(s, token) != 0 : c.routing(token)[s] >= 0;
}

// One worker's part in Reduce. All functions by all lanes. What the engine supplies: see Returner.
template <class P, class Engine, class Place>
class Reducer {
 public:
  FLASHMOE_FN Reducer(const Call& call, Engine& engine, Place& place) : c_(call), engine_(engine), place_(place) {}

  // Whether the next piece's rows are computed: then it is to be summed. kDone: there are none left.
  FLASHMOE_FN Step look() {
    if (!c_.reduced() || c_.local_experts == 0) return Step::kDone;
    ReducePlace at = place_.load();
    const uint32_t stages = c_.groups * c_.ranks;
    if (at.stage == stages) return Step::kDone;
    if (at.begun == 0) {
      if (!has_heard()) return Step::kIdle;
      at = {.stage = 0, .base = 0, .ticket = take(), .begun = 1, .ready = 0};
    }
    while (at.stage != stages && at.ticket - at.base >= pieces(at.stage)) {
      at.base += pieces(at.stage++);
      at.ready = 0;
    }
    if (at.stage != stages && at.ready == 0) at.ready = is_computed(at.stage);
    place_.save(at);
    if (at.stage == stages) return Step::kDone;
    return at.ready != 0 ? Step::kProgress : Step::kIdle;
  }

  FLASHMOE_FN typename Engine::Piece piece() const {
    engine_.begin();
    const ReducePlace at = place_.load();
    const uint32_t all = items(at.stage);
    return engine_.reduce_piece(source(at.stage), group(at.stage), at.ticket - at.base, engine_.items_of_reduce(all),
                                all);
  }

  // After the piece is summed.
  FLASHMOE_FN void done() {
    ReducePlace at = place_.load();
    const uint32_t p = source(at.stage), g = group(at.stage);
    P::sync();  // all lanes' rows before the count
    if (P::lane() == 0 && P::fetch_add_acq_rel(c_.reduce_done(p, g), 1u) + 1 == pieces(at.stage)) {
      P::store_relaxed(c_.reduce_done(p, g), 0u);
      signal_return<P>(c_, p, g);
    }
    engine_.end(Phase::kReduce, at.ticket - at.base, p << 8 | g);
    at.ticket = take();
    place_.save(at);
  }

 private:
  FLASHMOE_FN uint32_t group(uint32_t stage) const { return stage / c_.ranks; }
  // The own rank last.
  FLASHMOE_FN uint32_t source(uint32_t stage) const { return (c_.rank + 1 + stage % c_.ranks) % c_.ranks; }

  FLASHMOE_FN uint32_t take() const {
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = P::fetch_add(&c_.control()->reduces[c_.parity()].value, uint64_t{1});
    return static_cast<uint32_t>(P::broadcast(ticket, 0));
  }

  // How many tokens each rank has is known.
  FLASHMOE_FN bool has_heard() const {
    bool all = true;
    for (uint32_t p = P::lane(); p < c_.ranks; p += P::kLanes) {
      all &= Signal::epoch(P::load_acquire(c_.call_signal(c_.rank, p), kSystem)) == c_.epoch;
    }
    const bool heard = P::ballot(!all) == 0;
    P::sync();
    return heard;
  }

  FLASHMOE_FN uint32_t is_computed(uint32_t stage) const {
    const uint64_t* signal = c_.reduce_signal(source(stage), group(stage));
    if (Signal::epoch(P::broadcast(P::poll(signal, kDevice), 0)) != c_.epoch) return 0;
    P::acquire(signal, kDevice);  // by each lane; place_.save() has them meet behind it
    return 1;
  }

  FLASHMOE_FN uint32_t items(uint32_t stage) const { return engine_.items(c_.tokens_of(source(stage)), group(stage)); }
  FLASHMOE_FN uint32_t pieces(uint32_t stage) const {
    const uint32_t all = items(stage);
    return ceil_div(all, engine_.items_of_reduce(all));
  }

  const Call& c_;
  Engine& engine_;
  Place& place_;
};

// One worker's part in the combines of its processor. All functions by all lanes.
template <class P, class Engine, class Place>
class Combiner {
 public:
  FLASHMOE_FN Combiner(const Call& call, Engine& engine, uint32_t& taken, Place& place)
      : c_(call), engine_(engine), taken_(taken), place_(place) {}

  // Whether the next piece's return group is here: then it is to be summed. kDone: there are none left.
  FLASHMOE_FN Step look() {
    CombinePlace at = place_.load();
    if (at.held == 0) take(at);
    if (at.group >= at.ready_groups && at.group != c_.groups && has_returned(at.group)) at.ready_groups = at.group + 1;
    place_.save(at);
    if (at.group == c_.groups) return Step::kDone;
    return at.group < at.ready_groups ? Step::kProgress : Step::kIdle;
  }

  FLASHMOE_FN typename Engine::Piece piece() const {
    engine_.begin();
    const CombinePlace at = place_.load();
    const uint32_t all = engine_.items(c_.tokens, at.group);
    return engine_.combine_piece(at.group, number(at), engine_.items_of_combine(all), all);
  }

  // After the piece is summed.
  FLASHMOE_FN void done() {
    CombinePlace at = place_.load();
    engine_.end(Phase::kCombine, number(at), at.group);
    at.held = 0;
    place_.save(at);
  }

 private:
  // Of the piece, among those of its group.
  FLASHMOE_FN uint32_t number(const CombinePlace& at) const {
    return engine_.processor() + at.piece * engine_.processors();
  }
  // The processor's next piece, groups in turn; none left: group is their number.
  FLASHMOE_FN void take(CombinePlace& at) const {
    uint32_t piece = 0;
    if (P::lane() == 0) piece = P::fetch_add_nearby(&taken_, 1u);
    at.piece = P::broadcast(piece, 0);
    FLASHMOE_NO_UNROLL
    for (at.group = 0; at.group < c_.groups; ++at.group) {
      const uint32_t pieces = pieces_of_processor(at.group);
      if (at.piece < pieces) break;
      at.piece -= pieces;
    }
    at.held = 1;
  }
  FLASHMOE_FN uint32_t pieces_of_processor(uint32_t g) const {
    const uint32_t items = engine_.items(c_.tokens, g), pieces = ceil_div(items, engine_.items_of_combine(items));
    return engine_.processor() < pieces ? ceil_div(pieces - engine_.processor(), engine_.processors()) : 0;
  }
  FLASHMOE_FN bool has_returned(uint32_t g) const {
    bool all = true;
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) {
      all &= Signal::epoch(P::poll(c_.return_signal(c_.rank, q, g), kSystem)) == c_.epoch;
    }
    if (P::ballot(!all) != 0) return false;
    // By the lanes that looked; place_.save() has them meet behind it.
    for (uint32_t q = P::lane(); q < c_.ranks; q += P::kLanes) P::acquire(c_.return_signal(c_.rank, q, g), kSystem);
    return true;
  }

  const Call& c_;
  Engine& engine_;
  uint32_t& taken_;
  Place& place_;
};

// One worker. All functions by all lanes. The engine supplies
//   processor(), processors()        which of the rank's processors this worker is one of, and how many there are
//   items(tokens, g)                 into how many items the columns of return group g of so many tokens are cut
//   items_of_reduce(all), items_of_combine(all)   how many of `all` items a piece has; the same on every processor
//   Piece reduce_piece(p, g, n, each, all), combine_piece(g, n, each, all)   the n-th piece, of `each` of `all` items
//   sum(piece)                       sums its rows in ascending order in fp32 and writes them, at home or to the output;
//                                    ordered before this worker's next release when it returns
//   begin(), end(phase, index, column)   of a span, for reports and traces
template <class P, class Engine, template <class> class Place>
class Returner {
 public:
  FLASHMOE_FN Returner(const Call& call, Engine& engine, ReturnPlaces<Place>& places)
      : engine_(engine),
        reducer_(call, engine, places.reduce),
        combiner_(call, engine, places.combines, places.combine) {}

  // Sums a piece, if one is ready. kDone: there are none left.
  FLASHMOE_FN Step step() {
    const Step reduced = reducer_.look();  // first: a peer waits for it
    const bool reduces = reduced == Step::kProgress;
    const Step combined = reduces ? Step::kIdle : combiner_.look();
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

  // Until there are none left, or the call is aborted.
  FLASHMOE_FN void run(const Call& c) {
    wait_until<P>(
        c,
        [&] {
          const Step s = step();
          if (s == Step::kIdle) P::rest();  // a group takes long, and all processors look at the same word
          return s;
        },
        OsLiveness<P>{c});
  }

 private:
  Engine& engine_;
  Reducer<P, Engine, Place<ReducePlace>> reducer_;
  Combiner<P, Engine, Place<CombinePlace>> combiner_;
};

}  // namespace flashmoe

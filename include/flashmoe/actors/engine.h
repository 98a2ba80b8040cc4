// What actors ask of the engine that copies, multiplies and sums for them, as concepts. The CPU engine, the GPU kernel,
// the simulation and tests have such engines. All lanes call an engine's functions. Each engine is checked against its
// concepts where it is defined.
#pragma once

#include <concepts>

#include "flashmoe/protocol/task.h"

namespace flashmoe {

// A span of an actor's time, for reports and traces.
template <class E>
concept HasSpans = requires(E& engine, Phase phase, uint32_t index, uint32_t column) {
  engine.begin();
  engine.end(phase, index, column);
};

// Of a Sender: copies the rows of the tokens that lanes 0 .. rows - 1 name to rank q, where Call::dispatched_row has them; they
// are written when it returns.
template <class E>
concept SendsRows =
    HasSpans<E> && requires(E& engine, uint32_t q, uint32_t token, uint32_t rows) { engine.send_rows(q, token, rows); };

// Of a PutSender: copies the own row to Call::out_row, from which it is put.
template <class E>
concept StagesRows = HasSpans<E> && requires(E& engine, uint32_t token) { engine.stage_row(token); };

// Of whoever passes on (relay.h): as send_rows, of p's tokens, from where this rank has them.
template <class E>
concept PassesRows =
    requires(E& engine, uint32_t q, uint32_t p, uint32_t token, uint32_t rows) { engine.pass_rows(q, p, token, rows); };

// Of a Joiner: adds the two rows of each late row that lanes 0 .. count - 1 name.
template <class E>
concept JoinsRows = HasSpans<E> && requires(E& engine, uint32_t row, uint32_t count) {
  { E::kJoinedAtOnce + 0u } -> std::same_as<uint32_t>;  // the most of a step: a lane each, or fewer
  engine.join(row, count);
};

// Of a Returner. The columns of return group g of so many tokens are cut into items, and these into pieces.
template <class E>
concept SumsRows = HasSpans<E> && requires(E& engine, const typename E::Piece& piece, uint32_t tokens, uint32_t p,
                                           uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
  { engine.processor() } -> std::same_as<uint32_t>;  // which of the rank's this worker is one of
  { engine.processors() } -> std::same_as<uint32_t>;
  { engine.items(tokens, g) } -> std::same_as<uint32_t>;
  { engine.items_of_reduce(all) } -> std::same_as<uint32_t>;  // of a piece; the same on every processor
  { engine.items_of_combine(all) } -> std::same_as<uint32_t>;
  { engine.reduce_piece(p, g, n, each, all) } -> std::same_as<typename E::Piece>;  // the n-th, of `each` of all items
  { engine.combine_piece(g, n, each, all) } -> std::same_as<typename E::Piece>;
  // Its rows in ascending order in fp32, written home or to the output; ordered before this worker's next release.
  engine.sum(piece);
};

// The same where ranks may be on several machines.
template <class E>
concept SumsForMachines = SumsRows<E> && requires(E& engine, uint32_t n) {
  { engine.machine_piece(n, n, n, n, n) } -> std::same_as<typename E::Piece>;  // as reduce_piece
};

// Of run_processor(). What multiply() writes is ordered before this warp's next release.
template <class E>
concept RunsProcessor =
    SendsRows<E> && SumsRows<E> && JoinsRows<E> && requires(E& engine, uint32_t b, TileIndex tile, uint32_t column) {
      { engine.dispatch(b) } -> std::same_as<bool>;  // of token block b; false if the call is over
      engine.template multiply<0>(tile, column);     // of product 0, and of each other
    };

}  // namespace flashmoe

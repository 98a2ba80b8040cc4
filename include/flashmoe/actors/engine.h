// What actors ask of the engine that copies, multiplies and sums for them, as concepts. The CPU engine, the GPU kernel,
// the simulation and tests have such engines. All lanes call an engine's functions. Each engine is checked against its
// concepts where it is defined.
#pragma once

#include <concepts>

#include "flashmoe/protocol/task.h"

namespace flashmoe {

// begin() and end() mark a span of an actor's time, for reports and traces.
template <class E>
concept HasSpans = requires(E& engine, Phase phase, uint32_t index, uint32_t column) {
  engine.begin();
  engine.end(phase, index, column);
};

// The engine of a Sender. Lanes 0 .. rows - 1 name a token each; send_rows() copies the rows of these tokens to
// Call::dispatched_row of rank q. When it returns, they are written.
template <class E>
concept SendsRows =
    HasSpans<E> && requires(E& engine, uint32_t q, uint32_t token, uint32_t rows) { engine.send_rows(q, token, rows); };

// The engine of a PutSender. stage_row() copies an own token's row to Call::out_row, from which the row is put.
template <class E>
concept StagesRows = HasSpans<E> && requires(E& engine, uint32_t token) { engine.stage_row(token); };

// The engine of a relay (relay.h). pass_rows() is like send_rows(), but for tokens of rank p, whose rows lie in this
// rank's heap.
template <class E>
concept PassesRows =
    requires(E& engine, uint32_t q, uint32_t p, uint32_t token, uint32_t rows) { engine.pass_rows(q, p, token, rows); };

// The engine of a Joiner. Lanes 0 .. count - 1 name a late row each; join() adds the two rows of the late row's token.
template <class E>
concept JoinsRows = HasSpans<E> && requires(E& engine, uint32_t row, uint32_t count) {
  { E::kJoinedAtOnce + 0u } -> std::same_as<uint32_t>;  // the most late rows of a step; no more than kLanes
  engine.join(row, count);
};

// The engine of a Returner. The columns of return group g of a number of tokens are cut into items, and some items
// are a piece.
template <class E>
concept SumsRows = HasSpans<E> && requires(E& engine, const typename E::Piece& piece, uint32_t tokens, uint32_t p,
                                           uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
  { engine.processor() } -> std::same_as<uint32_t>;  // the number of the processor that this worker is part of
  { engine.processors() } -> std::same_as<uint32_t>;
  { engine.items(tokens, g) } -> std::same_as<uint32_t>;
  { engine.items_of_reduce(all) } -> std::same_as<uint32_t>;  // items of a piece; the same on every processor
  { engine.items_of_combine(all) } -> std::same_as<uint32_t>;
  { engine.reduce_piece(p, g, n, each, all) } -> std::same_as<typename E::Piece>;  // the n-th piece, of `each` items
  { engine.combine_piece(g, n, each, all) } -> std::same_as<typename E::Piece>;
  // Sums the piece's rows in ascending order in fp32. Writes the sums home or to the output, before this worker's
  // next release.
  engine.sum(piece);
};

// The engine of a Returner if ranks may be on several machines.
template <class E>
concept SumsForMachines = SumsRows<E> && requires(E& engine, uint32_t n) {
  { engine.machine_piece(n, n, n, n, n) } -> std::same_as<typename E::Piece>;  // arguments as of reduce_piece()
};

// The engine of run_processor(). What multiply() writes is ordered before this warp's next release.
template <class E>
concept RunsProcessor =
    SendsRows<E> && SumsRows<E> && JoinsRows<E> && requires(E& engine, uint32_t b, TileIndex tile, uint32_t column) {
      { engine.dispatch(b) } -> std::same_as<bool>;  // dispatches token block b; false if the call is over
      engine.template multiply<0>(tile, column);     // for product 0, and so for every other product
    };

}  // namespace flashmoe

// A processor's part in a backward pass: executes the tasks of a call whose tokens are rows of dY
// (protocol/gradients.h). When it does a piece of Combine, it also finishes the gradients of router logits and of
// combine weights for the tokens of the piece. It keeps the rows of dY that come from other ranks, and with redispatch
// the rows of x that come with them, because the gradients of weights need these rows after the call.
#pragma once

#include "cpu/engine.h"
#include "cpu/gradients.h"

namespace flashmoe::cpu {

// Rows are sent, reduced and counted as in a forward pass. But a task has all columns of its tile, because the gradient
// of a row's combine weight is a sum over all columns.
class BackwardEngine : public Engine {
 public:
  using Engine::Engine;

  // Called before each pass.
  void begin_pass(Backward& pass, const GradientLayout& layout) { pass_ = &pass, layout_ = &layout; }

  bool dispatch(uint32_t b);
  void send_rows(uint32_t q, uint32_t token, uint32_t rows);
  template <uint32_t n>
  void multiply(TileIndex tile, uint32_t) {
    multiply(n, tile);
  }
  void sum(const Piece& piece) { piece.of == Piece::kReduce ? reduce(piece) : combine(piece); }

 private:
  void multiply(uint32_t n, TileIndex tile);
  void find_rows(uint32_t tile);
  float* load_gradients(uint32_t tile, uint32_t padded);
  // The row of x that the forward pass had for `row`, a row of the task that runs.
  const uint8_t* x_of(const Row& row, const Kept::Row& kept) const;
  // A right operand, as it is stored.
  struct Right {
    const void* data;
    uint64_t pitch;  // elements from one row to the next
    Rows of;
    const void* up = nullptr;  // the second matrix, if the contracted rows lie in two; else null
  };
  // out[rows, n] = a[rows, k] * matrix^T (Rows::kResults) or * matrix (Rows::kContraction). Computes some columns of
  // `out` at a time.
  void multiply_rows(float* out, const float* a, uint32_t rows, const Right& matrix, uint32_t n, uint32_t k);
  // For the tile's rows: the gradients of a slice's pre-activations, and the slice's part of the gradients of combine
  // weights.
  void hidden_gradients(uint32_t tile, uint32_t slice);
  // Computes what the tile's rows add to their tokens' gradients, and writes it to each row's home.
  void return_gradients(uint32_t tile);
  void combine(const Piece& piece);
  bool is_bad(uint32_t token) const;
  void finish_weights(uint32_t token);

  Backward* pass_ = nullptr;
  const GradientLayout* layout_ = nullptr;
  std::vector<uint64_t> numbers_;  // numbers of the tile's rows among all kept rows
  std::vector<float> part_, gate_;
  std::vector<double> of_weights_, scores_;
  std::vector<int32_t> ids_;
};
static_assert(RunsProcessor<BackwardEngine> && SumsForMachines<BackwardEngine>);

}  // namespace flashmoe::cpu

// The CPU engine's part of a processor: executes tasks and the pieces of Reduce and Combine. Products go tile by tile
// through the BLAS.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/kept.h"
#include "cpu/layer.h"
#include "cpu/platform.h"
#include "cpu/router.h"
#include "cpu/trace.h"
#include "flashmoe/actors/processor.h"
#include "flashmoe/protocol/packet.h"

namespace flashmoe::cpu {

// Grows a buffer, never shrinks it. New elements are zero, so that the rows that a GEMM reads beyond the tile's rows
// are finite.
inline float* room(std::vector<float>& buffer, size_t n) {
  if (buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

// The address of element i of elements of type t.
inline const uint8_t* at(const void* elements, DType t, uint64_t i) {
  return static_cast<const uint8_t*>(elements) + stored_bytes(t, i);
}
inline uint8_t* at(void* elements, DType t, uint64_t i) {
  return static_cast<uint8_t*>(elements) + stored_bytes(t, i);
}

// One for each processor thread. It is kept from call to call for its buffers. The call, the layer and the columns of
// tasks change between calls.
class Engine {
 public:
  Engine(const SpreadCall& call, const Layer& layer, const std::array<uint32_t, kProducts>& task_columns,
         ActorTrace& trace)
      : c_(call), layer_(layer), trace_(trace), task_columns_(task_columns) {}

  // Computes the gate of token block b and dispatches the block. Returns false if the call is over.
  bool dispatch(uint32_t b);
  // Executes a task of product n of the program.
  template <uint32_t n>
  void multiply(TileIndex tile, uint32_t block) {
    multiply(n, tile, block);
  }

  // ---- what a Sender calls --------------------------------------------------------------------------------------
  // Sends one row at most, because a thread is one lane.
  void send_rows(uint32_t q, uint32_t token, uint32_t rows);

  // ---- what a Returner calls: an item is a token's columns of a return group ------------------------------------
  struct Piece {
    enum { kReduce, kMachine, kCombine } of;
    uint32_t source, group;  // Combine has no source
    uint32_t first_token, tokens;
  };
  uint32_t processor() const { return trace_.actor - 1; }
  uint32_t processors() const { return c_.policy.clusters; }
  static uint32_t items(uint32_t tokens, uint32_t) { return tokens; }
  // Pieces are so small that every processor can have one if there are enough items.
  uint32_t items_of_reduce(uint32_t items) const {
    return std::clamp(ceil_div(items, c_.policy.clusters), 1u, kMaxTokenBlock);
  }
  uint32_t items_of_combine(uint32_t items) const { return items_of_reduce(items); }
  static Piece reduce_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    return {Piece::kReduce, p, g, n * each, min_of(each, all - n * each)};
  }
  static Piece machine_piece(uint32_t p, uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    return {Piece::kMachine, p, g, n * each, min_of(each, all - n * each)};
  }
  static Piece combine_piece(uint32_t g, uint32_t n, uint32_t each, uint32_t all) {
    return {Piece::kCombine, 0, g, n * each, min_of(each, all - n * each)};
  }
  void sum(const Piece& piece) {
    switch (piece.of) {
      case Piece::kReduce: return reduce(piece);
      case Piece::kMachine: return sum_machine(piece);
      case Piece::kCombine: return combine(piece);
    }
  }

  // ---- what a Joiner calls --------------------------------------------------------------------------------------
  static constexpr uint32_t kJoinedAtOnce = 1;
  void join(uint32_t row, uint32_t count);

  // A sender, returner or joiner calls begin() when it begins a span of work, and end() when the span ends. The trace
  // gets the span.
  void begin() { begun_ns_ = monotonic_ns(); }
  void end(Phase phase, uint32_t index, uint32_t column) {
    trace_.add(phase, begun_ns_, monotonic_ns(), index, column);
  }

 protected:
  // The packet scratch of a token block, which lies in this engine's buffers.
  PacketScratch packet_scratch();
  void reduce(const Piece& piece);
  void sum_machine(const Piece& piece);
  const uint8_t* input_row(uint32_t token) const;
  const uint8_t* token_row(uint32_t source, uint32_t token) const;
  // Adds columns [first, first + count) of the token's return rows to `sum`, in ascending order of k (direct) or rank
  // (reduced).
  void add_returned(float* sum, uint32_t token, uint32_t first, uint32_t count) const;
  const LayerSpec& spec() const { return layer_.spec; }

  const SpreadCall& c_;
  const Layer& layer_;
  ActorTrace& trace_;
  // Buffers, in this order: operand rows; results (or gates); ups; a token's sum; a bias; combine weights; converted
  // rows of a matrix (if it is transposed, in mxfp4 or in two parts); the scales of quantised rows; the products of a
  // block of 128 columns.
  std::vector<float> a_, out_, up_, sum_, bias_, weights_, features_, row_scales_, block_;
  RouterBuffers router_;
  GemmBuffers gemm_;

 private:
  void route(uint32_t b, const PacketScratch& s);
  void fill_row(uint8_t* row, float value);
  void add_shared(uint32_t b, const PacketScratch& s);
  void combine(const Piece& piece);
  void quantise_rows(uint32_t b);
  // Rows first, first + step, ... of the matrix of an expert or of a slice. Each makes one column of the result, in
  // this order.
  struct Features {
    uint32_t expert, slice, first, step;
  };
  void add_bias(float* rows, uint32_t count, const void* bias, uint64_t first, uint32_t columns, uint32_t step = 1);
  // Columns [first, first + count) of a product's results. columns() gives those of blocks of columns [begin, end) of
  // product n.
  struct Columns {
    uint32_t first, count;
  };
  Columns columns(uint32_t n, uint32_t begin, uint32_t end) const {
    const uint32_t each = task_columns_[n], all = c_.shape.extent(kProgram[n].columns);
    return {begin * each, min_of(end * each, all) - begin * each};
  }
  // out[token, columns] = sum of its return rows, in ascending order
  void combine(uint32_t token, Columns of);
  void multiply(uint32_t n, TileIndex tile, uint32_t block);
  // The right operand's rows for an expert, or for a slice of the shared expert's gate_up.
  struct Weights {
    const void* data;
    uint64_t pitch;  // elements from one row to the next, as they are stored
    uint32_t to_up;  // with a gate: how many rows behind a column's gate the column's up lies
    uint64_t row;    // number of the first row in the matrix
    const void* up;  // row `to_up` and later rows, if they are in another matrix; else null
  };
  Weights weights_of(const TaskRow& product, uint32_t expert, uint32_t slice) const;
  uint32_t contracted(const TaskRow& product, uint32_t expert) const;
  // The scales of a row of quantised weights, one for each block of columns.
  struct RowScales {
    const uint8_t* data;
    uint32_t step;  // from one scale to the next: 0 or 1
  };
  RowScales scales_of(const TaskRow& product, uint32_t expert, uint64_t row) const;
  const float* dequantised_rows(const TaskRow& product, const Weights& from, Features of, uint32_t columns);
  const float* rows_of_both(const Weights& from, uint32_t length);
  uint8_t* intermediate_row(uint32_t tile, uint32_t slice, uint32_t row) const;
  float* load_rows(const TaskRow& product, uint32_t tile, uint32_t columns);
  float* load_quantised_rows(const TaskRow& product, uint32_t tile, uint32_t columns);
  uint32_t most_padded(uint32_t rows, uint32_t columns, uint32_t length) const;
  float* multiply_rows(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count,
                       const Weights& from, Features of, uint32_t columns);
  float* multiply_quantised(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count,
                            const Weights& from, Features of, uint32_t columns);
  float* project(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count, Features of,
                 uint32_t columns);
  // intermediate[tile, :, columns] = activation(rows * weights^T + bias)
  void activate_columns(const TaskRow& product, TileIndex index, Columns of);
  // weight * (rows * weights^T + bias), for these columns: to each row's home, or with `reduced` to its staged row.
  void return_columns(const TaskRow& product, uint32_t tile, Columns of);

  // Keeps the tile's pre-activations of these columns for the gradients. up: null without a gate.
  void keep_pre_activations(uint32_t tile, uint32_t slice, Columns of, const float* gate, const float* up,
                            uint32_t pitch);

  const std::array<uint32_t, kProducts>& task_columns_;
  uint64_t begun_ns_ = 0;
  std::vector<uint32_t> words_;
  std::vector<uint16_t> halves_;
};
static_assert(RunsProcessor<Engine> && SumsForMachines<Engine>);

}  // namespace flashmoe::cpu

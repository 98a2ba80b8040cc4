// The CPU engine's side of a processor: executes the tasks that the protocol hands out, tile by tile through the BLAS.
#pragma once

#include <vector>

#include "cpu/gemm.h"
#include "cpu/layer.h"
#include "cpu/platform.h"
#include "cpu/trace.h"
#include "flashmoe/actors/processor.h"
#include "flashmoe/protocol/packet.h"

namespace flashmoe::cpu {

// One per processor thread, kept from call to call for its buffers; call, layer and limits change between calls.
class Engine {
 public:
  Engine(const Call& call, const Layer& layer, const Limits& limits, ActorTrace& trace)
      : c_(call), layer_(layer), limits_(limits), trace_(trace) {}

  // Gate and dispatch of token block b; false if the call is over.
  bool dispatch(uint32_t b);
  // A task of product n of the program.
  template <uint32_t n>
  void multiply(uint32_t tile, uint32_t block) {
    multiply(n, tile, block);
  }
  // Sums this rank's rows for each token of the packet, columns of block n, and writes the sum home.
  void reduce(uint32_t packet, uint32_t n);
  // out[block b, columns of return group g] = sum of the returned rows
  void combine(uint32_t b, uint32_t g);

 private:
  bool route(uint32_t b, const PacketScratch& s);
  bool choose_experts(const float* logits, int32_t* ids, float* weights);
  void copy_rows(uint32_t b);
  const uint8_t* token_row(uint32_t source, uint32_t token) const;
  void add_bias(float* rows, uint32_t count, const void* bias, uint64_t first, uint32_t columns);
  uint64_t bytes(uint64_t elements) const { return elements * c_.element_bytes; }
  // Columns [first, first + count), those of blocks [begin, end) of the results of product n.
  struct Columns {
    uint32_t first, count;
  };
  Columns columns(uint32_t n, uint32_t begin, uint32_t end) const {
    const uint32_t each = limits_.columns_per_task[n], all = c_.extent(kProgram[n].columns);
    return {begin * each, min_of(end * each, all) - begin * each};
  }
  void multiply(uint32_t n, uint32_t tile, uint32_t block);
  float* load_rows(const TaskRow& product, uint32_t tile, uint32_t columns);
  float* project(std::vector<float>& to, const TaskRow& product, const float* rows, uint32_t count, uint64_t first,
                 uint32_t columns);
  // hidden[tile, :, columns] = activation(rows * weights^T + bias)
  void activate_columns(const TaskRow& product, uint32_t tile, Columns at);
  // row's home = weight * (rows * weights^T + bias), columns
  void return_columns(const TaskRow& product, uint32_t tile, Columns at);

  const Call& c_;
  const Layer& layer_;
  const Limits& limits_;
  ActorTrace& trace_;
  // Buffers: operand rows, results (gate and up), a bias, router scores, combine weights, packet scratch.
  std::vector<float> a_, out_, up_, bias_, scores_, weights_;
  GemmBuffers gemm_;
  std::vector<uint32_t> words_;
  std::vector<uint16_t> halves_;
};

}  // namespace flashmoe::cpu

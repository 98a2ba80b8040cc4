// Copies token rows of a rank on another machine to a rank of this machine. A RelayWorker (actors/relay.h) calls it,
// if ranks are on several machines. Run by warp 11 of the blocks behind those with formers, while their blocks
// compute tasks. Since these tasks use the stages, rows are copied by loads and stores, and not through the stages.
// Reads the rows in this rank's heap. Writes them to the same place in another rank's heap.
// Touches no barrier, and of shared memory only reads the call's parameters. The RelayWorker copies packets' entries,
// and signals.
#pragma once

#include "flashmoe/actors/relay.h"
#include "flashmoe/gpu/copy_row.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

template <class Trace>
class RelayEngine : public Spans<Trace> {
  using P = Platform;

 public:
  __device__ __forceinline__ RelayEngine(const Call& call, const Trace& trace) : Spans<Trace>(trace), c_(call) {}

  __device__ __forceinline__ void pass_rows(uint32_t q, uint32_t p, uint32_t token, uint32_t rows) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t r = 0; r < rows; ++r) {
      const uint32_t t = P::broadcast(token, r);
      copy_row(c_.dispatched_row(q, p, t), c_.dispatched_row(c_.rank, p, t), c_.memory.token_row_bytes);
    }
  }

 private:
  const Call& c_;
};
static_assert(PassesRows<RelayEngine<Tracer<false, 32>>> && HasSpans<RelayEngine<Tracer<false, 32>>>);

}  // namespace flashmoe::sm90

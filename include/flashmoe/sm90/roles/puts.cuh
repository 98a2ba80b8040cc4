// Copies a row of the input x to where puts may read it. A PutSender (actors/put_sender.h) calls it, if peers are not
// mapped. Run by warp 11 of the blocks behind those with formers.
// Reads x. Writes the row's place behind this rank's workspace (Call::out_row).
// Touches no barrier and no other rank's heap, and of shared memory only reads the call's parameters. The PutSender
// puts everything that goes to other ranks: rows, packets and sums.
#pragma once

#include "flashmoe/actors/put_sender.h"
#include "flashmoe/gpu/copy_row.cuh"
#include "flashmoe/gpu/tracer.cuh"
#include "flashmoe/gpu/types.cuh"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::sm90 {

// The GPU's engine of a PutSender.
template <class Dtype, class Trace>
class PutEngine : public Spans<Trace> {
 public:
  __device__ __forceinline__ PutEngine(const KernelArgs& args, const Call& call, const Trace& trace)
      : Spans<Trace>(trace), args_(args), c_(call) {}

  __device__ __forceinline__ void stage_row(uint32_t token) const {
    // Loads of a lane in flight. With more of them, the kernel spills, because NVSHMEM's code is in the same loop.
    constexpr uint32_t kFlight = Dtype::kBytes == 2 ? 4 : 2;
    copy_row<kFlight>(c_.out_row(token), args_.x + token * args_.x_row_bytes, c_.memory.token_row_bytes);
  }

 private:
  const KernelArgs& args_;
  const Call& c_;
};
static_assert(StagesRows<PutEngine<Bf16, Tracer<false, 32>>>);

}  // namespace flashmoe::sm90

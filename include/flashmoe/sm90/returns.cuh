// Returns: what a warp does that has nothing else to do. It reduces rows that are computed here and owed to other ranks
// (reduce.cuh), else it combines what came back (combine.cuh).
#pragma once

#include "flashmoe/sm90/combine.cuh"
#include "flashmoe/sm90/reduce.cuh"

namespace flashmoe::sm90 {

// Of a block, in shared memory.
struct ReturnPlaces {
  CombinePieces combines;
  PlaceOfWarp<ReducePlace> reduce;
  PlaceOfWarp<CombinePlace> combine;

  // One thread, before the block's first synchronization.
  __device__ void init() {
    combines.next = 0;
    reduce.init();
    combine.init();
  }
};

// One warp's part. All functions by all lanes.
template <class Dtype, class Trace>
class Returns {
 public:
  __device__ __forceinline__ Returns(const KernelArgs& args, const Call& call, ReturnPlaces& places, const Trace& trace)
      : reducer_(call, places.reduce, trace), combiner_(call, args.out, places.combines, places.combine, trace) {}

  // Sums a piece, if one is ready. kDone: there are none left.
  __device__ __forceinline__ Step step() {
    const Step reduced = reducer_.look();  // first: a peer waits for it
    const bool reduces = reduced == Step::kProgress;
    const Step combined = reduces ? Step::kIdle : combiner_.look();
    if (reduces || combined == Step::kProgress) {
      const SumPiece piece = reduces ? reducer_.piece() : combiner_.piece();
      ItemSums<Dtype>(piece).run();
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
  __device__ __forceinline__ void run(const Call& c) {
    wait_until<Platform>(
        c,
        [&] {
          const Step s = step();
          if (s == Step::kIdle)
            __nanosleep(500);  // a group takes long, and all blocks of the GPU look at the same word
          return s;
        },
        OsLiveness<Platform>{c});
  }

 private:
  Reducer<Dtype, Trace> reducer_;
  Combiner<Dtype, Trace> combiner_;
};

}  // namespace flashmoe::sm90

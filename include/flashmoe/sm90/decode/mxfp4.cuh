// The Format (decode/format.cuh) of experts in mxfp4 (docs/mxfp4.md). Their matrices become the type of rows as they
// are multiplied. decode/format.cuh says which warps run it. The files that are included here say what memory they
// touch.
#pragma once

#include "flashmoe/sm90/decode/format.cuh"
#include "flashmoe/sm90/decode/products_mxfp4.cuh"
#include "flashmoe/sm90/decode/scales_mxfp4.cuh"

namespace flashmoe::sm90::few {

template <class D>
struct Format<MxFp4<D>> {
  using Dtype = MxFp4<D>;
  template <bool kGated>
  using RowScales = NoRowScales;

  static __device__ __forceinline__ void prepare(const Block& b) { PairTable::fill<typename Factors<Dtype>::Type>(b); }
  template <class AllStages>
  static __device__ __forceinline__ void multiply(const Block& b, uint32_t rows, const AllStages& all_stages,
                                                  Sums<Dtype>& sums) {
    const PairTable pairs{b};
    const bool apart = b.is_very_few();
    with_arrangement<Dtype>(rows, apart, [&](auto arrangement) {
      // A stage has four times as much K as with 16-bit weights, and to multiply two at once takes 1 to 4 % longer.
      all_stages(Count<1>{}, [&](const auto& w, uint32_t from) { w.multiply(from, pairs, arrangement, sums); });
    });
    if (apart) sums.join();
  }
  template <bool kGated, bool kHalved>
  static __device__ __forceinline__ void load(const Block& b) {
    if (b.warp() == kFewConsumers + 1) {
      load_rows<Dtype, kGated, kHalved>(b, 0);
    } else {
      load_scales<Dtype, kGated>(b, b.warp() - kFewConsumers - 2);
    }
  }
};

}  // namespace flashmoe::sm90::few

// The Format (decode/format.cuh) of experts in e4m3 (docs/fp8.md). Rows are quantised as they are loaded, or, in a
// group, as they are sent. decode/format.cuh says which warps run it. The files that are included here say what memory
// they touch.
#pragma once

#include "flashmoe/sm90/decode/format.cuh"
#include "flashmoe/sm90/decode/products_quantised.cuh"
#include "flashmoe/sm90/decode/rows_quantised.cuh"
#include "flashmoe/sm90/decode/scales.cuh"
#include "flashmoe/sm90/decode/send_quantised.cuh"

namespace flashmoe::sm90::few {

template <class D>
struct Format<Quantised<D>> {
  using Dtype = Quantised<D>;
  template <bool kGated>
  using RowScales = few::RowScales<kGated>;

  static __device__ __forceinline__ void prepare(const Block&) {}
  template <class AllStages>
  static __device__ __forceinline__ void multiply(const Block&, uint32_t rows, const AllStages& all_stages,
                                                  Sums<Dtype>& sums) {
    with_arrangement<Dtype>(rows, false, [&](auto arrangement) {
      // For more than 16 rows, there are no registers to multiply two stages at once.
      using AtOnce = Count<(decltype(arrangement)::kEights <= 2 ? 2 : 1)>;
      all_stages(AtOnce{}, [&](const auto& w, uint32_t from) { w.multiply(from, arrangement, sums); });
    });
  }
  template <bool kGated, bool kHalved>
  static __device__ __forceinline__ void load(const Block& b) {
    load_quantised_rows<Dtype, kGated>(b, b.warp() - kFewConsumers - 1);
  }
  static __device__ __forceinline__ void send_rows(const Block& b, uint32_t n) {
    if (b.args.x_scale == nullptr) {
      quantise_rows<Dtype>(b, n);
    } else {
      quantise_rows<E4M3>(b, n);
    }
  }
};

}  // namespace flashmoe::sm90::few

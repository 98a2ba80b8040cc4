// Consumer warpgroups store pre-activations for the backward pass, to memory that outlives the call (docs/training.md).
//
// Gate and up of a column lie side by side in this memory. A thread has both, so it stores them from registers. Threads
// with neighbouring columns together fill sectors of 32 bytes.
#pragma once

#include "flashmoe/sm90/epilogue/rows.cuh"

namespace flashmoe::sm90 {

// The number of the row in KeptOutputs::pre_activations.
__device__ __forceinline__ uint32_t kept_row(const Call& c, const Row& row, uint32_t slice) {
  return row.token * (c.shape.routed_top_k() + c.shape.shared) + row.k + slice;
}

namespace detail {

// Stores for what nobody reads before the backward pass.
__device__ __forceinline__ void store_streaming(uint8_t* to, uint32_t low, uint32_t high) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void store_streaming(uint8_t* to, uint32_t word) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_streaming(uint8_t* to, const float (&v)[4]) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// Two numbers, rounded. A number beyond fp16's range becomes the largest of fp16, because an infinity has no slope.
template <class Dtype>
__device__ __forceinline__ uint32_t pack_finite(float low, float high) {
  if constexpr (std::is_same_v<Dtype, Fp16>) {
    constexpr float kLargest = 65504.0f;
    low = gpu::detail::max_or_nan(gpu::detail::min_or_nan(low, kLargest), -kLargest);
    high = gpu::detail::max_or_nan(gpu::detail::min_or_nan(high, kLargest), -kLargest);
  }
  return Dtype::pack(low, high);
}

}  // namespace detail

// Where a task's rows are kept: row r of the block's share as row numbers[r] of KeptOutputs::pre_activations.
template <bool kGated>
struct PreActivations {
  uint8_t* data;
  const uint32_t* numbers;
  uint32_t first_column, intermediate;

  template <class Dtype>
  static constexpr uint32_t kColumnBytes = (kGated ? 2 : 1) * Dtype::kBytes;

  template <class Dtype>
  __device__ __forceinline__ uint8_t* row(uint32_t r) const {
    return data + (uint64_t{numbers[r]} * intermediate + first_column) * kColumnBytes<Dtype>;
  }

  // Stores the accumulators of TokensByFeatures as they are: with biases, but if weights scale the input, before they
  // get weight and bias.
  template <class Dtype, Columns kOrder, uint32_t kCount>
  __device__ __forceinline__ void rows(const Lane& at, const float (&acc)[kCount], uint32_t rows) const {
    const uint32_t left = first_column < intermediate ? intermediate - first_column : 0;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t r = at.group * 64 + at.warp * detail::kWarpRows + at.row() + 8 * h;
      if (r >= rows) break;
      uint8_t* const line = row<Dtype>(r);
#pragma unroll
      for (uint32_t g = 0; g < kCount / 4 / detail::kJoined<kOrder>; ++g) {
        if (g * 8 >= left) break;
        store_group<Dtype, kOrder>(line + g * 8 * kColumnBytes<Dtype>, at, acc, g, h);
      }
    }
  }

 private:
  // Stores what a thread has of the g-th 8 columns of its row h. These columns begin at `to`. (Accumulators are as in
  // finish_piece().)
  template <class Dtype, Columns kOrder, uint32_t kCount>
  static __device__ __forceinline__ void store_group(uint8_t* to, const Lane& at, const float (&acc)[kCount],
                                                     uint32_t g, uint32_t h) {
    if constexpr (Dtype::kBytes == 4) {
      store_group_as_it_is<Dtype, kOrder>(to, at, acc, g, h);
    } else if constexpr (kOrder == Columns::kResults) {
      const uint32_t d = g * 4 + 2 * h;
      detail::store_streaming(to + at.token() * kColumnBytes<Dtype>, detail::pack_finite<Dtype>(acc[d], acc[d + 1]));
    } else if constexpr (kOrder == Columns::kPairs) {
      const uint32_t d = g * 8 + 2 * h;
      detail::store_streaming(to + at.lane % 4 * kColumnBytes<Dtype>, detail::pack_finite<Dtype>(acc[d], acc[d + 1]));
      detail::store_streaming(to + (at.lane % 4 + 4) * kColumnBytes<Dtype>,
                              detail::pack_finite<Dtype>(acc[d + 4], acc[d + 5]));
    } else {
      constexpr bool kSpans = kOrder == Columns::kSpans;
      constexpr uint32_t kUp = kSpans ? kSpanColumns / 2 : 4;
      const uint32_t d = (kSpans ? g / 8 * kSpanColumns + g % 8 * 4 : g * 8) + 2 * h;
      detail::store_streaming(to + at.token() * kColumnBytes<Dtype>, detail::pack_finite<Dtype>(acc[d], acc[d + kUp]),
                              detail::pack_finite<Dtype>(acc[d + 1], acc[d + kUp + 1]));
    }
  }
  // The same for fp32. Only two orders of columns occur, because weights in fp32 are never transposed.
  template <class Dtype, Columns kOrder, uint32_t kCount>
  static __device__ __forceinline__ void store_group_as_it_is(uint8_t* to, const Lane& at, const float (&acc)[kCount],
                                                              uint32_t g, uint32_t h) {
    static_assert(kOrder == Columns::kResults || kOrder == Columns::kGroups);
    uint8_t* const own = to + at.token() * kColumnBytes<Dtype>;
    const uint32_t d = g * detail::kJoined<kOrder> * 4 + 2 * h;
    if constexpr (kOrder == Columns::kResults) {
      detail::store_streaming(own, __float_as_uint(acc[d]), __float_as_uint(acc[d + 1]));
    } else {
      detail::store_streaming(own, {acc[d], acc[d + 4], acc[d + 1], acc[d + 5]});
    }
  }
};

}  // namespace flashmoe::sm90

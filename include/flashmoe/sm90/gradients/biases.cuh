// Computes the gradients of biases, after the queue's stop. Every warp that has seen the stop takes part. The gradients
// are sums over an expert's rows, in float64 and in the order of its tiles: of dZ for gate_up_bias, and of w dY for
// down_bias (of dY, if weights scale the input).
#pragma once

#include "flashmoe/sm90/gradients/weights.cuh"

namespace flashmoe::sm90 {

namespace detail {

template <class Dtype>
inline constexpr uint32_t kBiasColumns = 16 / Dtype::kBytes;  // of a thread

// Adds to `sum` a thread's columns of all rows of an expert. line(tile, r): where these columns lie in row r of a tile.
// weight(tile, r): the factor of that row.
template <class Dtype, class Line, class Weight>
__device__ __forceinline__ void sum_columns(const Call& c, uint32_t expert, double (&sum)[kBiasColumns<Dtype>],
                                            Line&& line, Weight&& weight) {
  const uint32_t* const tiles = c.expert_tiles(expert);
  const uint32_t rows = rows_of_expert(c, expert);
#pragma unroll 1
  for (uint32_t base = 0; base < rows; base += kTileTokens) {
    const uint32_t tile = tiles[base / kTileTokens], end = min_of(rows - base, kTileTokens);
#pragma unroll(kTrainsInGroup ? 1 : 4)  // among several ranks, rows in two places leave fewer registers
    for (uint32_t r = 0; r < end; ++r) {
      const uint4 words = *reinterpret_cast<const uint4*>(line(tile, r));
      const double w = weight(tile, r);
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (uint32_t i = 0; i < kBiasColumns<Dtype> / 2; ++i) {
        const float2 pair = pair_of<Dtype>(word, i);
        sum[2 * i] += w * pair.x, sum[2 * i + 1] += w * pair.y;
      }
    }
  }
}

// Stores a thread's sums to the columns from `first` on of `all`. If `accumulates`, adds them to the float32 numbers
// there.
template <class Dtype>
__device__ __forceinline__ void store_columns(uint8_t* all, uint64_t first, const double (&sum)[kBiasColumns<Dtype>],
                                              bool accumulates) {
  if (accumulates) {
    float* const to = reinterpret_cast<float*>(all) + first;
#pragma unroll
    for (uint32_t i = 0; i < kBiasColumns<Dtype>; ++i) to[i] = static_cast<float>(to[i] + sum[i]);
    return;
  }
  uint32_t word[4];
#pragma unroll
  for (uint32_t i = 0; i < kBiasColumns<Dtype> / 2; ++i) {
    const auto low = static_cast<float>(sum[2 * i]), high = static_cast<float>(sum[2 * i + 1]);
    if constexpr (Dtype::kBytes == 2) {
      word[i] = Dtype::pack(low, high);
    } else {
      word[2 * i] = __float_as_uint(low), word[2 * i + 1] = __float_as_uint(high);
    }
  }
  store_global16(all + first * Dtype::kBytes, {word[0], word[1], word[2], word[3]});
}

// How many local experts may have biases: all but a shared one.
__device__ __forceinline__ uint32_t biased_experts(const Call& c) {
  return kBuild.sliced ? c.shape.routed_local_experts() : c.shape.local_experts;
}

// Whether a local expert is a slice of an expert, but not its first slice. The down_bias of such a slice is 0.
__device__ __forceinline__ bool is_later_slice(const Call& c, uint32_t expert) {
  if constexpr (!kBuild.sliced) return false;
  return c.placement.by_owner[c.placement.owner_base[c.rank] + expert] % c.shape.slices != 0;
}

}  // namespace detail

// Computes the biases' gradients. All warps but the last one of each block, which sees no stop word.
template <class Dtype>
__device__ __forceinline__ void sum_biases(const KernelArgs& args, const Call& c) {
  using namespace detail;
  constexpr uint32_t kSummers = (kWarps - 1) * 32, kColumns = kBiasColumns<Dtype>;
  const BackwardArgs& b = args.backward;
  const uint32_t of_up = b.gate_up_bias_gradient == nullptr ? 0 : b.z_columns / kColumns;
  const uint32_t of_down = b.down_bias_gradient == nullptr ? 0 : c.shape.hidden / kColumns;
  const uint32_t each = of_up + of_down;
  const bool accumulates = b.accumulates != 0;
  const uint32_t thread = thread_anew();
  // If the call has failed, tiles may be wrong.
  if (each == 0 || thread >= kSummers || Platform::load_relaxed(&c.control()->abort.value) != 0) return;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kSummers + thread; i < each * biased_experts(c); i += gridDim.x * kSummers) {
    const uint32_t expert = i / each, n = i % each;
    double sum[kColumns] = {};
    if (n < of_up) {
      const uint32_t bytes = b.z_columns * Dtype::kBytes;
      sum_columns<Dtype>(
          c, expert, sum,
          [&](uint32_t tile, uint32_t r) {
            const uint64_t behind = kBuild.on_input ? args.options.plain_behind : 0;
            return b.dz + (uint64_t{tile} * kTileTokens + r) * bytes + n * 16 + behind;
          },
          [](uint32_t, uint32_t) { return 1.0f; });
      store_columns<Dtype>(b.gate_up_bias_gradient, uint64_t{expert} * b.z_columns + n * kColumns, sum, accumulates);
    } else {
      const uint32_t at = (n - of_up) * 16;
      if (!is_later_slice(c, expert))
        sum_columns<Dtype>(
            c, expert, sum,
            [&](uint32_t tile, uint32_t r) {
              if constexpr (kTrainsInGroup) {
                const uint32_t code = args.group.gather[tile * kTileTokens + r], n = code & ~TokenRows::kRemote;
                if (n != code) return args.group.received_dy() + uint64_t{n} * c.memory.token_row_bytes + at;
                return args.dy() + n * args.dy_row_bytes() + at;
              }
              return args.dy() + c.tile_row(tile, r)->token * args.dy_row_bytes() + at;
            },
            [&](uint32_t tile, uint32_t r) { return kBuild.on_input ? 1.0f : c.tile_row(tile, r)->weight; });
      store_columns<Dtype>(b.down_bias_gradient, uint64_t{expert} * c.shape.hidden + (n - of_up) * kColumns, sum,
                           accumulates);
    }
  }
}

}  // namespace flashmoe::sm90

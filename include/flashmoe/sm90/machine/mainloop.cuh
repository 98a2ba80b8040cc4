// Consumer warpgroups compute a task's product from the stages that the loaders fill.
#pragma once

#include <type_traits>

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/sm90/machine/mainloop_fragments.cuh"
#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/wgmma.cuh"

namespace flashmoe::sm90 {

// Shapes of a consumer warpgroup's product. A step along K is kMs wgmmas m64nN, where N is kN. In its stage, a
// k-block's A operand lies at a(k_block). Its B operand lies at b(k_block), MN-major or K-major as kMajorB says. The
// warpgroup multiplies kMs * 64 rows of A with kN rows of B. The second warpgroup's rows of A begin kNextA rows after
// the first warpgroup's, and its rows of B kNextB rows after.

// Features down, tokens across: the warpgroup's half of the features by all of the block's tokens.
template <class Stage_, uint32_t kTokens>
struct FeaturesByTokens {
  using Stage = Stage_;
  static constexpr uint32_t kMs = Stage::kMs, kN = kTokens, kNextA = kMs * 64, kNextB = 0;
  static constexpr Major kMajorB = Major::kK;
  static FLASHMOE_HD constexpr uint32_t a(uint32_t k_block) { return Stage::features(k_block); }
  static FLASHMOE_HD constexpr uint32_t b(uint32_t k_block) { return Stage::tokens(k_block); }
};
// Tokens down, features across: the warpgroup's 64 of the block's 128 tokens, by all features. A wgmma reads all of
// its B for 64 rows of A. So in a step along K, the one wgmma of this shape reads 2 + 8 KiB, and the two of
// FeaturesByTokens with 128 tokens read 2 * (2 + 4) KiB. with_tokens() takes this shape for tiles whose tokens fill
// it, and for all tiles of transposed weights (which are MN-major), of passes that train and of e4m3, except those of
// TokensByHalfFeatures. A warpgroup that has no tokens then, like the second one with a Narrow stage, runs
// keep_pace(). kFeatures: fewer than the stage has, if the others would lie behind the last feature.
template <class Stage_, Major kFeatureMajor, uint32_t kFeatures = Stage_::kFeatures>
struct TokensByFeatures {
  using Stage = Stage_;
  static constexpr uint32_t kMs = 1, kN = kFeatures, kNextA = kMs * 64, kNextB = 0;
  static constexpr Major kMajorB = kFeatureMajor;
  static FLASHMOE_HD constexpr uint32_t a(uint32_t k_block) { return Stage::tokens(k_block); }
  static FLASHMOE_HD constexpr uint32_t b(uint32_t k_block) { return Stage::features(k_block); }
};
// For at most 64 tokens in e4m3: all tokens down, the warpgroup's half of the features across. With TokensByFeatures,
// the second warpgroup would have no tokens, and the tensor cores would have no work while the first warpgroup
// promotes (machine/mainloop_quantised.cuh).
template <class Stage_>
struct TokensByHalfFeatures {
  using Stage = Stage_;
  static constexpr uint32_t kMs = 1, kN = Stage::kFeatures / kConsumers, kNextA = 0, kNextB = kN;
  static constexpr Major kMajorB = Major::kK;
};
// For at most 64 features: all features down, the warpgroup's half of the tokens across.
template <class Stage_>
struct FeaturesByHalfTokens {
  using Stage = Stage_;
  static constexpr uint32_t kMs = Stage::kMs, kN = Stage::kTokens / kConsumers, kNextA = 0, kNextB = kN;
  static constexpr Major kMajorB = Major::kK;
  static FLASHMOE_HD constexpr uint32_t a(uint32_t k_block) { return Stage::features(k_block); }
  static FLASHMOE_HD constexpr uint32_t b(uint32_t k_block) { return Stage::tokens(k_block); }
};

// Whether a shape has tokens down.
template <class Shape>
inline constexpr bool kTokensDown = false;
template <class Stage, Major kMajor, uint32_t kFeatures>
inline constexpr bool kTokensDown<TokensByFeatures<Stage, kMajor, kFeatures>> = true;
template <class Stage>
inline constexpr bool kTokensDown<TokensByHalfFeatures<Stage>> = true;
// Whether a shape has tokens down, and for each warpgroup half of the features across.
template <class Shape>
inline constexpr bool kHalvesColumns = false;
template <class Stage>
inline constexpr bool kHalvesColumns<TokensByHalfFeatures<Stage>> = true;

// A consumer warpgroup's accumulators: kMs times 64 rows by kN columns.
template <class Shape>
using Accumulators = float[Shape::kMs][Shape::kN / 2];

template <class Shape>
__device__ __forceinline__ void clear(Accumulators<Shape>& acc) {
#pragma unroll
  for (uint32_t m = 0; m < Shape::kMs; ++m) {
#pragma unroll
    for (uint32_t i = 0; i < Shape::kN / 2; ++i) acc[m][i] = 0.0f;
  }
}

// Calls f, a lambda `[&]<class Shape>() {..}`, with the smallest shape that covers `cover` tokens. A wgmma's time
// grows with N. But each N is one more copy of the code, so there are shapes for some N only. half: the expert has no
// features for the second half of the task (is_half). kGated: in e4m3, there are two shapes with a gate, and one
// without. (Without a gate, a warpgroup's half of the features is a whole block of 128 columns with a scale. The code
// for this spills if the other shape's code is there too.)
template <class Dtype, bool kTransposed, bool kGated, class F>
__device__ __forceinline__ void with_tokens(bool wide, uint32_t cover, bool half, F&& f) {
  if constexpr (kQuantised<Dtype>) {
    if constexpr (kGated) {
      if (cover <= 64) return f.template operator()<TokensByHalfFeatures<Wide>>();
    }
    f.template operator()<TokensByFeatures<Wide, Major::kK>>();
  } else if constexpr (kTransposed || kIsBackward || kBuild.keeps) {
    constexpr Major kMajor = kTransposed ? Major::kMn : Major::kK;
    if (wide) return f.template operator()<TokensByFeatures<Wide, kMajor>>();
    return f.template operator()<TokensByFeatures<Narrow, kMajor>>();
  } else if (!wide) {
    if (cover <= 8) return f.template operator()<FeaturesByTokens<Narrow, 8>>();
    if (cover <= 16) return f.template operator()<FeaturesByTokens<Narrow, 16>>();
    if (cover <= 32) return f.template operator()<FeaturesByTokens<Narrow, 32>>();
    return f.template operator()<FeaturesByTokens<Narrow, 64>>();
  } else {
    switch (cover / 16) {
      case 3: return f.template operator()<FeaturesByTokens<Wide, 48>>();
      case 4: return f.template operator()<FeaturesByTokens<Wide, 64>>();
      case 5: return f.template operator()<FeaturesByTokens<Wide, 80>>();
      case 6: return f.template operator()<FeaturesByTokens<Wide, 96>>();
      case 7: return f.template operator()<FeaturesByTokens<Wide, 112>>();
      default: {
        using Rows = TokensByFeatures<Wide, Major::kK>;
        using Full = std::conditional_t<Dtype::kTensorCores, Rows, FeaturesByTokens<Wide, 128>>;
        if constexpr (Dtype::kTensorCores) {
          if (half) return f.template operator()<TokensByFeatures<Wide, Major::kK, kBoxFeatures>>();
        }
        return f.template operator()<Full>();
      }
    }
  }
}

namespace detail {

// Where in an operand's k-block those elements begin that a K-major operand has k bytes after the beginning of its
// rows.
template <Major kMajor>
__device__ constexpr uint32_t along_k(uint32_t k) {
  return kMajor == Major::kK ? k : k / (kRowBytes / kSpanRows) * kRowBytes;
}

// Issues the products of one stage as one group of wgmmas, and does not wait for the group. kFirst: the first wgmma
// overwrites acc. kFirst is a template parameter because ptxas would otherwise see reads of accumulators that nothing
// has written. It would then keep the accumulators of all N alive from task to task, and run out of registers.
template <class Dtype, class Shape, bool kFirst>
__device__ __forceinline__ void multiply_stage(const typename Shape::Stage::Ring& ring, uint64_t a, uint64_t b,
                                               bool gathered, Accumulators<Shape>& acc) {
  wait(ring.full(), ring.parity);
  // cp.async writes through the generic proxy, wgmma reads through the async proxy.
  if (gathered) fence_proxy_async_shared();
  wgmma_fence();
  const uint64_t stage = descriptor_step(ring.stage * Shape::Stage::Ring::kBytes);
#pragma unroll
  for (uint32_t i = 0; i < Shape::Stage::kBlocks; ++i) {
#pragma unroll
    for (uint32_t k = 0; k < kRowBytes; k += kWgmmaBytes) {
      const uint64_t columns = b + stage + descriptor_step(Shape::b(i) + along_k<Shape::kMajorB>(k));
#pragma unroll
      for (uint32_t m = 0; m < Shape::kMs; ++m) {
        const uint64_t rows = a + stage + descriptor_step(Shape::a(i) + m * 64 * kRowBytes + k);
        Wgmma<Dtype, Shape::kN, Major::kK, Shape::kMajorB>::issue(acc[m], rows, columns, !kFirst || i + k != 0);
      }
    }
  }
  wgmma_commit();
}

__device__ __forceinline__ float4 load_floats(uint32_t from) {
  const uint4 v = load_shared16(from);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
// Where the 16-byte chunk `chunk` of a row lies, with the swizzle. (8 rows further down, the same chunk lies 8 *
// kRowBytes further on, because the swizzle repeats every 8 rows.)
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, uint32_t row, uint32_t chunk) {
  return tile + row * kRowBytes + (chunk ^ row % 8) * 16;
}
__device__ __forceinline__ float dot(float sum, const float4& a, const float4& b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// The products of one stage without the tensor cores. Sums have the same places in acc as with wgmma: a thread has
// rows r and r + 8 of A, and two of each 8 rows of B. 4 lanes of a warp read the same rows of A, 8 lanes the same
// rows of B.
template <class Shape>
__device__ __forceinline__ void multiply_stage_exactly(const typename Shape::Stage::Ring& ring, uint32_t group,
                                                       Accumulators<Shape>& acc) {
  using Stage = typename Shape::Stage;
  const uint32_t thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const uint32_t row = group * Shape::kNextA + thread / 32 * 16 + lane / 4;
  const uint32_t column = group * Shape::kNextB + lane % 4 * 2;
  constexpr uint32_t kAhead = kBuild.keeps ? 2 : 4;  // fewer in a pass that keeps, since that takes registers, too
#pragma unroll 1
  for (uint32_t i = 0; i < Stage::kBlocks * (kRowBytes / 16); ++i) {
    const uint32_t block = i / (kRowBytes / 16), chunk = i % (kRowBytes / 16);
    const uint32_t columns = ring.data() + Shape::b(block);
    const uint32_t even = chunk_address(columns, column, chunk), odd = chunk_address(columns, column + 1, chunk);
#pragma unroll
    for (uint32_t m = 0; m < Shape::kMs; ++m) {
      const uint32_t rows = chunk_address(ring.data() + Shape::a(block), row + m * 64, chunk);
      const float4 low = load_floats(rows), high = load_floats(rows + 8 * kRowBytes);
#pragma unroll
      for (uint32_t j = 0; j < Shape::kN / 8; ++j) {
        const float4 x = load_floats(even + j * 8 * kRowBytes), y = load_floats(odd + j * 8 * kRowBytes);
        acc[m][4 * j] = dot(acc[m][4 * j], low, x);
        acc[m][4 * j + 1] = dot(acc[m][4 * j + 1], low, y);
        acc[m][4 * j + 2] = dot(acc[m][4 * j + 2], high, x);
        acc[m][4 * j + 3] = dot(acc[m][4 * j + 3], high, y);
        if (j % kAhead == kAhead - 1) __syncwarp();  // else ptxas loads so far ahead that it spills
      }
    }
  }
}

template <class Dtype, class Shape>
__device__ __forceinline__ void multiply_exactly(typename Shape::Stage::Ring& ring, uint32_t group, uint32_t stages,
                                                 Accumulators<Shape>& acc) {
  clear<Shape>(acc);
#pragma unroll 1
  for (uint32_t s = 0; s < stages; ++s) {
    wait(ring.full(), ring.parity);
    multiply_stage_exactly<Shape>(ring, group, acc);
    release_stage<Dtype, typename Shape::Stage>(ring.empty());
    ring.advance();
  }
}

}  // namespace detail

// acc = A * B^T over the K of `stages` stages. `group`: the warpgroup, 0 or 1. `gathered`: the tokens were written by
// cp.async. Run by all 128 threads of the warpgroup, converged. One group of wgmmas stays in flight while the next is
// issued, so a stage is released when the products of the next stage are under way. The last stage is not released,
// so that the warpgroup may use the memory of its own A operand there. Returns the last stage's `empty` barrier, by
// which the caller releases that stage.
template <class Dtype, class Shape>
__device__ __forceinline__ uint32_t multiply_and_hold(typename Shape::Stage::Ring& ring, uint32_t group,
                                                      uint32_t stages, bool gathered, Accumulators<Shape>& acc) {
  using Stage = typename Shape::Stage;
  if constexpr (kByFragments<Dtype>) {
    return multiply_fragments_and_hold<Dtype, Shape, Major::kK>(ring, group, stages, acc);
  } else {
    static_assert(Dtype::kTensorCores);
    const uint64_t a = matrix_descriptor(ring.stages + group * Shape::kNextA * kRowBytes);
    const uint64_t b = Shape::kMajorB == Major::kK ? matrix_descriptor(ring.stages + group * Shape::kNextB * kRowBytes)
                                                   : mn_major_descriptor<kSpanBytes>(ring.stages);
    detail::multiply_stage<Dtype, Shape, true>(ring, a, b, gathered, acc);
    uint32_t in_flight = ring.empty();
    ring.advance();
#pragma unroll 1
    for (uint32_t s = 1; s < stages; ++s) {
      detail::multiply_stage<Dtype, Shape, false>(ring, a, b, gathered, acc);
      wgmma_wait<1>();
      release_stage<Dtype, Stage>(in_flight);
      in_flight = ring.empty();
      ring.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (uint32_t m = 0; m < Shape::kMs; ++m) pin_accumulators(acc[m]);
    return in_flight;
  }
}

// The same, and also releases the last stage.
template <class Dtype, class Shape>
__device__ __forceinline__ void multiply(typename Shape::Stage::Ring& ring, uint32_t group, uint32_t stages,
                                         bool gathered, Accumulators<Shape>& acc) {
  if constexpr (Dtype::kTensorCores || kByFragments<Dtype>) {
    const uint32_t last = multiply_and_hold<Dtype, Shape>(ring, group, stages, gathered, acc);
    release_stage<Dtype, typename Shape::Stage>(last);
  } else {
    detail::multiply_exactly<Dtype, Shape>(ring, group, stages, acc);
  }
}

// Run in place of multiply() by a warpgroup that has no tokens: releases the stages, because loaders fill a stage
// again only when both warpgroups have released it.
template <class Dtype, class Stage>
__device__ __forceinline__ void keep_pace(typename Stage::Ring& ring, uint32_t stages) {
#pragma unroll 1
  for (uint32_t s = 0; s < stages; ++s) {
    wait(ring.full(), ring.parity);
    release_stage<Dtype, Stage>(ring.empty());
    ring.advance();
  }
}

}  // namespace flashmoe::sm90

// Consumer warpgroups compute products of fp32 in a backward pass. There, operand B always lies MN-major in the stages,
// and A, too, in products over an expert's rows. wgmma takes MN-major operands only if they have 16 bits. So each
// thread loads its elements of both operands, wherever they lie, and multiplies by mma.sync m16n8k8 in TF32, or by FFMA
// if the layer asks for that. Sums have the same places in the accumulators as with wgmma (machine/wgmma.cuh), so the
// epilogues are those of other types.
//
// A k-block has 32 elements of K. A warp multiplies its 16 rows of A with all kN columns of B. For each 8 elements of
// K, a lane loads 4 words of A and kN / 4 words of B. Shared memory is the limit: for 256 columns, each of 8 warps
// loads 68 words, at best one in a clock, so 544 clocks in all; wgmma would take 256 clocks. (If a warp had 32 rows
// by half of the columns, it would load 40 words, but sums would be in other places.)
//
// The elements of K may have any order in the fragments, as long as A and B have the same order. Lane t of four has
// elements 2 t and 2 t + 1 of each 8, where mma has elements t and t + 4. So a lane's two elements are neighbours in
// a K-major operand. In a swizzled MN-major operand, eight columns of the four rows 2 t lie in 32 different banks,
// and so do eight columns of the four rows 2 t + 1.
#pragma once

#include "flashmoe/gpu/memory.cuh"
#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/wgmma.cuh"

namespace flashmoe::sm90 {

namespace detail {

inline constexpr uint32_t kBlockK = kRowBytes / 4;          // elements of K in a k-block
inline constexpr uint32_t kStepK = 8;                       // elements of K in one mma
inline constexpr uint32_t kStepBytes = kStepK * kRowBytes;  // from one mma's elements to the next's, MN-major
inline constexpr uint32_t kWideSpan = span_bytes(4);        // from 32 columns of an MN-major operand to the next
inline constexpr uint32_t kChunkPairs = 32;                 // bytes of two chunks: 8 columns of an MN-major operand

// c += a b in TF32, 16 rows by 8 columns. The tensor cores ignore the 13 low bits of each operand.
__device__ __forceinline__ void mma_tf32(float* c, const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A lane's place in its warpgroup. The thread's number is read anew (a volatile read), so that the place is not kept
// in registers over the epilogue.
struct FragmentLane {
  uint32_t warp, g, t;  // the warp's number among four; lane / 4; lane % 4

  static __device__ __forceinline__ FragmentLane here() {
    const uint32_t thread = thread_anew();
    return {thread / 32 % 4, thread % 32 / 4, thread % 4};
  }
};

// Loads the lane's elements of A for the step-th 8 elements of K: element 2 t of the warp's rows g and g + 8, then
// element 2 t + 1 of these rows. a: the address of the warpgroup's 64 rows (K-major), or of its two spans of columns
// (MN-major).
template <Major kMajor>
__device__ __forceinline__ void load_left(float (&to)[4], uint32_t a, const FragmentLane& at, uint32_t step) {
  if constexpr (kMajor == Major::kK) {
    const uint32_t row = a + (at.warp * 16 + at.g) * kRowBytes + (at.t / 2 ^ at.g) * 16 + at.t % 2 * 8;
    // Words are loaded one by one. Loaded by two, they would be in neighbouring registers, which is not where mma takes
    // them, and would be moved once for each mma.
    const uint32_t even = row ^ step * kChunkPairs, odd = even ^ 4;
    to[0] = load_shared4(even), to[1] = load_shared4(even + 8 * kRowBytes);
    to[2] = load_shared4(odd), to[3] = load_shared4(odd + 8 * kRowBytes);
  } else {
    const uint32_t chunk = at.warp % 2 * 4 + at.g / 4, row = 2 * at.t;
    const uint32_t even = a + at.warp / 2 * kWideSpan + row * kRowBytes + (chunk ^ row) * 16 + at.g % 4 * 4;
    const uint32_t odd = (even + kRowBytes) ^ 16, from = step * kStepBytes;
    to[0] = load_shared4(even + from), to[1] = load_shared4((even ^ kChunkPairs) + from);
    to[2] = load_shared4(odd + from), to[3] = load_shared4((odd ^ kChunkPairs) + from);
  }
}

// The products of one k-block, in TF32.
template <Major kMajorA, uint32_t kN>
__device__ __forceinline__ void multiply_fragments(uint32_t a, uint32_t b, float (&acc)[kN / 2]) {
  const FragmentLane at = FragmentLane::here();
  // The lane has column g of each 8. In each row 2 t, the swizzle has the j-th 8 columns of a span in another pair of
  // chunks.
  const uint32_t even = b + 2 * at.t * kRowBytes + at.t * kChunkPairs + at.g * 4, odd = (even + kRowBytes) ^ 16;
#pragma unroll 1
  for (uint32_t step = 0; step < kBlockK / kStepK; ++step) {
    float left[4];
    load_left<kMajorA>(left, a, at, step);
#pragma unroll
    for (uint32_t j = 0; j < kN / 8; ++j) {
      const uint32_t pair = j % 4 * kChunkPairs, from = j / 4 * kWideSpan + step * kStepBytes;
      mma_tf32(&acc[4 * j], left, load_shared4((even ^ pair) + from), load_shared4((odd ^ pair) + from));
      if (j % 4 == 3) __syncwarp();  // else ptxas loads so far ahead that it spills
    }
  }
}

// Loads element k of K, in fp32, of the lane's two rows of A: rows g and g + 8 of the warp.
template <Major kMajor>
__device__ __forceinline__ float2 load_left_exactly(uint32_t a, const FragmentLane& at, uint32_t k) {
  if constexpr (kMajor == Major::kK) {
    const uint32_t from = a + (at.warp * 16 + at.g) * kRowBytes + (k / 4 ^ at.g) * 16 + k % 4 * 4;
    return {load_shared4(from), load_shared4(from + 8 * kRowBytes)};
  } else {
    const uint32_t chunk = at.warp % 2 * 4 + at.g / 4;
    const uint32_t from = a + at.warp / 2 * kWideSpan + k * kRowBytes + (chunk ^ k % 8) * 16 + at.g % 4 * 4;
    return {load_shared4(from), load_shared4(from ^ kChunkPairs)};
  }
}

// The products of one k-block in fp32, by FFMA: for each k of K the lane loads two neighbouring columns of each 8 of B.
template <Major kMajorA, uint32_t kN>
__device__ __forceinline__ void multiply_fragments_exactly(uint32_t a, uint32_t b, float (&acc)[kN / 2]) {
  const FragmentLane at = FragmentLane::here();
#pragma unroll 1
  for (uint32_t k = 0; k < kBlockK; ++k) {
    const float2 left = load_left_exactly<kMajorA>(a, at, k);
    const uint32_t row = b + k * kRowBytes + (at.t / 2 ^ k % 8) * 16 + at.t % 2 * 8;
#pragma unroll
    for (uint32_t j = 0; j < kN / 8; ++j) {
      const float2 right = gpu::load_shared8((row ^ j % 4 * kChunkPairs) + j / 4 * kWideSpan);
      acc[4 * j] = fmaf(left.x, right.x, acc[4 * j]), acc[4 * j + 1] = fmaf(left.x, right.y, acc[4 * j + 1]);
      acc[4 * j + 2] = fmaf(left.y, right.x, acc[4 * j + 2]), acc[4 * j + 3] = fmaf(left.y, right.y, acc[4 * j + 3]);
      if (j % 8 == 7) __syncwarp();  // as in multiply_fragments()
    }
  }
}

}  // namespace detail

// The same as multiply_and_hold(), by fragments. kMajorA: how A lies in a stage; for each warpgroup, it is 64 rows
// (K-major) or two spans (MN-major).
template <class Dtype, class Shape, Major kMajorA>
__device__ __forceinline__ uint32_t multiply_fragments_and_hold(typename Shape::Stage::Ring& ring, uint32_t group,
                                                                uint32_t stages, float (&acc)[1][Shape::kN / 2]) {
  using Stage = typename Shape::Stage;
  constexpr uint32_t kGroupBytes = 64 * kRowBytes;
  static_assert(Shape::kMs == 1 && Shape::kNextA * kRowBytes == kGroupBytes && Shape::kMajorB == Major::kMn);
  static_assert(kGroupBytes == 2 * detail::kWideSpan);
#pragma unroll
  for (float& sum : acc[0]) sum = 0.0f;
  uint32_t held;
#pragma unroll 1
  for (uint32_t s = 0;;) {
    wait(ring.full(), ring.parity);
#pragma unroll 1
    for (uint32_t i = 0; i < Stage::kBlocks; ++i) {
      const uint32_t a = ring.data() + Shape::a(i) + group * kGroupBytes, b = ring.data() + Shape::b(i);
      if constexpr (Dtype::kTensorCores)
        detail::multiply_fragments<kMajorA, Shape::kN>(a, b, acc[0]);
      else
        detail::multiply_fragments_exactly<kMajorA, Shape::kN>(a, b, acc[0]);
    }
    held = ring.empty();
    ring.advance();
    if (++s == stages) return held;
    release_stage<Dtype, Stage>(held);
  }
}

}  // namespace flashmoe::sm90

// wgmma: D[64][N] += A[64][K] B[N][K]^T, both operands in shared memory, K-major or MN-major, 128-byte swizzled.
//
// For each group j of 8 columns, thread t of the warpgroup holds four accumulators. With row r = 16 (t / 32) + t % 32
// / 4 and column c = 8 j + 2 (t % 4):
// d[4j] = D[r][c], d[4j+1] = D[r][c+1], d[4j+2] = D[r+8][c], d[4j+3] = D[r+8][c+1].
#pragma once

#include <cstdint>
#include <type_traits>

#include "flashmoe/gpu/types.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kWgmmaBytes = 32;  // of K, for every element type

// Orders earlier accesses to accumulators, and to registers that hold A, before the next wgmma. Stores to shared memory
// need fence_proxy_async_shared() besides.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `Pending` committed groups are unfinished.
template <uint32_t Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// The compiler believes that a wgmma has written its accumulators as soon as it is issued. This call, made after the
// wait for the wgmma, keeps the uses of the accumulators from moving to before that wait.
template <uint32_t Count>
__device__ __forceinline__ void pin_accumulators(float (&d)[Count]) {
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Matrix descriptor of rows of 128 bytes at a shared address. (Their swizzle pattern starts at a multiple of 1024
// bytes.) Bits 0..13: address, 16..29: leading offset (1: unused with this layout), 32..45: stride between groups of
// 8 rows, all in units of 16 bytes; 62..63: layout (1: 128-byte swizzle). To move along K, or to other rows in steps
// of 8, add to the address.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kLayout = (uint64_t{1} << 62) | (uint64_t{8 * 128 >> 4} << 32) | (uint64_t{1} << 16);
  return kLayout | ((address & 0x3ffff) >> 4);
}
// The same for an MN-major operand. Each of its rows in shared memory is for one element of K. The row's 128 bytes
// are 64 columns of 16 bits, which go along the matrix's M or N. Leading offset: kSpanBytes, from one span of 64
// columns to the next; stride: from one group of 8 rows to the next. To move along K, which is down the rows, add to
// the address.
template <uint32_t kSpanBytes>
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address) {
  constexpr uint64_t kLayout = (uint64_t{1} << 62) | (uint64_t{8 * 128 >> 4} << 32) | (uint64_t{kSpanBytes >> 4} << 16);
  return kLayout | ((address & 0x3ffff) >> 4);
}
// What to add to a descriptor to move it by `bytes`.
__device__ constexpr uint64_t descriptor_step(uint32_t bytes) {
  return bytes >> 4;
}

// The axis along which an operand's rows in shared memory go. wgmma takes MN-major operands only of 16-bit types.
enum class Major { kK, kMn };

// issue(d, a, b, accumulate): one K step; without `accumulate` d is overwritten, so that it need not be zeroed.
template <class Dtype, uint32_t N, Major kA = Major::kK, Major kB = Major::kK>
struct Wgmma;

// Lists of accumulators for asm statements: FLASHMOE_R<n> has n placeholders of the asm text, FLASHMOE_D<n> the
// operands that replace them.
#define FLASHMOE_R4  "%0, %1, %2, %3"
#define FLASHMOE_R8  FLASHMOE_R4 ", %4, %5, %6, %7"
#define FLASHMOE_R16 FLASHMOE_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHMOE_R24 FLASHMOE_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHMOE_R32 FLASHMOE_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHMOE_R40 FLASHMOE_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHMOE_R48 FLASHMOE_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHMOE_R56 FLASHMOE_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHMOE_R64 FLASHMOE_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHMOE_R80 FLASHMOE_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHMOE_R96 FLASHMOE_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHMOE_R112 \
  FLASHMOE_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHMOE_R128 \
  FLASHMOE_R112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASHMOE_AT4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define FLASHMOE_AT8(i) FLASHMOE_AT4(i), FLASHMOE_AT4((i) + 4)
#define FLASHMOE_D4     FLASHMOE_AT4(0)
#define FLASHMOE_D8     FLASHMOE_AT8(0)
#define FLASHMOE_D16    FLASHMOE_D8, FLASHMOE_AT8(8)
#define FLASHMOE_D24    FLASHMOE_D16, FLASHMOE_AT8(16)
#define FLASHMOE_D32    FLASHMOE_D24, FLASHMOE_AT8(24)
#define FLASHMOE_D40    FLASHMOE_D32, FLASHMOE_AT8(32)
#define FLASHMOE_D48    FLASHMOE_D40, FLASHMOE_AT8(40)
#define FLASHMOE_D56    FLASHMOE_D48, FLASHMOE_AT8(48)
#define FLASHMOE_D64    FLASHMOE_D56, FLASHMOE_AT8(56)
#define FLASHMOE_D80    FLASHMOE_D64, FLASHMOE_AT8(64), FLASHMOE_AT8(72)
#define FLASHMOE_D96    FLASHMOE_D80, FLASHMOE_AT8(80), FLASHMOE_AT8(88)
#define FLASHMOE_D112   FLASHMOE_D96, FLASHMOE_AT8(96), FLASHMOE_AT8(104)
#define FLASHMOE_D128   FLASHMOE_D112, FLASHMOE_AT8(112), FLASHMOE_AT8(120)

// majors: for 16-bit types, the placeholders of the last two immediates, which say of A and of B whether it is
// MN-major.
#define FLASHMOE_WGMMA_ASM(n, count, a_at, b_at, p_at, k, type, majors)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k" #k  \
               ".f32." type "." type " {" FLASHMOE_R##count "}, %" #a_at ", %" #b_at ", p, 1, 1" majors ";\n}" \
               : FLASHMOE_D##count                                                                             \
               : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)), "n"(static_cast<int>(kA)),            \
                 "n"(static_cast<int>(kB)))
#define FLASHMOE_MAJORS(a_at, b_at) ", %" #a_at ", %" #b_at

// For each n: the n / 2 accumulators, and the placeholders' numbers of the five operands that follow them.
#define FLASHMOE_WGMMA(n, count, a_at, b_at, p_at, major_a_at, major_b_at)                                     \
  template <class Dtype, Major kA, Major kB>                                                                   \
  struct Wgmma<Dtype, n, kA, kB> {                                                                             \
    static __device__ __forceinline__ void issue(float (&d)[count], uint64_t a, uint64_t b, bool accumulate) { \
      if constexpr (std::is_same_v<Dtype, Bf16>)                                                               \
        FLASHMOE_WGMMA_ASM(n, count, a_at, b_at, p_at, 16, "bf16", FLASHMOE_MAJORS(major_a_at, major_b_at));   \
      if constexpr (std::is_same_v<Dtype, Fp16>)                                                               \
        FLASHMOE_WGMMA_ASM(n, count, a_at, b_at, p_at, 16, "f16", FLASHMOE_MAJORS(major_a_at, major_b_at));    \
      if constexpr (std::is_same_v<Dtype, Tf32>) {                                                             \
        static_assert(kA == Major::kK && kB == Major::kK);                                                     \
        FLASHMOE_WGMMA_ASM(n, count, a_at, b_at, p_at, 8, "tf32", "");                                         \
      }                                                                                                        \
    }                                                                                                          \
  };
FLASHMOE_WGMMA(8, 4, 4, 5, 6, 7, 8)
FLASHMOE_WGMMA(16, 8, 8, 9, 10, 11, 12)
FLASHMOE_WGMMA(32, 16, 16, 17, 18, 19, 20)
FLASHMOE_WGMMA(48, 24, 24, 25, 26, 27, 28)
FLASHMOE_WGMMA(64, 32, 32, 33, 34, 35, 36)
FLASHMOE_WGMMA(80, 40, 40, 41, 42, 43, 44)
FLASHMOE_WGMMA(96, 48, 48, 49, 50, 51, 52)
FLASHMOE_WGMMA(112, 56, 56, 57, 58, 59, 60)
FLASHMOE_WGMMA(128, 64, 64, 65, 66, 67, 68)
FLASHMOE_WGMMA(256, 128, 128, 129, 130, 131, 132)

// One K step of e4m3 with 64 columns, with A in registers. a[0] and a[1] are four bytes each of rows r and r + 8,
// from byte 4 (t % 4) on; a[2] and a[3] are the four bytes 16 bytes further on. b: the lower half of a
// matrix_descriptor(). The upper half only says the layout, so it is a constant here, which saves registers.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" FLASHMOE_R32 "}, {%32, %33, %34, %35}, b, p, 1, 1;\n}"
      : FLASHMOE_D32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<uint32_t>(accumulate)),
        "n"(1 << 30 | 8 * 128 >> 4));
}

#undef FLASHMOE_WGMMA
#undef FLASHMOE_WGMMA_ASM
#undef FLASHMOE_MAJORS
#undef FLASHMOE_R4
#undef FLASHMOE_R8
#undef FLASHMOE_R16
#undef FLASHMOE_R24
#undef FLASHMOE_R32
#undef FLASHMOE_R40
#undef FLASHMOE_R48
#undef FLASHMOE_R56
#undef FLASHMOE_R64
#undef FLASHMOE_R80
#undef FLASHMOE_R96
#undef FLASHMOE_R112
#undef FLASHMOE_R128
#undef FLASHMOE_D4
#undef FLASHMOE_D8
#undef FLASHMOE_D16
#undef FLASHMOE_D24
#undef FLASHMOE_D32
#undef FLASHMOE_D40
#undef FLASHMOE_D48
#undef FLASHMOE_D56
#undef FLASHMOE_D64
#undef FLASHMOE_D80
#undef FLASHMOE_D96
#undef FLASHMOE_D112
#undef FLASHMOE_D128
#undef FLASHMOE_AT4
#undef FLASHMOE_AT8

}  // namespace flashmoe::sm90

// Loads and copies from device memory that say how the caches are to treat them, and loads from shared memory.
#pragma once

#include <cstdint>

namespace flashmoe::gpu {

// The address that instructions on shared memory take. It is half as wide as a pointer.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads 16 bytes that no thread of this multiprocessor will read again.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Loads 16 bytes of a row that every warp of a multiprocessor loads, and that this kernel may have written before.
__device__ __forceinline__ uint4 load_row16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// Loads 16 bytes of weights, which are loaded once, by one multiprocessor, and never written while the kernel runs.
__device__ __forceinline__ uint4 load_weights16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared16(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ float load_shared4(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ float2 load_shared8(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}

// Loads four 8x8 matrices of 16-bit elements, as fragments. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

}  // namespace flashmoe::gpu

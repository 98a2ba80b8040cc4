// Markers of functions and loops that host and device compilers need, each in its own way.
#pragma once

#if defined(__CUDACC__)
// Layout arithmetic runs on both sides; protocol steps run on the device only, because the Platform they are
// instantiated with has device members.
#define FLASHMOE_HD __host__ __device__ inline
#define FLASHMOE_FN __device__ inline
// Loops over small arrays that must stay in registers.
#define FLASHMOE_UNROLL    _Pragma("unroll")
#define FLASHMOE_NO_UNROLL _Pragma("unroll 1")
#else
#define FLASHMOE_HD inline
#define FLASHMOE_FN inline
#define FLASHMOE_UNROLL
#define FLASHMOE_NO_UNROLL
#endif

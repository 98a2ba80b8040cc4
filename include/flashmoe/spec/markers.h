// Markers of functions and loops that host and device compilers need, each in its own way.
#pragma once

#if defined(__CUDACC__)
// FLASHMOE_HD marks functions for host and device, such as layout arithmetic. FLASHMOE_FN marks steps of the
// protocol, which are for the device only, because they call device functions of their Platform.
#define FLASHMOE_HD __host__ __device__ inline
#define FLASHMOE_FN __device__ inline
// FLASHMOE_UNROLL is for loops over small arrays that must stay in registers.
#define FLASHMOE_UNROLL    _Pragma("unroll")
#define FLASHMOE_NO_UNROLL _Pragma("unroll 1")
#else
#define FLASHMOE_HD inline
#define FLASHMOE_FN inline
#define FLASHMOE_UNROLL
#define FLASHMOE_NO_UNROLL
#endif

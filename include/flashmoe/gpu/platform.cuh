// The GPU's Platform: the 32 lanes of a warp. Scopes are PTX scopes. docs/memory_model.md has every write that another
// actor reads.
#pragma once

#include <type_traits>

#include "flashmoe/protocol/call.h"

namespace flashmoe::gpu {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// The thread's number in its block, read anew. For threadIdx.x, ptxas reads %tid.x once, at the kernel's entry, and
// keeps the number, or what follows from it, in a register through all roles. Most roles have no register to spare,
// so ptxas then spills the number, or something that a loop needs. A volatile read is neither moved nor merged with
// another, so the number is in a register only where it is used. If registers are left, threadIdx.x is cheaper.
__device__ __forceinline__ uint32_t thread_anew() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// One pair of overloads (32 and 64 bits) for each instruction. "memory" keeps the compiler from moving plain accesses
// across the instruction.
#define FLASHMOE_LOAD(name, ptx, tag)                                      \
  static __device__ __forceinline__ uint32_t name(const uint32_t* p tag) { \
    uint32_t v;                                                            \
    asm volatile(ptx ".u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");      \
    return v;                                                              \
  }                                                                        \
  static __device__ __forceinline__ uint64_t name(const uint64_t* p tag) { \
    uint64_t v;                                                            \
    asm volatile(ptx ".u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");      \
    return v;                                                              \
  }
#define FLASHMOE_STORE(name, ptx, tag)                                       \
  static __device__ __forceinline__ void name(uint32_t* p, uint32_t v tag) { \
    asm volatile(ptx ".u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");          \
  }                                                                          \
  static __device__ __forceinline__ void name(uint64_t* p, uint64_t v tag) { \
    asm volatile(ptx ".u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");          \
  }
#define FLASHMOE_ADD(name, ptx)                                                     \
  static __device__ __forceinline__ uint32_t name(uint32_t* p, uint32_t v) {        \
    uint32_t old;                                                                   \
    asm volatile(ptx ".u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory"); \
    return old;                                                                     \
  }                                                                                 \
  static __device__ __forceinline__ uint64_t name(uint64_t* p, uint64_t v) {        \
    uint64_t old;                                                                   \
    asm volatile(ptx ".u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory"); \
    return old;                                                                     \
  }
#define FLASHMOE_TAG(type) , type

// How a kernel whose peers are mapped reaches them: by loads and stores. (Others: gpu/network.cuh.)
struct Mapped {
  static constexpr bool kPeersMapped = true;
  static __device__ __forceinline__ void settle() {}
};
struct Puts;

struct Platform : std::conditional_t<kBuild.rdma, Puts, Mapped> {
  static constexpr uint32_t kLanes = 32;
  static constexpr bool kSleeps = false;
  static constexpr bool kSpansMachines = kBuild.machines, kRelaysApart = true;

  static __device__ __forceinline__ uint32_t lane() {
    uint32_t l;
    asm("mov.u32 %0, %%laneid;" : "=r"(l));
    return l;
  }
  static __device__ __forceinline__ void sync() { __syncwarp(); }
  static __device__ __forceinline__ uint32_t ballot(bool p) { return __ballot_sync(kFullWarp, p); }
  template <class T>
  static __device__ __forceinline__ T broadcast(T v, uint32_t from) {
    return __shfl_sync(kFullWarp, v, static_cast<int>(from));
  }
  static __device__ __forceinline__ uint32_t popcount(uint32_t v) { return static_cast<uint32_t>(__popc(v)); }
  static __device__ __forceinline__ uint32_t nth_bit(uint32_t bits, uint32_t n) {
    return __fns(bits, 0, static_cast<int>(n + 1));
  }
  static __device__ __forceinline__ uint32_t exclusive_scan(uint32_t v, uint32_t& total) {
    uint32_t sum = v;
#pragma unroll
    for (uint32_t d = 1; d < kLanes; d *= 2) {
      const uint32_t lower = __shfl_up_sync(kFullWarp, sum, d);
      if (lane() >= d) sum += lower;
    }
    total = __shfl_sync(kFullWarp, sum, kLanes - 1);
    return sum - v;
  }
  static __device__ __forceinline__ uint32_t rank_among_equal(uint32_t key, bool active, bool& last) {
    const uint32_t equal = __match_any_sync(kFullWarp, key) & ballot(active);
    last = (equal >> lane()) == 1u;
    return popcount(equal & ((1u << lane()) - 1));
  }

  FLASHMOE_LOAD(load_relaxed, "ld.relaxed.gpu", )
  FLASHMOE_LOAD(load_acquire, "ld.acquire.gpu", FLASHMOE_TAG(DeviceScope))
  FLASHMOE_LOAD(load_acquire, "ld.acquire.sys", FLASHMOE_TAG(SystemScope))
  FLASHMOE_STORE(store_relaxed, "st.relaxed.gpu", )
  FLASHMOE_STORE(store_relaxed, "st.relaxed.sys", FLASHMOE_TAG(SystemScope))
  FLASHMOE_STORE(store_release, "st.release.gpu", FLASHMOE_TAG(DeviceScope))
  FLASHMOE_STORE(store_release, "st.release.sys", FLASHMOE_TAG(SystemScope))
  FLASHMOE_ADD(fetch_add, "atom.relaxed.gpu.add")
  FLASHMOE_ADD(fetch_add_acq_rel, "atom.acq_rel.gpu.add")
  FLASHMOE_ADD(post_add, "atom.relaxed.gpu.add")

  // Adds to global memory. Whoever acquires the sum sees what this thread, and other threads before a sync, did before.
  static __device__ __forceinline__ void add_release(uint32_t* p, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
  }
  static __device__ __forceinline__ void add_release(uint64_t* p, uint64_t v) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  }

  // For global memory, relaxed. No value comes back.
  static __device__ __forceinline__ void add(uint64_t* p, uint64_t v) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  }
  static __device__ __forceinline__ void keep_largest(uint64_t* p, uint64_t v) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  }

  static __device__ __forceinline__ uint32_t fetch_add_nearby(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
  static __device__ __forceinline__ uint32_t look_nearby(uint32_t* p) { return atomicOr(p, 0u); }
  static __device__ __forceinline__ void set_nearby(uint32_t* p, uint32_t v) { atomicExch(p, v); }
  static __device__ __forceinline__ uint32_t compare_swap_nearby(uint32_t* p, uint32_t old, uint32_t v) {
    return atomicCAS(p, old, v);
  }
  static __device__ __forceinline__ void fence_nearby() { __threadfence_block(); }

  FLASHMOE_LOAD(poll, "ld.relaxed.gpu", FLASHMOE_TAG(DeviceScope))
  FLASHMOE_LOAD(poll, "ld.relaxed.sys", FLASHMOE_TAG(SystemScope))
  static __device__ __forceinline__ void acquire_fence(DeviceScope) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
  template <class T>
  static __device__ __forceinline__ void acquire(const T* p, DeviceScope scope) {
    load_acquire(p, scope);
  }
  template <class T>
  static __device__ __forceinline__ void acquire(const T* p, SystemScope scope) {
    load_acquire(p, scope);
    settle();
  }
  static __device__ __forceinline__ void release_fence(DeviceScope) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
  template <class T>
  static __device__ __forceinline__ void post(T* p, T v) {
    store_relaxed(p, v);
  }

  static __device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  }
  // A poll of the L2 takes 0.6 us by itself; sleep only once the wait is clearly long.
  static __device__ __forceinline__ void backoff(uint32_t idle) {
    if (idle > 256) __nanosleep(64);
  }

  static __device__ __forceinline__ void rest() { __nanosleep(500); }

  // Here, the team is one warp. See TeamPlatform.
  static __device__ __forceinline__ uint32_t workers() { return 1; }
  static __device__ __forceinline__ uint32_t worker() { return 0; }
  static __device__ __forceinline__ void team_sync() { sync(); }
};

static_assert(RunsProtocol<Platform>);

// The first kTeam warps of a block, side by side: they build a token block's packets. They meet in named barrier
// kBarrier.
template <uint32_t kTeam, uint32_t kBarrier>
struct TeamPlatform : Platform {
  static __device__ __forceinline__ uint32_t workers() { return kTeam; }
  static __device__ __forceinline__ uint32_t worker() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ void team_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kTeam * kLanes) : "memory");
  }
  // For warps that come from different code: bar.sync is aligned, that is, all must execute the same instruction.
  static __device__ __forceinline__ void team_sync_of_roles() {
    asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "n"(kTeam * kLanes) : "memory");
  }
};

#undef FLASHMOE_LOAD
#undef FLASHMOE_STORE
#undef FLASHMOE_ADD
#undef FLASHMOE_TAG

}  // namespace flashmoe::gpu

// Barriers in shared memory (mbarrier), named barriers, and the fences between the generic and the async proxy.
//
// Functions take a barrier's address in shared memory, because all instructions on barriers do; it is half as wide as
// a pointer.
#pragma once

#include <cstdint>

#include "flashmoe/gpu/memory.cuh"

namespace flashmoe::sm90 {

using gpu::shared_address;

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine; the block still has to synchronize.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier, uint32_t times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

// The address of the same place in the shared memory of block `block` of the cluster.
__device__ __forceinline__ uint32_t address_in_block(uint32_t block, uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
template <class T>
__device__ __forceinline__ T* in_block(uint32_t block, T* p) {
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(block));
  return reinterpret_cast<T*>(there);
}
// Arrives at a barrier of block `block`, to say that this thread has read something. It orders no writes: a release
// would take until all of the thread's stores have reached the L2, which is one to two microseconds under load.
__device__ __forceinline__ void arrive_at_block(uint32_t block, uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(block, barrier))
               : "memory");
}
// Arrives at a barrier of block `block`. What this thread did before is visible to a thread whose test_wait_cluster()
// then returns true.
__device__ __forceinline__ void arrive_release_at_block(uint32_t block, uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(block, barrier))
               : "memory");
}
__device__ __forceinline__ void fence_cluster() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

__device__ __forceinline__ void store_in_block(uint32_t block, uint32_t to, uint64_t v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_in_block(block, to)), "l"(v) : "memory");
}

// Arrives, and makes the barrier's current phase also wait until the copy engine has written `bytes` bytes.
__device__ __forceinline__ void arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of the given parity has completed.
#define FLASHMOE_HAS_PASSED(name, ptx)                                              \
  __device__ __forceinline__ bool name(uint32_t barrier, uint32_t parity) {         \
    uint32_t done;                                                                  \
    asm volatile("{\n.reg .pred p;\n" ptx " p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" \
                 : "=r"(done)                                                       \
                 : "r"(barrier), "r"(parity)                                        \
                 : "memory");                                                       \
    return done != 0;                                                               \
  }
// Suspends the thread for a time that the hardware chooses before it returns false.
FLASHMOE_HAS_PASSED(try_wait, "mbarrier.try_wait.parity.shared::cta.b64")
// Returns at once. For barriers at which the other block arrives: if it returns true, it also acquires what the other
// block's threads did before they arrived.
FLASHMOE_HAS_PASSED(test_wait_cluster, "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64")
#undef FLASHMOE_HAS_PASSED

// Waits within a block, by wait() or by test_wait_cluster(), need no time limit of their own. The block's clerk waits
// for tasks with a time limit, and always hands on a task or a stop. The other warps wait only for what they
// themselves do with the tasks that the clerk hands on. The same is true in sm90/decode/alone.cuh, where the warp
// that loads the weights hands on the tasks.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// All threads of the cluster meet. What each of them did before is then visible to all of them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Which block of the cluster this is.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same, but read anew at each call, for code that has no register left to keep the number.
__device__ __forceinline__ uint32_t cluster_rank_anew() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads of the block, by default one warpgroup.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads = 128) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders accesses through the generic proxy before the fence and accesses through the async proxy (TMA, wgmma) after
// the fence, or the reverse. This fence is for accesses to shared memory.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for accesses to global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flashmoe::sm90

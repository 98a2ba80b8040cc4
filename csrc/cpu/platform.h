// The Platform of a CPU: one lane, std::atomic_ref, and a schedule that tests can perturb.
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <thread>

#include "flashmoe/protocol/one_lane.h"
#include "flashmoe/protocol/platform.h"
#include "flashmoe/protocol/refusal.h"
#include "host/bell.h"
#include "host/clock.h"

namespace flashmoe::cpu {

using host::monotonic_ns;

// Delays at atomic operations, drawn from a seed. With them tests reach interleavings which the machine's own scheduler
// rarely produces. Each thread has its own seed; a thread without a seed has no delays.
class Perturbation {
 public:
  static void seed(uint64_t value) { state() = value; }
  static void point() {
    uint64_t& s = state();
    if (s == 0) [[likely]]
      return;
    s ^= s << 13;  // xorshift64: never 0 once seeded
    s ^= s >> 7;
    s ^= s << 17;
    if (s % 64 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(s / 64 % 100));
    } else if (s % 8 == 0) {
      std::this_thread::yield();
    }
  }

 private:
  static uint64_t& state() {
    thread_local uint64_t s = 0;
    return s;
  }
};

// If a rank has peers on other machines, its threads ring this bell after each signal to a peer, so that the courier
// carries what the signal announces.
inline constinit thread_local host::Bell* peers_bell = nullptr;

// Memory operations of any CPU platform. A CPU is coherent, so scopes make no difference to the order of loads and
// stores. But a release at system scope is one that peers read, mostly a signal. So it rings the courier's bell, if the
// rank has peers on other machines.
struct CpuMemory {
  template <class T>
  static T load_relaxed(const T* p) {
    Perturbation::point();
    return std::atomic_ref(*const_cast<T*>(p)).load(std::memory_order_relaxed);
  }
  template <class T, class Scope>
  static T load_acquire(const T* p, Scope) {
    Perturbation::point();
    return std::atomic_ref(*const_cast<T*>(p)).load(std::memory_order_acquire);
  }
  template <class T>
  static void store_relaxed(T* p, T v) {
    Perturbation::point();
    std::atomic_ref(*p).store(v, std::memory_order_relaxed);
  }
  template <class T, class Scope>
  static void store_relaxed(T* p, T v, Scope) {
    store_relaxed(p, v);
  }
  template <class T>
  static void store_release(T* p, T v, DeviceScope) {
    Perturbation::point();
    std::atomic_ref(*p).store(v, std::memory_order_release);
  }
  template <class T>
  static void store_release(T* p, T v, SystemScope) {
    store_release(p, v, kDevice);
    if (peers_bell != nullptr) peers_bell->ring();
  }
  template <class T, class Scope>
  static T poll(const T* p, Scope scope) {
    return load_acquire(p, scope);
  }
  template <class T>
  static void post(T* p, T v) {
    store_release(p, v, kDevice);
  }
  template <class Scope>
  static void acquire(const uint64_t*, Scope) {}
  template <class Scope>
  static void release_fence(Scope) {}
  template <class T>
  static T fetch_add(T* p, T v) {
    Perturbation::point();
    return std::atomic_ref(*p).fetch_add(v, std::memory_order_relaxed);
  }
  static void add(uint64_t* p, uint64_t v) { fetch_add(p, v); }
  static void keep_largest(uint64_t* p, uint64_t v) {
    Perturbation::point();
    std::atomic_ref at(*p);
    for (uint64_t old = at.load(std::memory_order_relaxed); old < v;) {
      if (at.compare_exchange_weak(old, v, std::memory_order_relaxed)) return;
    }
  }
  template <class T>
  static T fetch_add_acq_rel(T* p, T v) {
    Perturbation::point();
    return std::atomic_ref(*p).fetch_add(v, std::memory_order_acq_rel);
  }
  template <class Scope>
  static void acquire_fence(Scope) {}
  template <class T>
  static T post_add(T* p, T v) {
    return fetch_add_acq_rel(p, v);
  }
  static uint32_t fetch_add_nearby(uint32_t* p, uint32_t v) { return fetch_add(p, v); }
  static uint32_t look_nearby(const uint32_t* p) { return load_acquire(p, kDevice); }
  static void set_nearby(uint32_t* p, uint32_t v) { store_release(p, v, kDevice); }
  static uint32_t compare_swap_nearby(uint32_t* p, uint32_t old, uint32_t v) {
    Perturbation::point();
    std::atomic_ref(*p).compare_exchange_strong(old, v, std::memory_order_acq_rel, std::memory_order_acquire);
    return old;
  }
  static void fence_nearby() {}
  static uint32_t nth_bit(uint32_t bits, uint32_t n) {
    for (; n != 0; --n) bits &= bits - 1;
    return static_cast<uint32_t>(std::countr_zero(bits));
  }
  static uint32_t popcount(uint32_t v) { return static_cast<uint32_t>(std::popcount(v)); }
  static uint64_t now_ns() { return monotonic_ns(); }

  static constexpr bool kPeersMapped = true;
  static constexpr bool kSpansMachines = false;

  static void rest() {}  // backoff() is enough

  // There may be more threads than cores. So a waiting thread soon gives its core away, and later for longer.
  static constexpr bool kSleeps = true;
  static void backoff(uint32_t idle) {
    if (idle < 16) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(idle < 64 ? 20 : 200));
    }
  }
};

struct CpuPlatform : CpuMemory, OneLane {
  static uint32_t workers() { return 1; }
  static uint32_t worker() { return 0; }
};
static_assert(RunsProtocol<CpuPlatform>);
// The Platform of a context's calls.
using ContextPlatform = SpreadPlatform<CpuPlatform>;

}  // namespace flashmoe::cpu

// Platforms whose peers are not mapped. Puts go through a network that is as late, and as much out of order, as a
// network may be.
//
// The lane that has issued a put carries it out itself, but later: before one of its later puts, while it waits for
// something, or in quiet(). So if the source of a put changes too early, or a signal overtakes its data, a row gets
// wrong words. Either is also a race that ThreadSanitizer reports, because the network has no thread and no lock of
// its own: these would order accesses that the protocol does not order.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/platform.h"

namespace flashmoe::test {

// The puts of one lane that are on their way.
class Network {
 public:
  // The network of the calling lane.
  static Network& mine() {
    thread_local Network network;
    return network;
  }

  // Called before a call of the layer. heaps: the group's, of heap_bytes each. rank: the rank of the lane.
  void join(uint8_t* const* heaps, uint64_t heap_bytes, uint32_t rank, uint64_t seed) {
    heaps_ = heaps;
    heap_bytes_ = heap_bytes;
    rank_ = rank;
    random_.seed(seed);
  }

  // signal: null for none; bytes: 0 for a signal alone.
  void put(void* to, const void* from, uint32_t bytes, uint64_t* signal, uint64_t word, uint32_t peer) {
    while (random_() % 2 == 0 && !puts_.empty()) step();
    puts_.push_back({bytes == 0 ? nullptr : remote(to, bytes, peer), from, bytes,
                     signal == nullptr ? nullptr : remote(signal, sizeof(uint64_t), peer), word, peer, fences_});
  }
  void fence() { ++fences_; }
  void quiet() {
    while (!puts_.empty()) step();
  }
  // Carries out some puts, as if a while had gone by.
  void rest() {
    while (random_() % 4 != 0 && !puts_.empty()) step();
  }
  bool empty() const { return puts_.empty(); }

 private:
  struct Put {
    void* to;  // null: the bytes are copied
    const void* from;
    uint32_t bytes;
    uint64_t* signal;
    uint64_t word;
    uint32_t peer;
    uint64_t fences;  // how many the lane has issued before the put
  };

  // Takes a random put that no fence holds back. Copies its bytes or, if they are copied already, stores its signal.
  void step() {
    size_t i = random_() % puts_.size();
    for (size_t j = 0; j < puts_.size(); ++j) {
      if (puts_[j].peer == puts_[i].peer && puts_[j].fences < puts_[i].fences) i = j;
    }
    Put& p = puts_[i];
    if (p.to != nullptr) {
      std::memcpy(p.to, p.from, p.bytes);
      p.to = nullptr;
      if (p.signal != nullptr) return;
    } else {
      cpu::CpuMemory::store_release(p.signal, p.word, kSystem);
    }
    puts_.erase(puts_.begin() + static_cast<ptrdiff_t>(i));
  }

  // The same place as `own`, but in the peer's heap.
  template <class T>
  T* remote(T* own, uint64_t bytes, uint32_t peer) const {
    CHECK(peer != rank_);
    const auto at = static_cast<uint64_t>(reinterpret_cast<uint8_t*>(own) - heaps_[rank_]);
    CHECK(at < heap_bytes_ && bytes <= heap_bytes_ - at);
    return reinterpret_cast<T*>(heaps_[peer] + at);
  }

  uint8_t* const* heaps_ = nullptr;
  uint64_t heap_bytes_ = 0;
  uint32_t rank_ = 0;
  uint64_t fences_ = 0;
  std::vector<Put> puts_;
  std::mt19937_64 random_;
};

template <class Base>
struct PutPlatform : Base {
  static constexpr bool kPeersMapped = false;

  static void put(void* to, const void* from, uint32_t bytes, uint32_t peer) {
    put_signal(to, from, bytes, nullptr, 0, peer);
  }
  static void put_signal(void* to, const void* from, uint32_t bytes, uint64_t* signal, uint64_t word, uint32_t peer) {
    Base::sync();
    // Lane 0 issues the put for all lanes, so all must have the same arguments.
    CHECK_EQ(Base::broadcast(reinterpret_cast<uint64_t>(to), 0), reinterpret_cast<uint64_t>(to));
    CHECK_EQ(Base::broadcast(reinterpret_cast<uint64_t>(from), 0), reinterpret_cast<uint64_t>(from));
    CHECK_EQ(Base::broadcast(uint64_t{bytes} << 32 | peer, 0), uint64_t{bytes} << 32 | peer);
    CHECK_EQ(Base::broadcast(word, 0), word);
    CHECK(bytes != 0);
    if (Base::lane() == 0) Network::mine().put(to, from, bytes, signal, word, peer);
  }
  static void fence() {
    Base::sync();
    Network::mine().fence();
    Base::sync();
  }
  static void quiet() {
    Base::sync();
    Network::mine().quiet();
    Base::sync();
  }
  // Called by one lane. The signal arrives at the latest in the next quiet() that this lane's warp calls.
  static void signal(uint64_t* to, uint64_t word, uint32_t peer) {
    Network::mine().put(nullptr, nullptr, 0, to, word, peer);
  }

  static void backoff(uint32_t idle) {
    Network::mine().rest();
    Base::backoff(idle);
  }
};
static_assert(RunsProtocol<PutPlatform<cpu::CpuPlatform>>);

}  // namespace flashmoe::test

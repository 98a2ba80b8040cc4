// Platforms whose peers are not mapped: puts go through a network that is as late, and as out of order, as it may be.
//
// The lane that issued a put carries it out, but later: before one of its later puts, while it waits for something, or in
// quiet(). So a source that changes too early, or a signal that overtakes its data, leaves wrong words in a row, and is a
// race to ThreadSanitizer: there is neither a thread nor a lock of the network's own that would order what the protocol
// does not.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/platform.h"

namespace flashmoe::test {

// One lane's puts that are on their way.
class Network {
 public:
  // The calling lane's.
  static Network& mine() {
    thread_local Network network;
    return network;
  }

  // Before a call: the group's heaps, of heap_bytes each, and the rank that the lane belongs to.
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
  // A while has gone by.
  void rest() {
    while (random_() % 4 != 0 && !puts_.empty()) step();
  }
  bool empty() const { return puts_.empty(); }

 private:
  struct Put {
    void* to;  // null: copied
    const void* from;
    uint32_t bytes;
    uint64_t* signal;
    uint64_t word;
    uint32_t peer;
    uint64_t fences;  // before it
  };

  // Carries out some put that no fence holds back, or the signal behind it.
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

  // The same place in the peer's heap.
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
    // One lane speaks for all, who are to say the same.
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
  // Of one lane, whose quiet() the warp's next one is.
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

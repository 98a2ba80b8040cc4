// Fibres: stacks that one thread switches between, so that tens of thousands of actors run as ordinary C++ without a thread
// each. A switch saves what a function call preserves, and takes some nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/mapping.h"

namespace flashmoe::sim {

// A stack pointer, while its owner does not run.
struct Fibre {
  void* stack = nullptr;
};

// Pushes the registers that calls preserve, leaves the stack pointer in *from, and takes `to` for it.
extern "C" void flashmoe_switch(void** from, void* to);

// Leaves `from`, which goes on where it called this once somebody switches to it.
inline void switch_fibres(Fibre& from, const Fibre& to) {
  flashmoe_switch(&from.stack, to.stack);
}

// Stacks of fibres, of one size; those given back are used again.
class Stacks {
 public:
  // Four times what any actor takes. Not a power of two: a warp's lanes run in turn, and their frames would have the same few
  // lines of the cache.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kBytes = 64 * 1024;  // frames have room between their variables
#else
  static constexpr size_t kBytes = 12 * 1024 + 3 * 64;
#endif

  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  uint8_t* take();
  void give_back(uint8_t* stack) { free_.push_back(stack); }
  // A fibre that calls enter(), which must never return, when it is first switched to.
  static Fibre begin(uint8_t* stack, void (*enter)());

 private:
  std::vector<host::Mapping> slabs_;
  std::vector<uint8_t*> free_;
};

}  // namespace flashmoe::sim

// Fibres: stacks between which one thread switches. So tens of thousands of actors run as ordinary C++ without a thread
// for each. A switch saves the registers that a function call preserves, and takes some nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/mapping.h"

namespace flashmoe::sim {

// The stack pointer of a fibre that does not run.
struct Fibre {
  void* stack = nullptr;
};

// Pushes the registers that calls preserve, stores the stack pointer in *from, and continues on the stack `to`.
extern "C" void flashmoe_switch(void** from, void* to);

// Leaves `from`. It goes on from here once somebody switches to it.
inline void switch_fibres(Fibre& from, const Fibre& to) {
  flashmoe_switch(&from.stack, to.stack);
}

// Stacks of fibres, all of one size. A stack that is given back is used again.
class Stacks {
 public:
  // Four times what any actor needs. Not a power of two: a warp's lanes run in turn, and with a power of two their
  // frames would share the same few lines of the cache.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kBytes = 64 * 1024;  // AddressSanitizer leaves room between a frame's variables
#else
  static constexpr size_t kBytes = 12 * 1024 + 3 * 64;
#endif

  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  uint8_t* take();
  void give_back(uint8_t* stack) { free_.push_back(stack); }
  // A fibre that calls enter() when it is first switched to. enter() must never return.
  static Fibre begin(uint8_t* stack, void (*enter)());

 private:
  std::vector<host::Mapping> slabs_;
  std::vector<uint8_t*> free_;
};

}  // namespace flashmoe::sim

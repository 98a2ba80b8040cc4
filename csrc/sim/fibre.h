// Fibres: stacks between which one thread switches. So tens of thousands of actors can run as ordinary C++ code,
// without a thread for each. A switch saves the registers that a function call preserves, and takes some nanoseconds.
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

// Stops the running fibre, which `from` then stands for, and continues `to`. Returns when somebody switches to
// `from`.
inline void switch_fibres(Fibre& from, const Fibre& to) {
  flashmoe_switch(&from.stack, to.stack);
}

// Stacks of fibres, all of one size. A stack that is given back is used again.
class Stacks {
 public:
  // Four times what any actor needs. Not a power of two: the lanes of a warp run in turn, and if their stacks were a
  // power of two apart, their frames would compete for the same few lines of the cache.
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
  // Makes a fibre that calls enter() when it is switched to for the first time. enter() must never return.
  static Fibre begin(uint8_t* stack, void (*enter)());

 private:
  std::vector<host::Mapping> slabs_;
  std::vector<uint8_t*> free_;
};

}  // namespace flashmoe::sim

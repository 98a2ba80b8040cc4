// Fibres: stacks that one thread switches between, so that tens of thousands of actors run as ordinary C++ without a thread
// each. A switch saves what a function call preserves, and takes some nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashmoe::sim {

// A stack pointer, while its owner does not run.
struct Fibre {
  void* stack = nullptr;
};

// Leaves `from`, which goes on where it called this once somebody switches to it.
void switch_fibres(Fibre& from, const Fibre& to);

// Stacks of fibres, of one size; those given back are used again.
class Stacks {
 public:
  static constexpr size_t kBytes = 32 * 1024;

  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  uint8_t* take();
  void give_back(uint8_t* stack) { free_.push_back(stack); }
  // A fibre that calls enter(), which must never return, when it is first switched to.
  static Fibre begin(uint8_t* stack, void (*enter)());

 private:
  std::vector<uint8_t*> slabs_, free_;
};

}  // namespace flashmoe::sim

#include "sim/fibre.h"

#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "csrc/sim/fibre.cpp: no switch of fibres for this processor; x86-64 and AArch64 have one"
#endif

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl flashmoe_switch
.hidden flashmoe_switch
.type flashmoe_switch, @function
flashmoe_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashmoe_switch, .-flashmoe_switch
)");
#else
asm(R"(
.text
.p2align 4
.globl flashmoe_switch
.hidden flashmoe_switch
.type flashmoe_switch, %function
flashmoe_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size flashmoe_switch, .-flashmoe_switch
)");
#endif
namespace flashmoe::sim {
namespace {

constexpr size_t kSlabStacks = 1024;

// Tells AddressSanitizer that there are no frames in this memory. A fibre never returns from its last frames. So
// without this call AddressSanitizer would apply what it knows of these frames to the next user of the memory.
void forget([[maybe_unused]] uint8_t* memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory, bytes);
#endif
}

}  // namespace

Stacks::~Stacks() {
  for (const host::Mapping& slab : slabs_) forget(slab.base(), kSlabStacks * kBytes);
}

uint8_t* Stacks::take() {
  if (free_.empty()) {
    uint8_t* const slab = slabs_.emplace_back(-1, kSlabStacks * kBytes).base();
    // Asks for huge pages, because with small pages a switch of fibres misses the TLB. If the system refuses,
    // switches are only slower.
    madvise(slab, kSlabStacks * kBytes, MADV_HUGEPAGE);
    for (size_t i = kSlabStacks; i-- != 0;) free_.push_back(slab + i * kBytes);
  }
  uint8_t* const stack = free_.back();
  free_.pop_back();
  return stack;
}

Fibre Stacks::begin(uint8_t* stack, void (*enter)()) {
  forget(stack, kBytes);
  auto* top = reinterpret_cast<uint64_t*>(stack + kBytes);
#if defined(__x86_64__)
  // When enter() begins, the stack pointer is to be 8 below a multiple of 16, as it is after a call. The zero lies
  // where a call would have put the return address.
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(enter);
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  constexpr int kSaved = 20, kReturnAddress = 11;
  top -= kSaved;
  for (int i = 0; i < kSaved; ++i) top[i] = 0;
  top[kReturnAddress] = reinterpret_cast<uint64_t>(enter);
#endif
  return {top};
}

}  // namespace flashmoe::sim

// A GEMM for which there is no memory throws. The next one of its shape works as if nothing had happened.
#include <cstdlib>
#include <new>
#include <vector>

#include "check.h"
#include "cpu/gemm.h"

namespace {

// An allocation of more bytes than this fails.
size_t most_bytes = SIZE_MAX;

}  // namespace

void* operator new(size_t bytes) {
  if (bytes > most_bytes) throw std::bad_alloc();
  if (void* const p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

namespace flashmoe::test {
namespace {

// This shape is new to the engine. So the engine has to find out which sizes of BLAS calls it may use for it, which
// takes large buffers: here, allocating them fails. The note of what it has found takes only small ones.
void check_a_shape_that_has_failed() {
  using namespace flashmoe::cpu;
  constexpr uint32_t kRows = 3, kColumns = 24, kLength = 40;
  bool thrown = false;
  most_bytes = 4096;
  try {
    padded_rows(kRows, kColumns, kLength);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  most_bytes = SIZE_MAX;
  CHECK(thrown);

  const uint32_t padded = padded_rows(kRows, kColumns, kLength);
  CHECK(padded >= kRows);
  const std::vector<float> a(size_t{padded} * kLength, 1.0f), w(size_t{kColumns} * kLength, 2.0f);
  std::vector<float> out(size_t{padded} * kColumns);
  GemmBuffers buffers;
  gemm(out.data(), a.data(), kRows, w.data(), kLength, DType::kFloat32, kColumns, kLength, buffers);
  for (size_t i = 0; i < size_t{kRows} * kColumns; ++i) CHECK_EQ(out[i], 2.0f * kLength);
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  flashmoe::test::check_a_shape_that_has_failed();
  std::puts("a shape whose first GEMM found no memory has its second");
}

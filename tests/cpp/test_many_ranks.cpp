// Groups of more ranks than a word has bits, than a warp has lanes, and than the CUDA engine takes. A rank has one
// processor, and few tokens. abstract_group.h has what is checked in each call.
#include "compiled_once.h"
#include "lane_calls.h"

namespace flashmoe::test {
namespace {

Limits many(uint32_t ranks) {
  Limits l = limits(ranks, 1);
  l.max_tokens = ranks > 128 ? 2 : 9;
  l.hidden = l.intermediate = 2;
  l.experts = l.max_local_experts = 12;
  l.top_k = 4;
  l.return_slots = ranks;
  return l;
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using flashmoe::cpu::CpuPlatform;
  run_calls<CpuPlatform>("1 lane", many(33), 10, 1);
// With ThreadSanitizer, a thousand threads take minutes. To find races, a few more ranks than a word has bits are
// enough.
#if defined(__SANITIZE_THREAD__)
  run_calls<CpuPlatform>("1 lane", many(65), 2, 2);
#else
  run_calls<CpuPlatform>("1 lane", many(128), 2, 2);
  run_calls<CpuPlatform>("1 lane", many(512), 1, 3);
#endif
  run_calls<WarpPlatform<4>>("4 lanes", many(33), 2, 5, {.formers = 1});
}

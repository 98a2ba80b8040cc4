// Random calls on four ranks. About a quarter of the calls are refused by some of the ranks. A rank that refuses a
// call goes on at once, so ranks are as far ahead of one another as they may be. If nobody refuses a call, the result
// of every rank is compared with a reference in fp64. Otherwise every rank that has not refused the call gets an
// error that names a rank that has.
//
//   test_refused_calls [calls]
#include <cstdlib>
#include <string>
#include <thread>

#include "host/error.h"
#include "host/text.h"
#include "random_calls.h"

namespace flashmoe::test {
namespace {

using namespace flashmoe::cpu;
using host::concat;

constexpr uint32_t kCallsPerGroup = 100;

// Which ranks refuse call n: bit p is for rank p.
uint32_t refusers_of(uint32_t n) {
  std::mt19937_64 random(n + 77);
  return random() % 4 == 0 ? static_cast<uint32_t>(random()) % (1u << kRanks) : 0;
}

std::string reason_of(uint32_t n, uint32_t p) {
  return concat("call ", n, ": expected nothing of rank ", p, std::string(n % 3 == 0 ? 2 * kReasonBytes : 0, '.'));
}

bool names_refuser(const host::Error& e, uint32_t refusers, uint32_t n, uint64_t epoch) {
  for (uint32_t p = 0; p < kRanks; ++p) {
    if ((refusers >> p & 1) == 0) continue;
    const std::string expected = concat("rank ", p, " refused call ", epoch, ": ", reason_of(n, p));
    const std::string got = e.what();
    const size_t known = std::min<size_t>(expected.size(), kReasonBytes);  // a long reason is cut
    if (got.substr(0, known) == expected.substr(0, known)) return true;
  }
  return false;
}

void run_rank(uint32_t p, Context& context, uint32_t first, uint32_t n, const Limits& l) {
  std::mt19937_64 random(first * kRanks + p);
  for (uint32_t i = first; i < first + n; ++i) {
    const uint32_t refusers = refusers_of(i);
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 10));
    if ((refusers >> p & 1) != 0) {
      context.refuse(reason_of(i, p));
      continue;
    }
    Work work(i, l);
    bool named = false;
    try {
      work.run(p, context);
    } catch (const host::Error& e) {
      if (!names_refuser(e, refusers, i, i - first + 1)) std::printf("rank %u, call %u: %s\n", p, i, e.what());
      CHECK(names_refuser(e, refusers, i, i - first + 1));
      CHECK(e.kind == host::Error::Kind::kGroup);
      named = true;
    }
    CHECK_EQ(named, refusers != 0);
    if (!named) work.verify(p);
  }
}

void run_group(uint32_t first, uint32_t n) {
  const Limits l = call_limits();
  std::vector<std::unique_ptr<host::Group>> groups = host::make_thread_groups(kRanks, member_heap_bytes(l));
  std::vector<std::thread> ranks;
  for (uint32_t p = 0; p < kRanks; ++p) {
    ranks.emplace_back([&, p] {
      Context context(std::move(groups[p]), p, l, 60'000'000'000);
      context.set_tile(4, 8);
      run_rank(p, context, first, n, l);
    });
  }
  for (std::thread& t : ranks) t.join();
}

}  // namespace
}  // namespace flashmoe::test

int main(int argc, char** argv) {
  using namespace flashmoe::test;
  const uint32_t calls = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 600;
  for (uint32_t first = 0; first < calls; first += kCallsPerGroup) {
    run_group(first, std::min(kCallsPerGroup, calls - first));
  }
  std::printf("%u calls on %u ranks\n", calls, kRanks);
}
